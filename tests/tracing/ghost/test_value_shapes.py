"""Shapes that depend on lengths, against the real operators on the host."""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch
import torch.nn.functional as F

from lowtide.errors import ValueReadError
from tests.tracing.ghost.ghost_process import GhostProcess, Lab

STEPS, BATCH, LABELS = 30, 3, 12
LENGTHS = torch.tensor([7, 9, 4])


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("is_padded", [False, True])
def test_the_ctc_table_is_as_long_as_the_longest_target(ghosts: GhostProcess, is_list: bool, is_padded: bool) -> None:
    targets = torch.ones((BATCH, 11) if is_padded else (int(LENGTHS.sum()),), dtype=torch.int64)
    times = torch.full((BATCH,), STEPS)

    def step(lab: Lab) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], int]:
        scores = lab.ghost(STEPS, BATCH, LABELS, needs_grad=True)
        lengths = [LENGTHS.tolist()] if is_list else [lab.known(LENGTHS)]
        steps = times.tolist() if is_list else lab.known(times)
        made = attrgetter("_ctc_loss")(torch)(scores.detach(), lab.known(targets), steps, lengths[0], 0, False)
        loss = F.ctc_loss(scores, lab.known(targets), steps, lengths[0])
        lab.recorder.phase = lab.phase.BACKWARD
        lab.mark()
        loss.backward()
        scratch = max(nbytes for op, nbytes in lab.births if op == "aten._ctc_loss_backward")
        return [tuple(t.shape) for t in made], [tuple(scores.grad.shape)], scratch

    real = attrgetter("_ctc_loss")(torch)(
        torch.randn(STEPS, BATCH, LABELS).log_softmax(-1), targets, times.tolist(), LENGTHS.tolist(), 0, False
    )
    shapes, grads, scratch = ghosts(step)
    assert shapes == [tuple(t.shape) for t in real]
    assert grads == [(STEPS, BATCH, LABELS)]
    assert scratch == 4 * max(STEPS * BATCH * LABELS, BATCH * STEPS * (2 * 9 + 1))


def test_a_packed_sequence_has_no_padding(ghosts: GhostProcess) -> None:
    lengths = torch.tensor([5, 3, 2])

    def step(lab: Lab) -> tuple[tuple[int, ...], list[int]]:
        packed = torch.nn.utils.rnn.pack_padded_sequence(lab.ghost(3, 5, 4), lab.known(lengths).cpu(), batch_first=True)
        return tuple(packed.data.shape), list(packed.batch_sizes.tolist())

    real = torch.nn.utils.rnn.pack_padded_sequence(torch.zeros(3, 5, 4), lengths, batch_first=True)
    assert ghosts(step) == (tuple(real.data.shape), real.batch_sizes.tolist())


def test_lengths_that_depend_on_weights_are_refused(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> None:
        attrgetter("_pack_padded_sequence")(torch)(lab.ghost(3, 5, 4), lab.ghost(3, dtype=torch.int64), True)

    with pytest.raises(ValueReadError, match="lengths"):
        ghosts(step)
