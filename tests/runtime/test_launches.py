"""How often a step launches the device kernel: once for a chunk in backward, once for all that is resident in `step()`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import lowtide
from lowtide.memory.chunk import lay_out
from lowtide.memory.groups import find_groups
from lowtide.optim.device import kernel as device_kernel
from lowtide.runtime.updates import kernel_optimizer
from tests.optim.device.counted_launches import Launches, counted_launches
from tests.runtime.stack import KB, NUM_BLOCKS, Stack, steps


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Launches of updates on an emulated device, which are taken to be on a GPU. The weights stay as they are."""
    monkeypatch.setattr(kernel_optimizer, "_kernel", lambda device: device_kernel.update)
    monkeypatch.setattr(device_kernel, "can_launch", lambda device: True)
    return counted_launches(monkeypatch)


def train(model: Stack, groups: Sequence[dict[str, Any]], *, schedule: str, chunk_bytes: int, num_steps: int) -> None:
    layout = lay_out(find_groups(model), chunk_bytes=chunk_bytes)
    plan = lowtide.make_plan(layout, weights="resident", update="device", schedule=schedule)
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    with lowtide.manage(model, optimizer, plan, device="cpu", precision="fp32"):
        steps(model, optimizer, num_steps)


def test_in_backward_a_chunk_is_a_launch(launches: Launches) -> None:
    model = Stack()
    train(model, [{"params": model.parameters()}], schedule="in_backward", chunk_bytes=16 * KB, num_steps=2)
    # The rest, whose gradient comes first, and blocks of two matrices.
    assert [num_pieces for _, num_pieces, _ in launches] == 2 * [1, *[2] * NUM_BLOCKS]


def test_smaller_chunks_are_more_launches(launches: Launches) -> None:
    model = Stack()
    train(model, [{"params": model.parameters()}], schedule="in_backward", chunk_bytes=8 * KB, num_steps=1)
    assert [num_pieces for _, num_pieces, _ in launches] == (1 + 2 * NUM_BLOCKS) * [1]


def test_deferred_all_that_is_resident_is_one_launch(launches: Launches) -> None:
    model = Stack()
    train(model, [{"params": model.parameters()}], schedule="deferred", chunk_bytes=8 * KB, num_steps=2)
    assert [num_pieces for _, num_pieces, _ in launches] == 2 * [1 + 2 * NUM_BLOCKS]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr": 1e-3, "weight_decay": 0.0}, [1, *[2] * NUM_BLOCKS]),
        ({"amsgrad": True}, [1, *[1, 1] * NUM_BLOCKS]),
    ],
    ids=["other rates", "another kernel"],
)
def test_param_groups_share_the_launch_of_a_chunk_where_they_share_the_kernel(
    launches: Launches, settings: dict[str, Any], expected: list[int]
) -> None:
    model = Stack()
    named = list(model.named_parameters())
    ups = [parameter for name, parameter in named if ".up." in name]
    others = [parameter for name, parameter in named if ".up." not in name]
    groups: list[dict[str, Any]] = [{"params": ups, **settings}, {"params": others}]
    train(model, groups, schedule="in_backward", chunk_bytes=16 * KB, num_steps=1)
    assert [num_pieces for _, num_pieces, _ in launches] == expected
