"""A session is used by one thread of one process at a time: others are told so, and break nothing."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lowtide.errors import SessionError, StepLostError
from tests.runtime.side_by_side import (
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
)

Optimizer = torch.optim.Optimizer
MOST_S = 1.0
"""That a refusal may take."""


def pair() -> tuple[nn.Module, Optimizer]:
    model = seeded(Tower)
    return model, adamw(model)


# -- processes ---------------------------------------------------------------------------------------------------------

forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def told_by_child(act: Callable[[], object]) -> tuple[str, float]:
    """What came of it in a forked process, and after how many seconds."""

    def run(answers: Any) -> None:
        started_s = time.perf_counter()
        try:
            act()
            said = "went well"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        answers.put((said, time.perf_counter() - started_s))

    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=run, args=(answers,))
    child.start()
    child.join(timeout=20)
    if child.is_alive():
        child.kill()
        child.join()
        return "never ended", 20.0
    said, seconds = answers.get()
    return str(said), float(seconds)


def train_once(model: nn.Module, optimizer: Optimizer) -> None:
    steps(model, optimizer, range(1))


@forks
@pytest.mark.parametrize("place", ["streamed-host", "resident-host"])
@pytest.mark.parametrize("act", ["forward", "train", "state_dict", "step", "zero_grad", "read", "manage"])
def test_a_forked_child_is_refused_at_once(place: str, act: str) -> None:
    model, optimizer = pair()
    with manage(model, optimizer, place) as session:
        train_once(model, optimizer)
        if act == "read":
            session.settle()
            model(inputs(1))  # weights are on the device
        acts: dict[str, Callable[[], object]] = {
            "forward": lambda: model(inputs(1)),
            "train": lambda: train_once(model, optimizer),
            "state_dict": optimizer.state_dict,
            "step": optimizer.step,
            "zero_grad": optimizer.zero_grad,
            "read": lambda: [parameter.sum().item() for parameter in model.parameters()],
            "manage": lambda: manage(model, optimizer, place),
        }
        said, seconds = told_by_child(acts[act])
        if not (act == "read" and place == "resident-host"):
            assert said.startswith("SessionError: process "), said
            assert "was forked from the one that manages this model" in said
            assert "get_context('spawn')" in said
        assert seconds < MOST_S
        train_once(model, optimizer)


@forks
def test_what_a_child_may_do() -> None:
    model, optimizer = pair()
    with manage(model, optimizer, "streamed-host") as session:
        train_once(model, optimizer)

        def own_model() -> None:
            torch.set_num_threads(1)  # as a data loader's workers do: torch's own threads do not survive a fork
            own, own_optimizer = pair()
            with manage(own, own_optimizer, "streamed-host"):
                train_once(own, own_optimizer)

        def leave_block() -> None:
            with session:
                pass

        for act in (own_model, leave_block, session.close, lambda: next(model.parameters()).shape):
            assert told_by_child(act)[0] == "went well"
        assert session.is_open
        train_once(model, optimizer)


@forks
def test_a_child_that_ends_in_the_plain_way_ends() -> None:
    """With what Python does at its end, in which workers are closed."""
    model, optimizer = pair()
    with manage(model, optimizer, "streamed-host"):
        train_once(model, optimizer)
        child = os.fork()
        if child == 0:
            import atexit

            atexit._run_exitfuncs()
            os._exit(7)
        ends_s = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < ends_s:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(child, 9)
            ended = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(ended[1]) == 7
        train_once(model, optimizer)


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return inputs(index, 1)[0]


@forks
@pytest.mark.parametrize(("place", "schedule"), [("streamed-host", "deferred"), ("mixed", "in_backward")])
def test_forked_data_loaders_go_on_working(place: str, schedule: str) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for _ in range(2):
            for batch in DataLoader(Rows(), batch_size=4, num_workers=1, multiprocessing_context="fork"):
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        return losses

    side_by_side(loop, place, schedule=schedule)


# -- threads -----------------------------------------------------------------------------------------------------------


def told_by_thread(act: Callable[[], object]) -> str:
    """What came of it in a thread named "second"."""
    said: list[str] = []

    def run() -> None:
        try:
            act()
            said.append("went well")
        except BaseException as error:
            said.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name="second")
    thread.start()
    thread.join(timeout=20)
    return said[0] if said else "never ended"


@contextmanager
def in_the_middle(act: Callable[[], str], module: nn.Module, *, of_backward: bool) -> Iterator[list[str]]:
    """What `act` says when the module's forward, or its backward, is reached the first time."""
    said: list[str] = []

    def reached(*_: object) -> None:
        if not said:
            said.append(act())

    handle = module.register_full_backward_hook(reached) if of_backward else module.register_forward_hook(reached)
    yield said
    handle.remove()


