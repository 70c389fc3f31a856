"""torch.compile: of each block, before the model is managed; of the whole model, around the managed one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import ModelChangedError, SessionError
from tests.runtime.side_by_side import (
    WIDTH,
    Block,
    Tower,
    adamw,
    assert_same_values,
    in_all_places,
    in_turn,
    inputs,
    manage,
    seeded,
    side_by_side,
    steps,
    with_both_schedules,
)
from tests.zoo import assert_same_tensors

Optimizer = torch.optim.Optimizer
# Raised inside the compiler, of plain models as well, and where it meets what it cannot take in.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled_in_place(backend: str) -> nn.Module:
    tower = Tower()
    for block in tower.blocks:
        block.compile(backend=backend)
    return tower


def compiled_wrappers(backend: str) -> nn.Module:
    tower = Tower()
    for index, block in enumerate(tower.blocks):
        tower.blocks[index] = torch.compile(block, backend=backend)
    return tower


BUILDS = {"block.compile()": compiled_in_place, "torch.compile(block)": compiled_wrappers}


def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    seen = steps(model, optimizer)
    model.eval()
    with torch.no_grad():
        seen.append(model(inputs(30)))
    model.train()
    return seen + steps(model, optimizer, range(3, 5))


@in_all_places
@with_both_schedules
@pytest.mark.parametrize("how", BUILDS)
def test_compiled_blocks(how: str, place: str, schedule: str) -> None:
    side_by_side(loop, place, schedule=schedule, build=lambda: BUILDS[how]("eager"))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["streamed-host", "mixed"])
@with_both_schedules
@pytest.mark.parametrize("how", BUILDS)
def test_blocks_compiled_by_inductor(how: str, place: str, schedule: str) -> None:
    side_by_side(loop, place, schedule=schedule, build=lambda: BUILDS[how]("inductor"))


def test_equal_blocks_share_one_graph() -> None:
    """Equal blocks compile once, whichever buffer their weights are in and however often they are fetched anew."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    model = seeded(Tower)
    assert isinstance(model, Tower)
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    optimizer = adamw(model)
    with manage(model, optimizer, "streamed-host"):
        steps(model, optimizer, range(4))
    assert len(graphs) == 1


@in_all_places
@with_both_schedules
def test_compiling_around_a_managed_model_is_refused(place: str, schedule: str) -> None:
    plain = seeded(Tower)
    model = seeded(Tower)
    optimizer = adamw(model)
    with manage(model, optimizer, place, schedule):
        compiled = torch.compile(model, backend="eager")
        with pytest.raises(SessionError, match=r"torch.compile around a managed model .* block.compile\(\)"):
            compiled(inputs(0))
        steps(plain, adamw(plain))
        steps(model, optimizer)
    assert_same_tensors(plain.state_dict(), model.state_dict())


def test_a_managed_model_without_windows_may_be_compiled_around() -> None:
    plain = seeded(Tower)
    expected = steps(plain, adamw(plain))
    model = seeded(Tower)
    optimizer = adamw(model)
    with lowtide.manage(model, optimizer, lowtide.make_plan(model, weights="resident", update="device"), device="cpu"):
        assert_same_values(expected, steps(torch.compile(model, backend="eager"), optimizer))


def whole_wrapper() -> nn.Module:
    return torch.compile(Tower(), backend="eager")  # type: ignore[return-value]


def whole_in_place() -> nn.Module:
    tower = Tower()
    tower.compile(backend="eager")
    return tower


class Halves(nn.Module):
    """Two towers' worth of blocks, one of them compiled as one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, WIDTH), Block(), Block())
        self.first.compile(backend="eager")
        self.second = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


@in_turn
@pytest.mark.parametrize("build", [whole_wrapper, whole_in_place, Halves])
def test_models_compiled_as_one_piece_before(build: Callable[[], nn.Module], place: str, schedule: str) -> None:
    """A compiled piece is one group: nothing inside it is called by itself, so nothing inside can come and go."""
    groups = {group.name for group in lowtide.make_plan(build()).groups}
    assert groups == ({"first", "second.0", "second.1", ""} if build is Halves else {""})
    side_by_side(loop, place, schedule=schedule, build=build)


@pytest.mark.parametrize("place", ["streamed-host", "streamed-device"])
def test_compiling_a_managed_block_in_place_is_refused(place: str) -> None:
    """It takes the place of the block's window: its weights would never come."""
    model = seeded(Tower)
    assert isinstance(model, Tower)
    optimizer = adamw(model)
    with manage(model, optimizer, place):
        steps(model, optimizer)
        model.blocks[0].compile(backend="eager")
        with pytest.raises(ModelChangedError, match=r"blocks.0 was compiled .* before"):
            steps(model, optimizer)


@in_all_places
def test_compiling_a_managed_model_in_place_is_refused(place: str) -> None:
    plain, model = seeded(Tower), seeded(Tower)
    steps(plain, adamw(plain))
    optimizer = adamw(model)
    with manage(model, optimizer, place, "in_backward"):
        with pytest.raises(SessionError, match=r"torch.compile around a managed model .* block.compile\(\)"):
            model.compile(backend="eager")
        steps(model, optimizer)
    assert_same_tensors(plain.state_dict(), model.state_dict())
    model.compile(backend="eager")
    steps(model, optimizer)
