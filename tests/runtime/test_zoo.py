"""The zoo itself: its models are deterministic, train in both precisions, and its comparison sees one flipped bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.zoo import (
    NUM_BATCHES,
    ZOO,
    assert_same,
    assert_same_tensors,
    bf16_safe,
    train,
    zoo,
)

by_model = pytest.mark.parametrize("name", ZOO)


def run(name: str, *, dropout: bool, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, list[float]]:
    entry = zoo(name)
    model = entry.build(dropout, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return model, train(model, optimizer, entry.batches(), loss=entry.loss)


@by_model
def test_two_plain_runs_are_the_same_and_learn(name: str) -> None:
    first, first_losses = run(name, dropout=True)
    torch.rand(7)  # what was drawn between two builds must not matter
    second, second_losses = run(name, dropout=True)
    assert_same(first, second, first_losses, second_losses)
    assert len(first_losses) == NUM_BATCHES
    untrained = dict(zoo(name).build(True, torch.float32).named_parameters())
    assert [key for key, value in first.named_parameters() if torch.equal(value, untrained[key])] == []
    assert sum(first_losses[-5:]) < 0.97 * sum(first_losses[:5])


@by_model
def test_dropout_is_on_only_when_asked_for(name: str) -> None:
    entry = zoo(name)
    batch = entry.make_batch(0)
    different = {}
    for dropout in (False, True):
        model = entry.build(dropout, torch.float32)
        torch.manual_seed(1)
        first = entry.loss(model, batch).item()
        different[dropout] = entry.loss(model, batch).item() != first
    assert different == {False: False, True: entry.has_dropout}


@by_model
def test_models_train_in_bf16(name: str) -> None:
    with bf16_safe():
        model, losses = run(name, dropout=True, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])


def test_bf16_safe_puts_onednn_back() -> None:
    before = torch.backends.mkldnn.enabled
    with bf16_safe():
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled == before


def test_accumulation_is_one_step_on_the_mean() -> None:
    # Without dropout, two backward calls on the same batch add up to one on it, exactly: x/2 + x/2.
    entry = zoo("gpt")
    batches = entry.batches(3)
    doubled = [batch for batch in batches for _ in range(2)]
    once, twice = entry.build(False, torch.float32), entry.build(False, torch.float32)
    losses = train(once, torch.optim.SGD(once.parameters(), lr=0.1), batches)
    doubled_losses = train(twice, torch.optim.SGD(twice.parameters(), lr=0.1), doubled, accumulation=2)
    assert_same(once, twice, losses, doubled_losses[::2])
    assert doubled_losses[::2] == doubled_losses[1::2]


def test_clipping_and_schedule_reach_the_update() -> None:
    entry = zoo("gpt")
    model = entry.build(False, torch.float32)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(model, optimizer, entry.batches(2), clip=1e-3, scheduler=scheduler)
    moved = torch.cat([(new - old).flatten() for new, old in zip(model.parameters(), before, strict=True)]).norm()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert 0 < moved.item() <= 1e-3 * (1 + 0.5) * 1.01  # two updates of at most lr * clip


def test_both_forms_of_zero_grad() -> None:
    entry = zoo("gpt")
    for set_to_none in (True, False):
        model = entry.build(False, torch.float32)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), entry.batches(1), set_to_none=set_to_none)
        assert all((parameter.grad is None) == set_to_none for parameter in model.parameters())


def test_the_comparison_sees_the_smallest_difference() -> None:
    model = zoo("gpt").build(False, torch.float32)
    other = copy.deepcopy(model)
    assert_same(model, other, [1.0], [1.0])
    with torch.no_grad():
        parameter = other.get_parameter("layers.1.mlp.up.weight")
        parameter[0, 0] = torch.nextafter(parameter[0, 0], torch.tensor(1.0))
    with pytest.raises(AssertionError, match=r"layers\.1\.mlp\.up\.weight differs, by at most \d"):
        assert_same(model, other, [1.0], [1.0])
    with pytest.raises(AssertionError, match="loss 1 differs: 2.0 against 2.5, by 0.5"):
        assert_same(model, model, [1.0, 2.0], [1.0, 2.5])
    with pytest.raises(AssertionError, match="diverged"):
        assert_same(model, model, [float("nan")], [float("nan")])
    with pytest.raises(AssertionError, match="nothing was trained"):
        assert_same(model, model, [], [])


def test_the_comparison_is_of_bits_dtypes_shapes_and_names() -> None:
    zero = torch.zeros(2)
    for other, message in (
        ({"a": -zero}, "a differs"),
        ({"a": zero.bfloat16()}, "torch.float32"),
        ({"a": torch.zeros(3)}, r"\(3,\)"),
        ({"b": zero}, "names differ"),
    ):
        with pytest.raises(AssertionError, match=message):
            assert_same_tensors({"a": zero}, other)
    nan = torch.tensor([float("nan")])
    assert_same_tensors({"a": nan, "step": torch.tensor(3)}, {"a": nan.clone(), "step": torch.tensor(3)})