@in_turn
@pytest.mark.parametrize("act", ["forward", "module", "step"])
@pytest.mark.parametrize("of_backward", [False, True], ids=["beside a forward", "beside a backward"])
def test_a_second_thread_is_refused_and_breaks_nothing(place: str, schedule: str, act: str, of_backward: bool) -> None:
    plain, plain_optimizer = pair()
    model, optimizer = pair()
    assert isinstance(model, Tower)
    expected = steps(plain, plain_optimizer)
    with manage(model, optimizer, place, schedule) as session:
        acts: dict[str, Callable[[], object]] = {
            "forward": lambda: model(inputs(1)),
            "module": lambda: model.blocks[0](torch.ones(2, 16)),
            "step": optimizer.step,
        }
        with in_the_middle(lambda: told_by_thread(acts[act]), model.blocks[1], of_backward=of_backward) as said:
            found = steps(model, optimizer)
        begun = "optimizer.step()" if act == "step" else "a forward"
        doing = "a backward" if of_backward else "a forward"
        assert said[0].startswith(
            f"TwoThreadsError: thread 'second' began {begun} of a managed model while thread 'MainThread' is in {doing} of it"
        ), said
        assert "Put a lock around the calls of both" in said[0]
        # It is alive: one that was refused says nothing about it.
        with pytest.raises(SessionError, match="under management already"):
            manage(model, optimizer, place)
        assert session.is_open
        assert_same_values(expected, found)


@pytest.mark.parametrize(
    ("place", "schedule"), [("streamed-host", "deferred"), ("streamed-device", "deferred"), ("mixed", "in_backward")]
)
@pytest.mark.parametrize("of_backward", [False, True], ids=["beside a forward", "beside a backward"])
def test_a_second_backward_is_refused_and_the_step_is_lost(place: str, schedule: str, of_backward: bool) -> None:
    """Weights that have no window get their gradients from autograd before anybody could refuse them."""
    plain, plain_optimizer = pair()
    model, optimizer = pair()
    assert isinstance(model, Tower)
    with manage(model, optimizer, place, schedule):
        hidden = torch.ones(2, 16, requires_grad=True)
        old = model.blocks[0](hidden).sum()
        with (
            in_the_middle(lambda: told_by_thread(old.backward), model.blocks[1], of_backward=of_backward) as said,
            pytest.raises(StepLostError, match="another thread began a backward in the middle of this step"),
        ):
            steps(model, optimizer, range(1))
        doing = "another" if of_backward else "a forward"
        assert said[0].startswith(
            "TwoThreadsError: thread 'second' began a backward of a managed model while thread"
        ), said
        assert f"'MainThread' is in {doing} of it" in said[0]
        optimizer.zero_grad()
        if schedule == "deferred":
            assert_same_values(steps(plain, plain_optimizer), steps(model, optimizer))


@in_all_places
@pytest.mark.parametrize("of_backward", [False, True])
def test_a_second_thread_that_reads_breaks_nothing(place: str, of_backward: bool) -> None:
    plain, plain_optimizer = pair()
    model, optimizer = pair()
    assert isinstance(model, Tower)
    first = model.stem.weight.detach().clone()
    expected = steps(plain, plain_optimizer)
    with manage(model, optimizer, place):
        read: list[Tensor] = []

        def act() -> str:
            return told_by_thread(lambda: read.append(model.stem.weight.detach().clone()))

        with in_the_middle(act, model.blocks[1], of_backward=of_backward) as said:
            found = steps(model, optimizer)
        assert said == ["went well"]
        assert torch.equal(read[0], first)
        assert_same_values(expected, found)


@in_turn
def test_threads_one_after_the_other(place: str, schedule: str) -> None:
    """Training in one, evaluation in another, and training on in a third."""
    plain, plain_optimizer = pair()
    model, optimizer = pair()
    expected: list[Tensor] = []
    found: list[Tensor] = []
    for network, stepped, seen in ((plain, plain_optimizer, expected), (model, optimizer, found)):
        session = manage(model, optimizer, place, schedule) if network is model else None

        def evaluate(network: nn.Module = network, seen: list[Tensor] = seen) -> None:
            with torch.no_grad():
                seen.append(network(inputs(7)))

        def train(network: nn.Module = network, stepped: Optimizer = stepped, seen: list[Tensor] = seen) -> None:
            seen.extend(steps(network, stepped, range(3, 5)))

        seen.extend(steps(network, stepped))
        assert [told_by_thread(evaluate), told_by_thread(train)] == ["went well", "went well"]
        seen.extend(steps(network, stepped, range(5, 7)))
        if session is not None:
            session.close()
    assert_same_values(expected, found)
