"""Small gradients of a chunk go to the host together: how many copies, events and norms that takes, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.memory.emulated_mover import EmulatedMover, EmulatedTicket
from lowtide.memory.mover import Copied, Ticket
from lowtide.runtime.parameters import gradients as gradients_module
from tests.runtime.stack import Stack, steps

Sent = list[list[tuple[int, ...]]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Shapes of what is sent together, from now on."""
    seen: Sent = []
    send = EmulatedMover.all_to_host

    def all_to_host(
        self: EmulatedMover, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Sequence[Ticket] = ()
    ) -> Copied:
        seen.append([tuple(source.shape) for source in sources])
        return send(self, targets, sources, after)

    monkeypatch.setattr(EmulatedMover, "all_to_host", all_to_host)
    return seen


def train(schedule: str, **words: Any) -> tuple[nn.Module, int]:
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = lowtide.make_plan(model, weights="streamed", update="host", schedule=schedule)
    with lowtide.manage(model, optimizer, plan, device="cpu", **words) as session:
        steps(model, optimizer, 2)
        rows = [row for row in session.stats().moved if row.reason.value == "gradients"]
    return model, sum(row.num_copies for row in rows)


@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_a_chunks_gradients_are_sent_at_once_and_counted_each(schedule: str, sent: Sent) -> None:
    model, num_copies = train(schedule)
    num_parameters = len([*model.parameters()])
    assert sorted(map(len, sent), reverse=True) != [1] * len(sent)
    assert sum(map(len, sent)) == num_copies == 2 * num_parameters


def test_enough_bytes_do_not_wait_for_others(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients_module, "SENT_TOGETHER_BYTES", 1)
    train("deferred")
    assert set(map(len, sent)) == {1}


def test_a_gradient_on_another_queue_sends_those_before_it(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is taken on a queue of its own: before its norm is taken on the present queue, that one waits for its own."""
    queues = iter(range(10**6))
    now: list[object] = []
    points: list[object] = []
    waits: list[Ticket] = []
    compute_after = EmulatedMover.compute_after

    def queue(self: EmulatedMover) -> object:
        now.append(next(queues))
        return now[-1]

    def point_in(self: EmulatedMover, queue: object) -> EmulatedTicket:
        points.append((queue, EmulatedTicket(self, is_done=True)))
        return points[-1][1]  # type: ignore[index, no-any-return]

    monkeypatch.setattr(EmulatedMover, "queue", queue)
    monkeypatch.setattr(EmulatedMover, "point_in", point_in)
    monkeypatch.setattr(
        EmulatedMover, "compute_after", lambda self, ticket: (waits.append(ticket), compute_after(self, ticket))
    )
    train("deferred")
    assert set(map(len, sent)) == {1}
    assert len(points) == len(sent)
    assert all(any(wait is ticket for wait in waits) for _, ticket in points)  # type: ignore[misc]


def test_what_waits_to_be_sent_counts_among_what_is_kept() -> None:
    mover = EmulatedMover(max_kept_bytes=8)
    source, target = torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    copied = mover.to_host(target, source)
    mover.expect(4)
    assert not copied.ended.is_done()
    mover.expect(5)
    assert copied.ended.is_done()
