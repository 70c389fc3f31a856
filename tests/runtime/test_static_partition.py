"""A static partition carried out: the share of the device is what chunks really take, and the numbers stay plain."""

from __future__ import annotations

import pytest
import torch

import lowtide
from lowtide import StaticPartition
from lowtide.errors import ConfigError, PlanError
from lowtide.planning.plan import Schedule
from tests.runtime.stack import (
    BLOCK_BYTES,
    KB,
    REST_BYTES,
    Stack,
    batch,
    managed,
    num_on_device,
    num_resident,
    steps,
    tier,
)
from tests.zoo import assert_same

SIZE = 800 * KB


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_the_numbers_are_those_of_plain_torch(share: float, schedule: Schedule) -> None:
    model = Stack()
    losses = steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 4)
    session, found = managed(StaticPartition(share=share, device_memory=SIZE, schedule=schedule), num_steps=4)
    assert tier(session, "device").budget_bytes == SIZE
    assert tier(session, "device").is_within_budget
    session.close()
    assert_same(model, session.model, losses, found)


def test_turning_the_share_changes_what_chunks_take() -> None:
    # A block is 64 KiB with gradient and state; windows take 32 KiB, the rest 2 KiB.
    taken = {}
    for share in (0.1, 0.2, 0.6):
        session, _ = managed(StaticPartition(share=share, device_memory=SIZE), num_steps=3)
        taken[share] = (num_resident(session.plan), num_on_device(session.plan))
        weights = tier(session, "device chunks").peak_bytes
        on_device = (taken[share][0] - 1) * BLOCK_BYTES + REST_BYTES
        assert weights + 3 * on_device <= share * SIZE, "weights and windows, gradients and both moments"
        assert weights <= on_device + 2 * BLOCK_BYTES
        session.close()
    assert taken == {0.1: (1, 1), 0.2: (2, 2), 0.6: (7, 7)}


def test_an_optimizer_with_less_state_leaves_room_for_more() -> None:
    found = []
    for optimizer in (torch.optim.AdamW, torch.optim.SGD):
        model = Stack()
        plan = StaticPartition(share=0.25, device_memory=SIZE)
        with lowtide.manage(model, optimizer(model.parameters(), lr=1e-2), plan, device="cpu") as session:
            found.append(num_resident(session.plan))
    # In 200 KiB: two blocks of 64 KiB beside windows of 32, or all six of 32 KiB without windows.
    assert found == [3, 7]


def test_formats_with_less_state_leave_room_for_more() -> None:
    found = []
    for precision, moments in (("bf16 exact", "fp32"), ("bf16 stochastic", "8bit")):
        model = Stack().bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        plan = StaticPartition(share=0.15, device_memory=SIZE)
        with lowtide.manage(model, optimizer, plan, device="cpu", precision=precision, moments=moments) as session:
            found.append(num_resident(session.plan))
    # In 120 KiB beside windows of 16: a block of 8 KiB takes 56 with its gradient and five times its bytes of state, or 24.5.
    assert found == [2, 5]


def test_without_an_optimizer() -> None:
    model = Stack()
    with lowtide.manage(model, None, StaticPartition(share=0.5, device_memory=SIZE), device="cpu"), torch.no_grad():
        found = model(batch())
    assert torch.equal(found, model(batch()).detach())


def test_a_share_that_cannot_hold_the_windows() -> None:
    with pytest.raises(PlanError, match=r"a share of 0.04 of 800.0 KiB is 32.0 KiB, .* need 32.5 KiB"):
        managed(StaticPartition(share=0.04, device_memory=SIZE))


def test_an_emulated_device_without_a_size() -> None:
    with pytest.raises(ConfigError, match="no size of its own"):
        managed(StaticPartition(share=0.5), device="cpu")
