"""Several managed models in one process, one after the other or at once; and what `close` gives back."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from torch import Tensor, nn

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


def pair() -> tuple[nn.Module, Optimizer]:
    model = seeded(Tower)
    return model, adamw(model)


# At once


@with_both_schedules
@pytest.mark.parametrize("places", [("streamed-host", "streamed-device"), ("mixed", "resident-host")])
@pytest.mark.parametrize("first_closed", [0, 1])
def test_two_models_with_interleaved_steps(places: tuple[str, str], schedule: str, first_closed: int) -> None:
    """A teacher that learns and a student: each forward between the other's forward and backward."""

    def train(pairs: list[tuple[nn.Module, Optimizer]], seeds: range) -> list[Tensor]:
        seen = []
        (one, one_optimizer), (other, other_optimizer) = pairs
        for seed in seeds:
            first = loss_of(one, seed)
            second = (one(inputs(seed + 50)).detach() - other(inputs(seed + 50))).square().mean()
            first.backward()
            one_optimizer.step()
            second.backward()
            one_optimizer.zero_grad()
            other_optimizer.step()
            other_optimizer.zero_grad()
            seen += [first.detach(), second.detach()]
        return seen

    plain = [pair(), pair()]
    managed = [pair(), pair()]
    sessions = [manage(*item, place, schedule) for item, place in zip(managed, places, strict=True)]
    assert_same_values(train(plain, range(3)), train(managed, range(3)))
    sessions[first_closed].close()
    assert_same_values(train(plain, range(3, 5)), train(managed, range(3, 5)))
    sessions[1 - first_closed].close()
    assert_same_values(train(plain, range(5, 7)), train(managed, range(5, 7)))
    for (one, one_optimizer), (other, other_optimizer) in zip(plain, managed, strict=True):
        assert_same_tensors(one.state_dict(), other.state_dict())
        assert_same_state(one_optimizer, other_optimizer)


@in_all_places
def test_one_loss_through_two_managed_models(place: str) -> None:
    def train(one: nn.Module, other: nn.Module, optimizers: list[Optimizer]) -> list[Tensor]:
        seen = []
        for seed in range(3):
            # The second model reads what the first gives, so that its gradient goes through both.
            hidden = one(inputs(seed))
            loss = other(torch.cat([hidden, hidden], dim=1)).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            seen.append(loss.detach())
        return seen

    (one, first), (other, second) = pair(), pair()
    expected = train(one, other, [first, second])
    (managed_one, managed_first), (managed_other, managed_second) = pair(), pair()
    with manage(managed_one, managed_first, place), manage(managed_other, managed_second, "streamed-host"):
        assert_same_values(expected, train(managed_one, managed_other, [managed_first, managed_second]))
    assert_same_tensors(one.state_dict(), managed_one.state_dict())
    assert_same_tensors(other.state_dict(), managed_other.state_dict())


# Twice


@in_all_places
def test_a_managed_model_cannot_be_managed_again(place: str) -> None:
    model, optimizer = pair()
    session = manage(model, optimizer, place)
    with pytest.raises(SessionError, match="under management already; close that session first"):
        manage(model, optimizer, place)
    steps(model, optimizer)
    session.close()
    with manage(model, optimizer, place):
        steps(model, optimizer)


@pytest.mark.parametrize("place", ["streamed-host", "streamed-device", "mixed"])
def test_nor_where_nobody_holds_the_session(place: str) -> None:
    model, optimizer = pair()
    manage(model, optimizer, place)
    gc.collect()
    with pytest.raises(SessionError, match="under management already"):
        manage(model, optimizer, place)
    steps(model, optimizer)


def test_nor_a_part_of_it_nor_a_model_around_it_nor_its_optimizer() -> None:
    model, optimizer = pair()
    assert isinstance(model, Tower)
    with manage(model, optimizer, "streamed-host"):
        for other in (model.blocks[0], nn.Sequential(model)):
            with pytest.raises(SessionError, match="under management already"):
                manage(other, adamw(other), "streamed-host")
        with pytest.raises(SessionError, match="optimizer is under management already"):
            manage(seeded(Tower), optimizer, "streamed-host")
        steps(model, optimizer)


