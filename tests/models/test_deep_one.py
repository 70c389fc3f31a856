from __future__ import annotations

import dataclasses
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.models import deep_one
from lowtide.models.deep_one import (
    AttentionKind,
    Block,
    DeepOne,
    DeepOneConfig,
    LossKind,
    NormKind,
    RMSNorm,
    copied_logits_loss,
)
from lowtide.models.layers import IGNORED_LABEL
from lowtide.models.registry import BUILT_INS
from tests.models.live_bytes import saved_bytes
from tests.models.training import gradients, train_losses

MIB = 2**20
TINY = DeepOneConfig(vocab_size=61, context_length=24, num_layers=2, hidden_size=32, intermediate_size=56, num_heads=4)
FULL = BUILT_INS["deep-one-1.6b"].config
assert isinstance(FULL, DeepOneConfig)


def _ids(*shape: int) -> Tensor:
    return torch.randint(2, TINY.vocab_size, shape, generator=torch.Generator().manual_seed(1))


def test_has_the_parameters_of_the_experiment() -> None:
    with torch.device("meta"):
        model = DeepOne(FULL)
    parameters = list(model.parameters())
    assert sum(p.numel() for p in parameters) == 1_631_455_744
    assert len(parameters) == 323
    assert all(p.requires_grad for p in parameters)
    assert sum(p.numel() for p in model.layers[0].parameters()) == 49_958_928
    assert list(model.buffers()) == []
    assert pytest.approx(2.828, abs=5e-4) == FULL.alpha
    assert pytest.approx(0.25) == FULL.beta


