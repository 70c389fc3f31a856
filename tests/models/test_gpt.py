from __future__ import annotations

import math

import pytest
import torch
import transformers

from lowtide.models.gpt import GPT, GPTConfig
from tests.models.training import gradients, train_losses

TINY = GPTConfig(vocab_size=61, context_length=24, num_layers=3, hidden_size=32, num_heads=4, dropout=0.0)


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(TINY.vocab_size, shape, generator=torch.Generator().manual_seed(1))


def _theirs() -> transformers.GPT2LMHeadModel:
    config = transformers.GPT2Config(
        vocab_size=TINY.vocab_size,
        n_positions=TINY.context_length,
        n_embd=TINY.hidden_size,
        n_layer=TINY.num_layers,
        n_head=TINY.num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


NAMES = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def _copy_weights(ours: GPT, theirs: transformers.GPT2LMHeadModel) -> None:
    source = dict(theirs.transformer.named_parameters())
    for name, parameter in ours.named_parameters():
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            module, kind = rest.rsplit(".", 1)
            value = source[f"h.{index}.{NAMES[module]}.{kind}"]
            is_matrix = value.dim() == 2  # theirs are stored transposed
            parameter.data.copy_(value.T if is_matrix else value)
        else:
            outer = {
                "token_embedding.weight": "wte.weight",
                "position_embedding.weight": "wpe.weight",
                "final_norm.weight": "ln_f.weight",
                "final_norm.bias": "ln_f.bias",
            }
            parameter.data.copy_(source[outer[name]])


def test_loss_and_logits_equal_transformers() -> None:
    ours, theirs = GPT(TINY), _theirs()
    _copy_weights(ours, theirs)
    ids = _ids(3, 17)
    labels = ids.clone()
    labels[0, 5:9] = -100
    mine, other = ours(input_ids=ids, labels=labels), theirs(input_ids=ids, labels=labels)
    torch.testing.assert_close(mine.logits, other.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.loss, other.loss, rtol=1e-5, atol=1e-6)


def test_gradients_equal_transformers() -> None:
    ours, theirs = GPT(TINY), _theirs()
    _copy_weights(ours, theirs)
    batch = {"input_ids": _ids(2, 12), "labels": _ids(2, 12)}
    mine, other = gradients(ours, batch), gradients(theirs, batch)
    torch.testing.assert_close(mine["token_embedding.weight"], other["transformer.wte.weight"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        mine["layers.1.attention.qkv.weight"], other["transformer.h.1.attn.c_attn.weight"].T, rtol=1e-4, atol=1e-6
    )


def test_loss_falls() -> None:
    torch.manual_seed(0)
    ids = _ids(2, 16)
    losses = train_losses(GPT(TINY), {"input_ids": ids, "labels": ids}, steps=15)
    assert losses[0] == pytest.approx(math.log(TINY.vocab_size), rel=0.05)
    assert losses[-1] < 0.7 * losses[0]


def test_head_is_the_token_embedding() -> None:
    model = GPT(TINY)
    assert model.head.weight is model.token_embedding.weight


def test_dropout_acts_in_training_only() -> None:
    config = GPTConfig(vocab_size=61, context_length=24, num_layers=1, hidden_size=32, num_heads=4, dropout=0.5)
    model, ids = GPT(config), _ids(1, 8)
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    model.eval()
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_no_token_sees_a_later_one() -> None:
    model, ids = GPT(TINY), _ids(1, 10)
    changed = ids.clone()
    changed[0, 6:] = (changed[0, 6:] + 1) % TINY.vocab_size
    before, after = model(input_ids=ids).logits, model(input_ids=changed).logits
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])
    assert model(input_ids=ids).loss is None


def test_a_model_from_the_meta_device_can_be_initialised_later() -> None:
    with torch.device("meta"):
        model = GPT(TINY)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.reset_parameters()
    assert model.head.weight is model.token_embedding.weight
    scale = model.layers[0].mlp.down.weight.std().item()
    assert scale == pytest.approx(0.02 / math.sqrt(2 * TINY.num_layers), rel=0.1)
    assert {n for n, p in model.named_parameters() if not p.isfinite().all()} == set()