@in_all_places
@with_both_schedules
def test_a_session_that_is_forgotten_with_its_model_is_freed(place: str, schedule: str) -> None:
    model, optimizer = pair()
    manage(model, optimizer, place, schedule)
    steps(model, optimizer)
    gone = weakref.ref(model)
    del model, optimizer
    for _ in range(100):
        # The last update may still be running in its thread, and holds what it works on.
        gc.collect()
        if gone() is None:
            break
        time.sleep(0.02)
    assert gone() is None


# Closing


@in_all_places
@with_both_schedules
@pytest.mark.parametrize("moment", ["between steps", "after forward", "after backward", "after step"])
def test_closed_in_the_middle_it_trains_on_plainly(place: str, schedule: str, moment: str) -> None:
    model, optimizer = pair()
    plain, plain_optimizer = pair()
    session = manage(model, optimizer, place, schedule)
    assert_same_values(steps(plain, plain_optimizer), steps(model, optimizer))
    if moment != "between steps":
        losses = [loss_of(network, 40) for network in (plain, model)]
        if moment == "after forward":
            session.close()
            losses = [loss_of(network, 40) for network in (plain, model)]
        for loss in losses:
            loss.backward()
        if moment == "after backward":
            session.close()
            if schedule == "deferred":
                assert_same_values(
                    [parameter.grad for parameter in plain.parameters() if parameter.grad is not None],
                    [parameter.grad for parameter in model.parameters() if parameter.grad is not None],
                )
        for each in (plain_optimizer, optimizer):
            each.step()
            if moment == "after step" and each is optimizer:
                session.close()
            each.zero_grad()
    session.close()
    session.close()
    assert not session.is_open
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert_same_tensors(plain.state_dict(), model.state_dict())
    assert_same_state(plain_optimizer, optimizer)
    assert_same_values(steps(plain, plain_optimizer, range(50, 53)), steps(model, optimizer, range(50, 53)))
    assert_same_tensors(plain.state_dict(), model.state_dict())
    assert_same_state(plain_optimizer, optimizer)


@in_all_places
def test_parameters_share_no_memory_after_close(place: str) -> None:
    """Each has a storage of its own, of its own size: nothing of the session is kept alive."""
    model, optimizer = pair()
    with manage(model, optimizer, place):
        loss_of(model, 0).backward()
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert parameter.grad is not None
        assert parameter.grad.untyped_storage().nbytes() == parameter.nbytes
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks


@in_all_places
@with_both_schedules
def test_closed_by_an_exception_it_trains_on_plainly(place: str, schedule: str) -> None:
    model, optimizer = pair()
    plain, plain_optimizer = pair()
    steps(plain, plain_optimizer)

    def break_off() -> None:
        with manage(model, optimizer, place, schedule):
            steps(model, optimizer)
            loss_of(model, 30)
            raise KeyError("loop")

    with pytest.raises(KeyError, match="loop"):
        break_off()
    assert_same_tensors(plain.state_dict(), model.state_dict())
    assert_same_values(steps(plain, plain_optimizer, range(5, 8)), steps(model, optimizer, range(5, 8)))


@pytest.mark.parametrize("place", ["streamed-host", "streamed-device", "mixed"])
def test_what_a_closed_session_is_asked(place: str) -> None:
    model, optimizer = pair()
    session = manage(model, optimizer, place)
    old = loss_of(model, 0)
    session.close()
    for ask in (session.stats, session.timeline, session.settle, lambda: session.plan, lambda: session.last_grad_norm):
        with pytest.raises(SessionError, match="this session is closed"):
            ask()
    with pytest.raises(SessionError, match="session that was closed since"):
        old.backward()
    model.zero_grad()
    steps(model, optimizer)