class _EfficientAttention(torch.autograd.Function):
    """Keeps what the memory-efficient CUDA kernel keeps, without computing anything."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        batch, heads, length, size = query.shape
        out = query.new_empty(batch, length, heads, size).transpose(1, 2)
        ctx.save_for_backward(query, key, value, bias, out, query.new_empty(batch, heads, length, dtype=torch.float32))
        return out


@pytest.mark.parametrize(
    ("dtype", "expected_mib"),
    [
        # As large as one hidden tensor (24 MiB): query, key, value, attention out, and per norm its input, normalised input and
        # output; as large as one inner tensor (63.28 MiB): up, relu(gate), product; bias 36, distances 2.25, mask 0.5625,
        # logsumexp 0.1875, rsqrt of each norm 12 KiB.
        (torch.float32, 10 * 24 + 3 * 63.28125 + 36 + 2.25 + 0.5625 + 0.1875 + 2 * 0.01171875),
        # Norm: fp32 input and fp32 normalised input, bf16 output; everything else but the mask and logsumexp halves.
        (torch.bfloat16, 4 * 12 + 2 * 60 + 3 * 31.640625 + 18 + 1.125 + 0.5625 + 0.1875 + 2 * 0.01171875),
    ],
)
def test_one_layer_keeps_what_the_experiment_measured(
    dtype: torch.dtype, expected_mib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        deep_one.F,
        "scaled_dot_product_attention",
        lambda query, key, value, attn_mask: _EfficientAttention.apply(query, key, value, attn_mask),
    )
    with torch.device("meta"):
        layer = Block(FULL).to(dtype)
        x = torch.empty(4, 768, 2048, dtype=dtype)
    out: list[Tensor] = []
    kept = saved_bytes(lambda: out.append(layer(x)) or out[0], but_not=[x, *layer.parameters()])
    # The output is the next layer's input: kept by its first product.
    assert kept + out[0].untyped_storage().nbytes() == expected_mib * MIB


def test_norm_kinds_compute_the_same() -> None:
    x = torch.randn(3, 5, 32)
    norms = [RMSNorm(dataclasses.replace(TINY, norm=kind)) for kind in NormKind]
    for norm in norms:
        torch.nn.init.uniform_(norm.weight, generator=torch.Generator().manual_seed(0))
    expected = x / (x.square().mean(-1, keepdim=True) + TINY.norm_eps).sqrt() * norms[0].weight
    for norm in norms:
        torch.testing.assert_close(norm(x), expected)
        assert norm.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_layer_equals_a_literal_reading_of_the_recipe() -> None:
    torch.manual_seed(0)
    layer = Block(TINY)
    torch.nn.init.uniform_(layer.attention.slopes)
    x = start = torch.randn(2, 7, 32)
    heads, size = TINY.num_heads, 32 // TINY.num_heads

    def norm(value: Tensor) -> Tensor:
        return F.rms_norm(value, (32,), None, TINY.norm_eps)

    attention = layer.attention
    query, key, value = (p(x).view(2, 7, heads, size) for p in (attention.query, attention.key, attention.value))
    mixed = torch.zeros(2, 7, heads, size)
    for head in range(heads):
        for i in range(7):
            scores = (query[:, i, head, None] * key[:, : i + 1, head]).sum(-1) / math.sqrt(size)
            scores = scores + attention.slopes[head] * (torch.arange(i + 1) - i)
            mixed[:, i, head] = (scores.softmax(-1)[..., None] * value[:, : i + 1, head]).sum(1)
    x = norm(TINY.alpha * x + attention.out(mixed.flatten(2)))
    expected = norm(TINY.alpha * x + layer.mlp.down(layer.mlp.up(x) * layer.mlp.gate(x).clamp(min=0)))
    torch.testing.assert_close(layer(start), expected, rtol=1e-4, atol=1e-5)


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model = DeepOne(dataclasses.replace(TINY, num_heads=16, hidden_size=256, vocab_size=512))
    exponents = [1 + 7 * i / 15 for i in range(8)]
    expected = torch.tensor([2.0**-e for e in exponents] + [0.0] * 8)
    torch.testing.assert_close(model.layers[1].attention.slopes.data, expected)
    assert model.token_embedding.weight[1].abs().max() == 0
    assert model.token_embedding.weight[2:].std().item() == pytest.approx(256**-0.5, rel=0.02)
    # Xavier-uniform is bounded by gain * sqrt(6 / (fan_in + fan_out)), and nearly reaches it.
    bound = math.sqrt(6 / 512)
    assert model.layers[0].attention.query.weight.abs().max().item() == pytest.approx(bound, rel=0.01)
    assert model.layers[0].attention.out.weight.abs().max().item() == pytest.approx(bound * model.config.beta, rel=0.01)


def test_loss_is_the_mean_over_labels_that_count() -> None:
    logits, labels = torch.randn(2, 5, 61), _ids(2, 5)
    labels[1, 3:] = -100
    log_p = logits.log_softmax(-1)
    picked = [log_p[b, t, labels[b, t + 1]] for b in range(2) for t in range(4) if labels[b, t + 1] != -100]
    torch.testing.assert_close(copied_logits_loss(logits, labels), -torch.stack(picked).mean())
    assert copied_logits_loss(logits, torch.full((2, 5), -100)).item() == 0.0


def test_loss_falls_and_slopes_learn() -> None:
    torch.manual_seed(0)
    model, ids = DeepOne(TINY), _ids(2, 16)
    before = model.layers[0].attention.slopes.detach().clone()
    losses = train_losses(model, {"input_ids": ids, "labels": ids}, steps=15)
    assert losses[-1] < 0.7 * losses[0]
    assert not torch.equal(before, model.layers[0].attention.slopes)


def test_recomputation_changes_no_gradient() -> None:
    torch.manual_seed(0)
    model, ids = DeepOne(TINY), _ids(2, 16)
    plain = gradients(model, {"input_ids": ids, "labels": ids})
    model.gradient_checkpointing_enable()
    recomputed = gradients(model, {"input_ids": ids, "labels": ids})
    assert len(plain) == 2 * 10 + 3
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_recomputation_keeps_the_layer_inputs_only() -> None:
    with torch.device("meta"):
        model, ids = DeepOne(TINY), torch.zeros(2, 16, dtype=torch.int64)
    but_not = [ids, *model.parameters()]
    model.gradient_checkpointing_enable()
    x = model.token_embedding(ids)
    kept = saved_bytes(lambda: model.layers(x), but_not=but_not)
    assert kept == TINY.num_layers * ids.numel() * TINY.hidden_size * 4
    model.gradient_checkpointing_disable()
    assert saved_bytes(lambda: model.layers(x), but_not=but_not) > 10 * kept


def test_logits_die_with_the_output() -> None:
    model, ids = DeepOne(TINY), _ids(2, 16)
    logits: list[weakref.ref[Tensor]] = []
    model.head.register_forward_hook(lambda module, args, output: logits.append(weakref.ref(output)))
    loss = model(input_ids=ids, labels=ids).loss
    assert loss.grad_fn is not None
    assert logits[0]() is None


def test_a_chunked_loss_is_the_same_without_logits() -> None:
    copied, chunked = DeepOne(TINY), DeepOne(dataclasses.replace(TINY, loss=LossKind.CHUNKED))
    chunked.load_state_dict(copied.state_dict())
    ids = torch.randint(0, TINY.vocab_size, (3, 16), generator=torch.Generator().manual_seed(3))
    labels = ids.masked_fill(torch.arange(16) > 12, IGNORED_LABEL)
    one, other = copied(ids, labels), chunked(ids, labels)
    assert other.logits is None
    torch.testing.assert_close(one.loss, other.loss)
    one.loss.backward()
    other.loss.backward()
    for (name, first), second in zip(copied.named_parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(first.grad, second.grad, msg=name)
    assert chunked(ids).logits is not None
    assert chunked(ids, torch.full_like(ids, IGNORED_LABEL)).loss == 0


def test_math_attention_is_the_same() -> None:
    efficient, math_ = DeepOne(TINY), DeepOne(dataclasses.replace(TINY, attention=AttentionKind.MATH))
    math_.load_state_dict(efficient.state_dict())
    ids = torch.randint(0, TINY.vocab_size, (2, 16))
    torch.testing.assert_close(efficient(ids).logits, math_(ids).logits)
