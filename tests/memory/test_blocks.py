"""Repeated blocks: which ones are found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowtide.memory.blocks import repeated_blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in repeated_blocks(model)]


def test_layers_of_a_list_in_order() -> None:
    assert names(Stack()) == ["layers.0", "layers.1", "layers.2"]


def test_a_chain_of_plain_layers_is_no_stack() -> None:
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []
    assert names(nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})) == []


def test_only_the_outermost_of_nested_stacks() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(Block() for _ in range(2))

    model = nn.ModuleDict({"stages": nn.ModuleList(Outer() for _ in range(2))})
    assert names(model) == ["stages.0", "stages.1"]


def test_stacks_side_by_side() -> None:
    model = nn.ModuleDict({side: nn.ModuleList(Block() for _ in range(2)) for side in ("encoder", "decoder")})
    assert names(model) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]


def test_members_without_weights_are_passed_over() -> None:
    model = nn.ModuleDict({"body": nn.Sequential(Block(), nn.ReLU(), Block())})
    assert names(model) == ["body.0", "body.2"]


def test_the_model_itself_may_be_the_container() -> None:
    assert names(nn.Sequential(nn.Linear(4, 4), Block(), Block())) == ["0", "1", "2"]


@pytest.mark.parametrize(("kind", "found"), [(Block, ["body.0", "body.1"]), (lambda: nn.Linear(4, 4), [])])
def test_compiled_members_count_as_what_they_were(kind: type[nn.Module], found: list[str]) -> None:
    members = [torch.compile(kind()), torch.compile(kind())]
    assert names(nn.ModuleDict({"body": nn.Sequential(*members)})) == found


def test_a_list_of_lists_is_one_list() -> None:
    """As of Funnel, whose stages are lists of layers."""
    model = nn.ModuleDict({"stages": nn.ModuleList([nn.ModuleList([Block()]), nn.ModuleList([Block(), Block()])])})
    assert names(model) == ["stages.0.0", "stages.1.0", "stages.1.1"]


def test_the_only_member_of_a_list_may_be_called_many_times() -> None:
    """As of ALBERT, whose one group of layers is run as often as there are layers."""
    assert names(nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"inner": nn.ModuleList([Block()])})])})) == [
        "layers.0"
    ]
    assert names(nn.ModuleDict({"layers": nn.ModuleList([Stack()])})) == [f"layers.0.layers.{n}" for n in range(3)]
    assert names(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)])})) == []
    assert names(nn.Sequential(Stack())) == ["0.layers.0", "0.layers.1", "0.layers.2"]


def test_one_module_at_several_places_of_a_list() -> None:
    block = Block()
    assert names(nn.ModuleDict({"body": nn.ModuleList([block, block])})) == ["body.0"]
    assert names(nn.Sequential(nn.Linear(4, 4), block, block)) == ["0", "1"]


def test_a_block_outside_of_any_list_is_known_by_its_name_or_that_of_its_class() -> None:
    parts = {"embedding": nn.Embedding(4, 4), "head": nn.Sequential(nn.Linear(4, 4))}
    assert names(nn.ModuleDict({**parts, "shared": Block()})) == ["shared"]
    named = nn.ModuleDict({**parts, "block1": nn.Sequential(nn.Linear(4, 4)), "layer": nn.Linear(4, 4)})
    assert names(named) == ["block1"], "a layer that is made of nothing else is none"
    assert names(nn.ModuleDict({**parts, "shared": Block(), "stack": Stack()})) == [
        f"stack.layers.{n}" for n in range(3)
    ]
    assert names(nn.ModuleDict({"layer": nn.ModuleDict(parts)})) == [], "never called"
