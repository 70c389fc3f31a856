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


class Stack(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def calls_per_layer(num_layers: int, *, weights: str, update: str, schedule: str, window: str | None) -> float:
    """Of one training step in its steady state."""
    model = Stack(num_layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    plan = lowtide.make_plan(
        model, weights=weights, update=update, schedule=schedule, device_memory="64MiB", window_memory=window
    )
    count = 0

    def on_call(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        name = frame.f_code.co_filename
        if event in ("call", "c_call") and any(part in name for part in WATCHED):
            count += not any(part in name for part in EMULATION)

    with lowtide.manage(model, optimizer, plan, device="cpu"):
        for number in range(4):
            if number == 3:
                sys.setprofile(on_call)
            try:
                model(torch.ones(2, 8)).backward()
                optimizer.step()
                optimizer.zero_grad()
            finally:
                sys.setprofile(None)
    return count / num_layers


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
    assert many < 1.15 * few


@pytest.mark.parametrize(
    ("update", "schedule", "limit"),
    # Some 40 of them hold interrupts back while a window or a hook changes the session's condition.
    [("device", "in_backward", 665), ("host", "deferred", 750), ("host", "in_backward", 710)],
)
def test_a_streamed_use_takes_no_more_calls_than_it_did(update: str, schedule: str, limit: int) -> None:
    # Two uses a step, forward and backward, and an update of two parameters.
    calls = calls_per_layer(32, weights="streamed", update=update, schedule=schedule, window="4KiB")
    assert calls < limit
