"""Bit-identical losses and weights: plain torch, all resident, and streamed, under the same unchanged loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.zoo import ZOO, Scheduler, ZooModel, assert_same, bf16_safe, train, zoo

MODELS = tuple(ZOO)
PLACES = (
    {"weights": "resident", "update": "device"},
    {"weights": "resident", "update": "host"},
    {"weights": "streamed", "update": "device"},
    {"weights": "streamed", "update": "host"},
)


def place_name(place: dict[str, Any]) -> str:
    return f"{place['weights']}-{place['update']}"


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def warm_up_then_decay(optimizer: torch.optim.Optimizer) -> Scheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * 0.95**step)


def run(
    model: ZooModel,
    place: dict[str, Any] | None,
    *,
    dtype: torch.dtype = torch.float32,
    dropout: bool = True,
    steps: int = 20,
    **loop: Any,
) -> tuple[nn.Module, list[float]]:
    """Train from the same seed, plainly or under management."""
    network = model.build(dropout, dtype)
    optimizer = torch.optim.AdamW(two_groups(network), lr=1e-2)
    session = None if place is None else lowtide.manage(network, optimizer, lowtide.make_plan(network, **place))
    torch.manual_seed(7)
    losses = train(
        network, optimizer, model.batches(steps), scheduler=warm_up_then_decay(optimizer), loss=model.loss, **loop
    )
    if session is not None:
        session.close()
    return network, losses


@pytest.fixture(scope="module", autouse=True)
def safe_bf16() -> Iterator[None]:
    """Every run of this module, so that the plain and the managed one use the same kernels."""
    with bf16_safe():
        yield


@pytest.mark.parametrize("place", PLACES, ids=place_name)
@pytest.mark.parametrize("name", MODELS)
def test_deferred_with_clipping_and_schedule(name: str, place: dict[str, Any]) -> None:
    plain = run(zoo(name), None, clip=1.0)
    managed = run(zoo(name), place, clip=1.0)
    assert_same(plain[0], managed[0], plain[1], managed[1])


@pytest.mark.parametrize("place", PLACES, ids=place_name)
@pytest.mark.parametrize("name", MODELS)
def test_in_backward(name: str, place: dict[str, Any]) -> None:
    plain = run(zoo(name), None)
    managed = run(zoo(name), {**place, "schedule": "in_backward"})
    assert_same(plain[0], managed[0], plain[1], managed[1])
