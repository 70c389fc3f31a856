"""What is taken for granted about values that depend on weights, and that it is said."""

from __future__ import annotations

import pytest
import torch

from lowtide.errors import ValueReadError
from lowtide.tracing.ghost.making import BALANCE, CHECKS, FINITE
from tests.tracing.ghost.ghost_process import GhostProcess, Lab


def test_checks_pass_and_are_noted(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> tuple[list[bool], list[str], list[str]]:
        x = lab.ghost(4, 3)
        unread = list(lab.mode.notes)
        answers = [
            bool(torch.isfinite(x).all()),
            bool((x[:, 1:] >= x[:, :2]).all()),
            bool((x > 9).any()),
            not (x > 0).all(),
        ]
        return answers, unread, list(lab.mode.notes)

    assert ghosts(step) == ([True, True, False, False], [], [CHECKS])


def test_a_distribution_checks_its_arguments(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> tuple[int, ...]:
        normal = torch.distributions.Normal(lab.ghost(5), lab.ghost(5).exp())
        return tuple(normal.log_prob(lab.ghost(5)).shape)

    assert ghosts(step) == (5,)


def test_nothing_is_infinite(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> tuple[int, int, list[str]]:
        x = lab.ghost(4, 3)
        return int(x.isnan().sum()), int(torch.isinf(x).sum()), list(lab.mode.notes)

    assert ghosts(step) == (0, 0, [FINITE])


def test_a_known_mask_is_never_assumed(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> tuple[bool, bool, list[str]]:
        mask = lab.known(torch.tensor([True, False]))
        return bool(mask.all()), bool(mask.any()), list(lab.mode.notes)

    assert ghosts(step) == (False, True, [])


def test_a_check_row_by_row_is_not_assumed(ghosts: GhostProcess) -> None:
    """Which rows pass decides on shapes: nothing healthy to assume."""
    with pytest.raises(ValueReadError):
        ghosts(lambda lab: (lab.ghost(4, 3) > 0).all(-1).nonzero())


@pytest.mark.parametrize("choose", ["argmax", "max", "topk"])
def test_a_choice_is_spread_evenly(ghosts: GhostProcess, choose: str) -> None:
    def step(lab: Lab) -> tuple[list[int], list[str]]:
        scores = lab.ghost(2, 12, 4)
        if choose == "argmax":
            chosen = scores.argmax(-1)
        elif choose == "max":
            chosen = scores.max(dim=-1, keepdim=True)[1]
        else:
            chosen = scores.topk(1, dim=-1)[1]
        hits = torch.nn.functional.one_hot(chosen, 4).flatten(0, -2).sum(0)
        return list(hits.tolist()), list(lab.mode.notes)

    assert ghosts(step) == ([6, 6, 6, 6], [BALANCE])


def test_the_largest_of_all_is_a_number_and_stays_unknown(ghosts: GhostProcess) -> None:
    with pytest.raises(ValueReadError):
        ghosts(lambda lab: lab.ghost(4, 3).max().item())


def test_an_assumption_keeps_nothing_alive(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> tuple[int, int]:
        import gc

        x = lab.ghost(2, 12, 4)
        start = lab.live_bytes
        gc.disable()
        for choose in (x.argmax, x.max, x.topk, x.isnan, x.isinf):
            choose(1) if choose == x.topk else choose(-1) if choose in (x.argmax, x.max) else choose()
        (x > 0).all()
        gc.enable()
        return start, lab.live_bytes

    start, end = ghosts(step)
    assert start == end
