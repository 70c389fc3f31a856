"""What is written through one view is seen through the others: against real tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowtide.errors import ValueReadError
from tests.tracing.ghost.ghost_process import GhostProcess, Lab


def shifted(ids: Tensor) -> Tensor:
    """As every sequence-to-sequence model makes its decoder's inputs."""
    out = ids.new_zeros(ids.shape)
    out[:, 1:] = ids[:, :-1].clone()
    out[:, 0] = 7
    return out.masked_fill_(out == 2, 9)


def through_a_view_of_a_view(ids: Tensor) -> Tensor:
    out = torch.zeros_like(ids)
    out.view(-1)[2:8].view(2, 3).t()[1] = ids[0, :2]
    out[1:].add_(ids[1:])
    return out


def an_old_view(ids: Tensor) -> Tensor:
    out = torch.ones_like(ids)
    column = out[:, 1]
    before = column + 0
    out.mul_(5)
    return torch.stack([column, before])  # the view follows the write, the copy does not


def by_rows(ids: Tensor) -> Tensor:
    out = torch.full_like(ids, -1)
    for row in range(ids.size(0)):
        out[row, ids[row] > 3] = row
    return out


@pytest.mark.parametrize("build", [shifted, through_a_view_of_a_view, an_old_view, by_rows])
def test_pieces_add_up_to_the_real_values(ghosts: GhostProcess, build: Callable[[Tensor], Tensor]) -> None:
    ids = torch.tensor([[5, 2, 8, 2], [3, 4, 2, 6], [1, 9, 9, 0]])
    assert ghosts(lambda lab: build(lab.known(ids)).tolist()) == build(ids.clone()).tolist()


def test_a_piece_that_is_not_known_makes_the_whole_unknown(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> list[int]:
        x = lab.known(torch.zeros(6))
        x[:2] = lab.ghost(2)
        x[2:] = 1.0
        return list(x.tolist())

    with pytest.raises(ValueReadError):
        ghosts(step)


def test_other_types_of_the_same_bytes_are_not_guessed(ghosts: GhostProcess) -> None:
    def step(lab: Lab) -> None:
        x = lab.known(torch.zeros(4))
        other = x.view(torch.int32)
        x[:1] = 2.0
        other.tolist()

    with pytest.raises(ValueReadError):
        ghosts(step)
