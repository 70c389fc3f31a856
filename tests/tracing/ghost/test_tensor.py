"""Known values: computed late, once, and on the host; and the balance of an unknown router."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowtide.errors import ValueReadError
from lowtide.tracing.ghost.tensor import Known, balanced_choice
from tests.tracing.ghost.ghost_process import GhostProcess, Lab


def test_a_recipe_runs_when_asked_and_only_once() -> None:
    calls: list[int] = []

    def double(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 2

    value = Known(func=double, args=(Known(torch.tensor([1, 2])),))
    assert calls == []
    assert value.get().tolist() == [2, 4]
    assert value.get().tolist() == [2, 4]
    assert calls == [1]


def test_recipes_build_on_recipes_in_lists_and_keywords() -> None:
    parts = [Known(torch.tensor([n])) for n in range(3)]
    joined = Known(func=torch.cat, args=(parts,), kwargs={"dim": 0})
    summed = Known(func=torch.add, args=(joined,), kwargs={"other": Known(torch.tensor(10)), "alpha": 2})
    assert summed.get().tolist() == [20, 21, 22]


def test_one_of_several_outputs() -> None:
    pair = (Known(torch.tensor([3, 1, 2])),)
    assert Known(func=torch.sort, args=pair, output=1).get().tolist() == [1, 2, 0]


def test_what_a_value_was_made_of_is_let_go() -> None:
    import gc
    import weakref

    source = torch.ones(3)
    reference = weakref.ref(source)
    value = Known(func=torch.sum, args=(Known(source),))
    value.get()
    del source
    gc.collect()
    assert reference() is None


@given(rows=st.integers(1, 200), choices=st.integers(2, 64), data=st.data())
def test_a_balanced_router(rows: int, choices: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, min(choices - 1, 8)))
    chosen = balanced_choice(torch.Size([rows]), choices, count)()
    assert chosen.shape == (rows, count)
    loads = chosen.flatten().bincount(minlength=choices)
    assert int(loads.max() - loads.min()) <= 1
    assert all(len(set(row)) == count for row in chosen.tolist())


@pytest.mark.parametrize("shape", [(2, 3), (4,)])
def test_rows_of_any_shape(shape: tuple[int, ...]) -> None:
    assert balanced_choice(torch.Size(shape), 8, 2)().shape == (*shape, 2)


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
