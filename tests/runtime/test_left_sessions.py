"""Sessions that an exception leaves: closed by the next `manage`, by collection of the model, or by the end of a `with`."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import set_eval_frame

import lowtide
from lowtide.errors import SessionError
from tests.runtime.side_by_side import (
    Tower,
    adamw,
    assert_same_state,
    assert_same_values,
    in_all_places,
    inputs,
    loss_of,
    manage,
    seeded,
    steps,
    with_both_schedules,
)
from tests.zoo import assert_same_tensors

Optimizer = torch.optim.Optimizer


class BrokenError(Exception):
    """What a loop of these tests raises."""


def pair() -> tuple[nn.Module, Optimizer]:
    model = seeded(Tower)
    return model, adamw(model)


def fail(*_: object) -> None:
    raise BrokenError


def assert_goes_on(model: nn.Module, optimizer: Optimizer, place: str, schedule: str) -> None:
    """Managed again, it trains as a plain model that has taken two steps."""
    plain, plain_optimizer = pair()
    steps(plain, plain_optimizer, range(2))
    with manage(model, optimizer, place, schedule):
        optimizer.zero_grad()
        assert_same_values(
            steps(plain, plain_optimizer, range(5, 8)),
            steps(model, optimizer, range(5, 8)),
        )
    assert_same_tensors(plain.state_dict(), model.state_dict())
    assert_same_state(plain_optimizer, optimizer)


# Where the session itself sees the exception, it is left even where somebody holds it.


@in_all_places
@with_both_schedules
def test_one_whose_forward_raised_is_closed_by_the_next(place: str, schedule: str) -> None:
    model, optimizer = pair()
    session = manage(model, optimizer, place, schedule)
    steps(model, optimizer, range(2))
    assert isinstance(model, Tower)
    handle = model.blocks[1].register_forward_hook(fail)
    with pytest.raises(BrokenError):
        loss_of(model, 9)
    handle.remove()
    assert_goes_on(model, optimizer, place, schedule)
    assert not session.is_open


def test_all_resident_too() -> None:
    model, optimizer = pair()
    plan = lowtide.make_plan(model, weights="resident", update="device")
    session = lowtide.manage(model, optimizer, plan, device="cpu")
    handle = model.register_forward_hook(fail)
    with pytest.raises(BrokenError):
        loss_of(model, 9)
    handle.remove()
    with lowtide.manage(model, optimizer, plan, device="cpu"):
        assert not session.is_open


@in_all_places
def test_one_whose_backward_raised_is_closed_by_the_next(place: str) -> None:
    model, optimizer = pair()
    session = manage(model, optimizer, place)
    steps(model, optimizer, range(2))
    assert isinstance(model, Tower)
    hidden = model.stem(inputs(9))
    for block in model.blocks:
        hidden = block(hidden)
    hidden.register_hook(fail)
    with pytest.raises(BrokenError):
        model.head(model.norm(hidden)).sum().backward()
    assert_goes_on(model, optimizer, place, "deferred")
    assert not session.is_open


def test_a_step_that_was_made_by_half_is_told() -> None:
    model, optimizer = pair()
    session = manage(model, optimizer, "streamed-host", "in_backward")
    assert isinstance(model, Tower)
    handle = model.blocks[1].register_full_backward_hook(fail)
    with pytest.raises(BrokenError):
        loss_of(model, 9).backward()
    handle.remove()
    with (
        pytest.warns(
            UserWarning, match=r"session before this one is closed: the backward .* raised after it had updated 3 of 5"
        ),
        manage(model, optimizer, "streamed-host"),
    ):
        assert not session.is_open


@in_all_places
def test_one_whose_step_raised_is_closed_by_the_next(place: str) -> None:
    model, optimizer = pair()
    session = manage(model, optimizer, place)
    steps(model, optimizer, range(2))
    handle = optimizer.register_step_pre_hook(fail)
    loss_of(model, 9).backward()
    with pytest.raises(BrokenError):
        optimizer.step()
    handle.remove()
    assert_goes_on(model, optimizer, place, "deferred")
    assert not session.is_open


def test_a_part_of_it_may_be_managed_then() -> None:
    model, optimizer = pair()
    session = manage(model, optimizer, "streamed-host")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 3))
    assert isinstance(model, Tower)
    with manage(model.blocks, None, "streamed-host"):
        assert not session.is_open


@in_all_places
def test_after_a_call_that_went_well_it_is_alive(place: str) -> None:
    model, optimizer = pair()
    with manage(model, optimizer, place) as session:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, 3))
        steps(model, optimizer)
        with pytest.raises(SessionError, match="under management already; close that session first"):
            manage(model, optimizer, place)
        assert session.is_open


def test_an_exception_that_the_model_catches_leaves_nothing() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            try:
                out: Tensor = self.second(x)
            except RuntimeError:
                out = self.first(x)
            return out

    model = Careful()
    with manage(model, None, "streamed-host"):
        model(inputs(0))
        with pytest.raises(SessionError, match="under management already"):
            manage(model, None, "streamed-host")


# Where the user's own code raises, nobody holds the session any more.


def train(model: nn.Module, optimizer: Optimizer, place: str, schedule: str) -> None:
    session = manage(model, optimizer, place, schedule)
    steps(model, optimizer, range(2))
    loss_of(model, 9)
    assert session.is_open
    raise BrokenError


@in_all_places
@with_both_schedules
def test_one_whose_function_raised_is_closed_by_the_next(place: str, schedule: str) -> None:
    model, optimizer = pair()
    with pytest.raises(BrokenError):
        train(model, optimizer, place, schedule)
    assert_goes_on(model, optimizer, place, schedule)


@pytest.mark.parametrize("is_looked_into", [False, True])
def test_also_while_a_traceback_holds_it(is_looked_into: bool) -> None:
    """As a notebook keeps the last one; a debugger looks into its frames."""
    model, optimizer = pair()
    try:
        train(model, optimizer, "streamed-host", "deferred")
    except BrokenError as error:
        kept = error
    assert kept.__traceback__ is not None
    if is_looked_into:
        assert kept.__traceback__.tb_next is not None
        assert "session" in kept.__traceback__.tb_next.tb_frame.f_locals
    assert_goes_on(model, optimizer, "streamed-host", "deferred")


def test_also_where_the_compiler_runs_the_frames() -> None:
    """It owns the arguments of each call once more than Python does."""
    model, optimizer = pair()
    try:
        train(model, optimizer, "streamed-host", "deferred")
    except BrokenError as error:
        kept = error
    assert kept.__traceback__ is not None
    before = set_eval_frame(False)
    try:
        session = manage(model, optimizer, "streamed-host")
        with pytest.raises(SessionError, match="under management already"):
            manage(model, optimizer, "streamed-host")
    finally:
        set_eval_frame(before)
    session.close()


def test_not_while_a_function_still_runs_that_holds_it() -> None:
    model, optimizer = pair()

    def hold() -> None:
        session = manage(model, optimizer, "streamed-host")
        steps(model, optimizer, range(1))
        with pytest.raises(SessionError, match="under management already"):
            manage(model, optimizer, "streamed-host")
        assert session.is_open

    hold()


# Other ends


def test_collection_of_the_model_lifts_the_budget() -> None:
    model, optimizer = pair()
    tracked = manage(model, optimizer, "streamed-host")._open().setup.tracked
    assert tracked is not None
    tracked.budget_bytes = tracked.current_bytes + 4096
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 3))
    del model, optimizer, tracked
    gc.collect()
    assert torch.ones(1 << 20).sum() == 1 << 20
