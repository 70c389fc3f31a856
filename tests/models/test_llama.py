from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.models.llama import modeling_llama

from lowtide.models.llama import Llama, LlamaConfig, grouped_attention, rope_tables, rotate
from tests.models.training import gradients, train_losses

SIZES = {"vocab_size": 61, "num_layers": 3, "hidden_size": 32, "intermediate_size": 56, "num_heads": 4}
TINY = LlamaConfig(context_length=64, num_kv_heads=2, rope_theta=500_000.0, **SIZES)
NAMES = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(TINY.vocab_size, shape, generator=torch.Generator().manual_seed(1))


def _theirs() -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=TINY.vocab_size,
        hidden_size=TINY.hidden_size,
        intermediate_size=TINY.intermediate_size,
        num_hidden_layers=TINY.num_layers,
        num_attention_heads=TINY.num_heads,
        num_key_value_heads=TINY.num_kv_heads,
        rms_norm_eps=TINY.norm_eps,
        max_position_embeddings=TINY.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": TINY.rope_theta},
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def _their_name(name: str) -> str:
    if not name.startswith("layers."):
        outer = {"token_embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
        return f"{outer[name.removesuffix('.weight')]}.weight"
    _, index, rest = name.split(".", 2)
    return f"model.layers.{index}.{NAMES[rest.removesuffix('.weight')]}.weight"


def _pair() -> tuple[Llama, transformers.LlamaForCausalLM]:
    ours, theirs = Llama(TINY), _theirs()
    source = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        parameter.data.copy_(source[_their_name(name)])
    return ours, theirs


def test_loss_and_logits_equal_transformers() -> None:
    ours, theirs = _pair()
    ids = _ids(3, 29)
    labels = ids.clone()
    labels[1, :4] = -100
    mine, other = ours(input_ids=ids, labels=labels), theirs(input_ids=ids, labels=labels)
    torch.testing.assert_close(mine.logits, other.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.loss, other.loss, rtol=1e-5, atol=1e-6)


def test_gradients_equal_transformers() -> None:
    ours, theirs = _pair()
    batch = {"input_ids": _ids(2, 12), "labels": _ids(2, 12)}
    mine, other = gradients(ours, batch), gradients(theirs, batch)
    assert len(mine) == len(other) == 3 * 9 + 3
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, other[_their_name(name)], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_heads_equal_repeated_ones(dtype: torch.dtype) -> None:
    query = torch.randn(2, 6, 9, 8, dtype=dtype)
    key, value = torch.randn(2, 2, 9, 8, dtype=dtype), torch.randn(2, 2, 9, 8, dtype=dtype)
    # Query head h uses head h // 3 of key and value.
    repeated = [torch.stack([t[:, h // 3] for h in range(6)], dim=1) for t in (key, value)]
    expected = F.scaled_dot_product_attention(query, *repeated, is_causal=True)
    torch.testing.assert_close(grouped_attention(query, key, value), expected)


def test_loss_falls() -> None:
    torch.manual_seed(0)
    ids = _ids(2, 16)
    losses = train_losses(Llama(TINY), {"input_ids": ids, "labels": ids}, steps=15)
    assert losses[0] == pytest.approx(math.log(TINY.vocab_size), rel=0.05)
    assert losses[-1] < 0.7 * losses[0]


def test_tied_head_is_the_token_embedding() -> None:
    tied = Llama(LlamaConfig(context_length=64, num_kv_heads=4, tied=True, **SIZES))
    untied = Llama(LlamaConfig(context_length=64, num_kv_heads=4, **SIZES))
    assert tied.head.weight is tied.token_embedding.weight
    difference = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert difference == SIZES["vocab_size"] * SIZES["hidden_size"]


def test_recomputation_changes_no_gradient() -> None:
    torch.manual_seed(0)
    model = Llama(TINY)
    batch = {"input_ids": _ids(2, 12), "labels": _ids(2, 12)}
    plain = gradients(model, batch)
    model.gradient_checkpointing_enable()
    recomputed = gradients(model, batch)
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_a_model_from_the_meta_device_computes_like_any_other() -> None:
    with torch.device("meta"):
        model = Llama(TINY)
    model.to_empty(device="cpu")
    other = Llama(TINY)
    model.load_state_dict(other.state_dict())
    ids = _ids(1, 8)
    assert torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits)


CPU = torch.device("cpu")


def test_tables_and_rotation_equal_transformers() -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}
    )
    length, head_size = 37, 16
    query = torch.randn(2, 4, length, head_size)
    key = torch.randn(2, 2, length, head_size)
    their_cos, their_sin = modeling_llama.LlamaRotaryEmbedding(config)(query, torch.arange(length)[None])
    cos, sin = rope_tables(length, head_size, theta=500_000.0, device=CPU)
    torch.testing.assert_close(cos, their_cos[0])
    torch.testing.assert_close(sin, their_sin[0])
    their_query, their_key = modeling_llama.apply_rotary_pos_emb(query, key, their_cos, their_sin)
    torch.testing.assert_close(rotate(query, cos, sin), their_query)
    torch.testing.assert_close(rotate(key, cos, sin), their_key)


def test_scores_depend_on_distance_only() -> None:
    # The property the method is named for: moving query and key together leaves their product alone.
    query, key = torch.randn(16), torch.randn(16)
    cos, sin = rope_tables(40, 16, theta=10_000.0, device=CPU)
    queries = rotate(query.expand(1, 1, 40, 16), cos, sin)[0, 0]
    keys = rotate(key.expand(1, 1, 40, 16), cos, sin)[0, 0]
    torch.testing.assert_close(queries[9] @ keys[4], queries[35] @ keys[30], rtol=1e-4, atol=1e-5)


def test_low_precision_is_not_promoted() -> None:
    cos, sin = rope_tables(8, 16, theta=10_000.0, device=CPU)
    assert rotate(torch.randn(1, 1, 8, 16, dtype=torch.bfloat16), cos, sin).dtype == torch.bfloat16
