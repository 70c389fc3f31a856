"""Bit-identical losses and weights: plain torch, all resident, and streamed, under the same unchanged loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_groups
from tests.zoo import ZOO, Scheduler, ZooModel, assert_same_tensors, bf16_safe, train, zoo

MODELS = tuple(ZOO)
CHUNK_BYTES = 8192
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


@dataclass(frozen=True)
class Loop:
    """How a run trains; the plain run of each is made once."""

    dtype: torch.dtype = torch.float32
    dropout: bool = True
    accumulation: int = 1
    clip: float | None = None
    set_to_none: bool = True
    num_steps: int = 8
    """Twice as many as the learning rate takes to rise."""


def run(
    model: ZooModel, loop: Loop, place: dict[str, Any] | None = None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The steps from the same seed, plainly or under management: the weights and buffers at the end, and the losses."""
    network = model.build(loop.dropout, loop.dtype)
    optimizer = torch.optim.AdamW(two_groups(network), lr=1e-2)
    session = None
    if place is not None:
        # Several chunks to a group, as large models have them.
        layout = lay_out(find_groups(network), chunk_bytes=CHUNK_BYTES)
        session = lowtide.manage(network, optimizer, lowtide.make_plan(layout, **place))
    losses = train(
        network,
        optimizer,
        model.batches(loop.num_steps),
        accumulation=loop.accumulation,
        clip=loop.clip,
        set_to_none=loop.set_to_none,
        scheduler=warm_up_then_decay(optimizer),
        loss=model.loss,
        seed=7,
    )
    if session is not None:
        session.close()
    return network.state_dict(), losses


@cache
def plain(name: str, loop: Loop) -> tuple[dict[str, torch.Tensor], list[float]]:
    return run(zoo(name), loop)


def check(name: str, loop: Loop, place: dict[str, Any]) -> None:
    weights, losses = plain(name, loop)
    managed_weights, managed_losses = run(zoo(name), loop, place)
    assert losses == managed_losses
    assert_same_tensors(weights, managed_weights)


@pytest.fixture(scope="module", autouse=True)
def safe_bf16() -> Iterator[None]:
    """Every run of this module, so that the plain and the managed one use the same kernels."""
    with bf16_safe():
        yield


@pytest.mark.parametrize("place", PLACES, ids=place_name)
@pytest.mark.parametrize("name", MODELS)
def test_deferred_with_dropout_clipping_and_schedule(name: str, place: dict[str, Any]) -> None:
    check(name, Loop(clip=1.0), place)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=place_name)
@pytest.mark.parametrize("name", MODELS)
def test_deferred_bf16_accumulating(name: str, place: dict[str, Any]) -> None:
    loop = Loop(dtype=torch.bfloat16, dropout=False, accumulation=4, clip=1.0, set_to_none=False, num_steps=20)
    check(name, loop, place)


@pytest.mark.parametrize("place", PLACES, ids=place_name)
@pytest.mark.parametrize("name", MODELS)
def test_in_backward(name: str, place: dict[str, Any]) -> None:
    check(name, Loop(), {**place, "schedule": "in_backward"})


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=place_name)
@pytest.mark.parametrize("name", MODELS)
def test_in_backward_bf16(name: str, place: dict[str, Any]) -> None:
    loop = Loop(dtype=torch.bfloat16, dropout=False, num_steps=20)
    check(name, loop, {**place, "schedule": "in_backward"})
