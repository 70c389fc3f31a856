"""torch.compile: of each block, before the model is managed; of the whole model, around the managed one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import ModelChangedError
from tests.runtime.side_by_side import (
    Tower,
    adamw,
    in_all_places,
    inputs,
    manage,
    seeded,
    side_by_side,
    steps,
    with_both_schedules,
)
from tests.zoo import assert_same_tensors

Optimizer = torch.optim.Optimizer


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
def test_the_whole_model_compiled_around_the_managed_one(place: str, schedule: str) -> None:
    """The windows are outside of compiled regions: each group's code is compiled by itself."""
    plain = seeded(Tower)
    expected = steps(plain, adamw(plain))
    model = seeded(Tower)
    optimizer = adamw(model)
    with manage(model, optimizer, place, schedule):
        found = steps(torch.compile(model, backend="eager"), optimizer)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert_same_tensors(plain.state_dict(), model.state_dict())


@in_all_places
def test_the_whole_model_compiled_before(place: str) -> None:
    """What torch.compile returned is the model that is managed."""
    side_by_side(loop, place, build=lambda: torch.compile(Tower(), backend="eager"))  # type: ignore[arg-type,return-value]


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
