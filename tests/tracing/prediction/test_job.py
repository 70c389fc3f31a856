"""Transport: tensors travel as descriptions, keep their identity and sharing, and small ones their values."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import TraceError
from lowtide.tracing.prediction.job import MAX_FLOAT_ELEMENTS, MAX_VALUE_ELEMENTS, TensorDescription, pack, unpack

CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("CONTEXT", default=0)


class Arrivals:
    """Makes meta tensors of cards, and remembers the cards."""

    def __init__(self) -> None:
        self.cards: list[TensorDescription] = []
        self.values: list[Tensor | None] = []

    def __call__(self, card: TensorDescription, values: Tensor | None) -> Tensor:
        self.cards.append(card)
        self.values.append(values)
        tensor = torch.empty_strided(card.shape, card.stride, dtype=card.dtype, device="meta")
        if card.is_parameter:
            return nn.Parameter(tensor, requires_grad=card.requires_grad)
        return tensor.requires_grad_(card.requires_grad)


def sent(payload: Any) -> tuple[Any, Arrivals]:
    arrivals = Arrivals()
    return unpack(pack(payload), arrivals), arrivals


def test_size_does_not_matter() -> None:
    model = nn.Linear(2048, 2048)  # 16 MiB
    assert len(pack(model)) < 10_000
    with torch.device("meta"):
        assert len(pack(nn.Linear(1 << 18, 1 << 18))) < 10_000


def test_a_tensor_as_a_description() -> None:
    base = torch.zeros(100, dtype=torch.bfloat16)
    view = base[10:70].view(6, 10).t()
    _, arrivals = sent({"view": view})
    card = arrivals.cards[0]
    assert (card.shape, card.stride, card.offset) == ((10, 6), (1, 10), 10)
    assert (card.storage_bytes, card.dtype, card.requires_grad, card.is_parameter) == (
        200,
        torch.bfloat16,
        False,
        False,
    )


def test_one_tensor_stays_one_tensor() -> None:
    tensor = torch.zeros(3)
    got, arrivals = sent([tensor, {"again": tensor}, tensor])
    assert got[0] is got[1]["again"] is got[2]
    assert len(arrivals.cards) == 1


def test_views_name_their_common_storage() -> None:
    base = torch.zeros(10)
    _, arrivals = sent([base[:4], base[4:], torch.zeros(10)])
    first, second, other = arrivals.cards
    assert first.storage_key == second.storage_key != other.storage_key


def test_tied_weights_stay_tied_and_frozen_ones_frozen() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    model["a"].bias.requires_grad_(False)
    got, _ = sent(model)
    assert got["a"].weight is got["b"].weight
    assert not got["a"].bias.requires_grad
    assert isinstance(got["b"].bias, nn.Parameter)
    assert got["b"].bias.requires_grad


def test_the_optimizer_keeps_to_the_models_parameters() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    (got_model, got_optimizer), _ = sent((model, optimizer))
    assert got_optimizer.param_groups[0]["params"][0] is got_model.weight
    assert got_optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("tensor", "has_values"),
    [
        (torch.arange(12).view(3, 4).t(), True),
        (torch.ones(MAX_VALUE_ELEMENTS, dtype=torch.bool), True),
        (torch.zeros(MAX_VALUE_ELEMENTS + 1, dtype=torch.bool), False),
        (torch.rand(MAX_FLOAT_ELEMENTS), True),
        (torch.rand(MAX_FLOAT_ELEMENTS + 1), False),
        (torch.arange(4, device="meta"), False),
        (nn.Parameter(torch.rand(2)), False),
    ],
)
def test_values_travel_where_a_model_may_look_at_them(tensor: Tensor, has_values: bool) -> None:
    _, arrivals = sent([tensor])
    values = arrivals.values[0]
    assert (values is not None) == has_values
    if values is not None:
        assert torch.equal(values, tensor)


def test_a_slice_does_not_drag_its_whole_storage_along() -> None:
    assert len(pack([torch.zeros(1 << 20, dtype=torch.int64)[:4]])) < 5_000


def test_hooks_travel_and_refer_to_the_same_objects() -> None:
    model = nn.Linear(2, 2)
    seen: list[Tensor] = []
    model.weight.register_post_accumulate_grad_hook(seen.append)
    model.bias.register_hook(lambda gradient: gradient * 2)
    got, _ = sent(model)
    assert len(got.weight._post_accumulate_grad_hooks) == 1
    assert len(got.bias._backward_hooks) == 1


def test_operators_travel_though_they_look_like_modules() -> None:
    got, _ = sent([torch.ops.aten.add, torch.ops.aten, torch.ops, lambda x: torch.ops.aten.relu(x)])
    assert got[0] is torch.ops.aten.add
    assert got[1] is torch.ops.aten
    assert got[2] is torch.ops
    assert torch.equal(got[3](torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))


def test_the_batch_travels_with_its_values() -> None:
    """Models drop images that are all padding, and mask targets that are zero."""
    images, weights = torch.rand(2, MAX_FLOAT_ELEMENTS), torch.rand(2, MAX_FLOAT_ELEMENTS)

    @dataclass
    class Batch:
        images: list[Tensor]

    batch = {"nested": Batch([images])}
    arrivals = Arrivals()
    unpack(pack([weights, batch], batch), arrivals)
    assert arrivals.values[0] is None
    assert arrivals.values[1] is not None
    assert torch.equal(arrivals.values[1], images)


@pytest.mark.parametrize("make", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_a_parametrized_module_travels_and_computes_its_weight(make: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(make(nn.Linear(3, 4)), nn.Linear(4, 2))
    got, _ = sent(model)
    assert type(got[0]).__mro__[1] is nn.Linear
    assert [name for name, _ in got.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert got.state_dict().keys() == model.state_dict().keys()
    assert got[0].weight.shape == (4, 3)
    assert got[0].weight.grad_fn is not None
    assert got(torch.empty(5, 3, device="meta")).shape == (5, 2)
    assert isinstance(model[0].weight, Tensor)  # the original is as it was


def test_a_context_variable_is_the_other_sides_own() -> None:
    """A hook that closes over one of its module's: transformers captures hidden states that way."""

    def hook() -> object:
        return CONTEXT

    hook.__module__ = "__main__"  # as a closure: sent by value, with the globals it uses
    got, _ = sent([hook])
    assert got[0]() is CONTEXT


def test_a_compiled_function_travels_uncompiled() -> None:
    got, _ = sent([torch.compile(lambda x: x + 1)])
    assert got[0](2) == 3


@pytest.mark.parametrize("model", [nn.Sequential(nn.LazyLinear(3)), torch.jit.script(nn.Linear(2, 2))])
def test_modules_that_cannot_travel_are_told(model: nn.Module) -> None:
    with pytest.raises(TraceError, match="cannot be sent"):
        pack(model)


def test_what_cannot_travel_is_told_with_advice() -> None:
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(TraceError, match=r"cannot be sent.*lock.*not attributes of the model"):
        pack(model)
