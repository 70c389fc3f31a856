"""What a window costs: Python calls of the runtime, counted, since times on a shared machine say little."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide

WATCHED = ("/lowtide/runtime/", "/lowtide/memory/")
EMULATION = ("emulation", "emulated")


class Block(nn.Module):
    """Not a bare `Linear`: one of those is no group of its own where it is less than a fiftieth of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Stack(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def is_for_emulation(frame: FrameType) -> bool:
    """Whether the emulated device runs, or asks: it wants to know of each operator in which part of a step it is."""
    callers: list[FrameType | None] = [frame, frame.f_back, frame.f_back and frame.f_back.f_back]
    return any(caller and part in caller.f_code.co_filename for caller in callers for part in EMULATION)


def calls_per_layer(num_layers: int, *, weights: str, update: str, schedule: str, window: str | None) -> float:
    """Of the cheapest of three training steps in its steady state: how often the worker is asked depends on how far it is."""
    model = Stack(num_layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    plan = lowtide.make_plan(
        model, weights=weights, update=update, schedule=schedule, device_memory="64MiB", window_memory=window
    )
    assert len(plan.groups) == num_layers
    counts: list[int] = []

    def on_call(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and any(part in frame.f_code.co_filename for part in WATCHED):
            counts[-1] += not is_for_emulation(frame)

    with lowtide.manage(model, optimizer, plan, device="cpu"):
        for number in range(6):
            if number >= 3:
                counts.append(0)
                sys.setprofile(on_call)
            try:
                model(torch.ones(2, 8)).backward()
                optimizer.step()
                optimizer.zero_grad()
            finally:
                sys.setprofile(None)
    return min(counts) / num_layers


@pytest.mark.parametrize(
    ("weights", "update", "schedule", "window"),
    [
        ("streamed", "device", "in_backward", "4KiB"),
        ("streamed", "host", "deferred", "4KiB"),
        # Half of the model, so that many groups could leave.
        ("streamed", "device", "in_backward", "12KiB"),
        ("resident", "host", "deferred", None),
    ],
)
def test_a_window_costs_the_same_in_a_deep_model(weights: str, update: str, schedule: str, window: str | None) -> None:
    words = {"weights": weights, "update": update, "schedule": schedule, "window": window}
    few, many = calls_per_layer(16, **words), calls_per_layer(96, **words)  # type: ignore[arg-type]
    assert 0.9 * few < many < 1.1 * few


@pytest.mark.parametrize(
    ("weights", "update", "schedule", "limit"),
    # Some 25 of them hold interrupts back while a window or a hook changes the session's condition. A step asks twice whether a
    # save still reads what it changes. Where the host updates in backward, how far the worker is moves it by some three.
    [
        ("streamed", "device", "in_backward", 486),
        ("streamed", "device", "deferred", 528),
        ("streamed", "host", "in_backward", 575),
        ("streamed", "host", "deferred", 590),
        ("resident", "host", "deferred", 545),
    ],
)
def test_a_use_takes_no_more_calls_than_it_did(weights: str, update: str, schedule: str, limit: int) -> None:
    # Two uses a step, forward and backward, and an update of two parameters.
    window = "4KiB" if weights == "streamed" else None
    assert calls_per_layer(32, weights=weights, update=update, schedule=schedule, window=window) < limit
