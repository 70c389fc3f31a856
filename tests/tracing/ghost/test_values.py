"""Known values: computed late, once, and on the host; and the balance of an unknown router."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowtide.tracing.ghost.values import Known, balanced_choice


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
