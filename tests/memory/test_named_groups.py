"""Groups by name: a module that is named is found, however small, and the groups of a plan are found again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide.activations.policy import KEEP
from lowtide.memory.groups import find_groups
from lowtide.memory.layout import lay_out
from lowtide.memory.named_groups import find_named_groups
from lowtide.planning.hand_plan import make_plan


class Net(nn.Module):
    """Small tables beside blocks that grow with the depth; the head may share the first table."""

    def __init__(self, depth: int, *, is_tied: bool = False) -> None:
        super().__init__()
        self.tok = nn.Embedding(10, 16)
        self.pos = nn.Embedding(4, 16)
        self.start = nn.Parameter(torch.zeros(16))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(depth)
        )
        self.attention = nn.MultiheadAttention(16, 2)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 10, bias=False)
        if is_tied:
            self.head.weight = self.tok.weight


def names(model: nn.Module, *named: str) -> list[str]:
    return [group.name for group in find_named_groups(model, named)]


@pytest.mark.parametrize("depth", [2, 8, 32])
def test_a_named_module_has_a_group_at_any_depth(depth: int) -> None:
    model = Net(depth)
    for name in ("tok", "pos", "norm", "head", "blocks.1", "blocks.1.2", "attention"):
        (group,) = [group for group in find_named_groups(model, [name]) if group.name == name]
        assert group.windows == (name,)
        assert all(parameter.name.startswith(f"{name}.") for parameter in group.parameters)
    assert "tok" not in [group.name for group in find_groups(Net(32))], "or this test shows nothing"


@pytest.mark.parametrize("name", ["", "*", "blocks", "start", "tokk", "attention.out_proj", "blocks.1.1"])
def test_what_cannot_be_a_group_is_passed_over(name: str) -> None:
    assert find_named_groups(Net(8), [name]) == find_groups(Net(8))


@pytest.mark.parametrize("depth", [2, 32])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_names_of_groups_find_them_again(depth: int, is_tied: bool) -> None:
    for named in ("tok", "head", "pos", "norm", "blocks.0.0"):
        groups = find_named_groups(Net(depth, is_tied=is_tied), [named])
        again = find_named_groups(Net(depth, is_tied=is_tied), [group.name for group in groups])
        assert lay_out(again).fingerprint == lay_out(groups).fingerprint


@pytest.mark.parametrize("named", ["tok", "head", "tok.weight"])
def test_a_tied_table_has_one_group_that_both_open(named: str) -> None:
    assert "tok.weight" not in names(Net(32, is_tied=True)), "or this test shows nothing"
    (group,) = [group for group in find_named_groups(Net(32, is_tied=True), [named]) if group.name == "tok.weight"]
    assert group.windows == ("tok", "head")


class Encoder(nn.Module):
    """Made of plain layers, and no block by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 64)
        self.narrow = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.narrow(self.wide(x).tanh())
        return out


def test_a_named_module_that_is_made_of_others_is_one_group() -> None:
    model = nn.Sequential(nn.Linear(8, 16), Encoder(), nn.Linear(16, 8))
    assert names(model) == ["0", "1.wide", "1.narrow", "2"]
    assert names(model, "1") == ["0", "1", "2"]
    assert names(model, "1.wide") == ["0", "1.wide", "1.narrow", "2"]
    plan = make_plan(model, activations={"1": "recompute"})
    assert [group.name for group in plan.groups if group.activation != KEEP] == ["1"]


def test_a_named_module_that_holds_blocks_is_passed_over() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(Encoder(), Encoder()))
    assert names(model, "1") == ["0", "1.0", "1.1"]
