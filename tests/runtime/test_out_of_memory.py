"""After an emulated out-of-memory error: what the step held is freed at once, and a dropped session has no say."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import EmulatedOutOfMemoryError
from lowtide.runtime.updates.worker import HostWorker

SMALL, LARGE = "128KiB", "64MiB"
"""For the model below: too little for a batch of 256, and more than enough."""


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, size: int) -> None:
    model(torch.randn(size, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def train_without_close(budget: str) -> None:
    model, optimizer = make()
    session = lowtide.manage(model, optimizer, lowtide.make_plan(model, device_memory=budget), device="cpu")
    for _ in range(2):
        step(model, optimizer, 256)
    session.close()


def test_the_error_and_what_its_frames_hold_die_with_the_last_reference() -> None:
    model, optimizer = make()
    held: list[weakref.ref[object]] = []

    def fail() -> None:
        batch = torch.randn(256, 64)
        held.append(weakref.ref(batch.untyped_storage()))
        model(batch)

    with lowtide.manage(model, optimizer, lowtide.make_plan(model, device_memory=SMALL), device="cpu"):
        with pytest.raises(EmulatedOutOfMemoryError):
            fail()
        assert [reference() for reference in held] == [None]


def standing_bytes(session: lowtide.Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """What the device holds after a step, once the worker's part of it is done."""
    step(model, optimizer, 16)
    session.settle()
    session.take_device_peak()
    return session.take_device_peak()


def test_a_smaller_batch_fits_after_one_that_did_not() -> None:
    model, optimizer = make()
    with lowtide.manage(model, optimizer, lowtide.make_plan(model, device_memory=SMALL), device="cpu") as session:
        usual = standing_bytes(session, model, optimizer)
        for size in (256, 16, 256, 16):
            if size == 16:
                assert standing_bytes(session, model, optimizer) <= usual
                continue
            with pytest.raises(EmulatedOutOfMemoryError):
                step(model, optimizer, size)
            optimizer.zero_grad()


def test_a_session_that_was_dropped_has_no_say() -> None:
    """Neither in another session nor in plain torch."""
    with pytest.raises(EmulatedOutOfMemoryError):
        train_without_close(SMALL)
    train_without_close(LARGE)
    assert (torch.ones(1000, 100) * 2).sum() == 200_000


def test_plain_torch_after_a_session_that_was_dropped() -> None:
    with pytest.raises(EmulatedOutOfMemoryError):
        train_without_close(SMALL)
    assert (torch.ones(1000, 100) * 2).sum() == 200_000


def test_an_error_says_whose_budget_it_is_and_how_to_end_it() -> None:
    model, optimizer = make()
    session = lowtide.manage(model, optimizer, lowtide.make_plan(model, device_memory=SMALL), device="cpu")
    with pytest.raises(
        EmulatedOutOfMemoryError,
        match=r"of .*KiB in use\. .* the budget of the session of a Sequential, which its close\(\) lifts",
    ):
        step(model, optimizer, 256)
    session.close()
    step(model, optimizer, 256)


def recurrent() -> None:
    """A plain model beside a managed one, far beyond its budget."""
    output, _ = nn.LSTM(8, 64)(torch.ones(4, 128, 8))
    output.sum().backward()


class BrokenError(Exception):
    """What these loops raise."""


def fail(*_: object) -> None:
    raise BrokenError


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "update"), [("streamed", "host"), ("resident", "device")])
@pytest.mark.parametrize("moment", ["forward", "loss", "backward", "step", None])
def test_what_is_computed_beside_the_model_does_not_count(weights: str, update: str, moment: str | None) -> None:
    """Whether the last step went well or was left by an exception."""
    model, optimizer = make()
    plan = lowtide.make_plan(model, weights=weights, update=update, device_memory=SMALL)
    with lowtide.manage(model, optimizer, plan, device="cpu") as session:
        tracked = session._open().setup.tracked
        assert tracked is not None
        step(model, optimizer, 2)
        recurrent()
        assert isinstance(model, nn.Sequential)
        handles: list[Any] = []
        if moment == "forward":
            handles = [model[-1].register_forward_hook(fail)]
        elif moment == "backward":
            handles = [model[-1].register_full_backward_hook(fail)]
        elif moment == "step":
            handles = [optimizer.register_step_pre_hook(fail)]
        try:
            out = model(torch.ones(2, 64))
            recurrent()
            if moment == "loss":
                fail()
            out.sum().backward()
            optimizer.step()
        except BrokenError:
            pass
        recurrent()
        before_bytes = tracked.current_bytes
        beside = torch.ones(1000, 100)
        assert tracked.current_bytes == before_bytes
        assert beside.sum() == 100_000
        for handle in handles:
            handle.remove()
        optimizer.zero_grad()
        step(model, optimizer, 2)
        with pytest.raises(EmulatedOutOfMemoryError):
            step(model, optimizer, 256)


def test_what_is_computed_from_the_device_s_memory_counts_wherever_it_is() -> None:
    model, optimizer = make()
    with lowtide.manage(model, optimizer, lowtide.make_plan(model, weights="resident"), device="cpu") as session:
        tracked = session._open().setup.tracked
        assert tracked is not None
        before_bytes = tracked.current_bytes
        batch = torch.ones(4, 64)
        assert tracked.current_bytes == before_bytes
        with torch.no_grad():
            out = model(batch)
            # The batch came to the device, and the result was made there.
            assert tracked.current_bytes == before_bytes + batch.nbytes + out.nbytes
            doubled = out * 2
            target = torch.zeros_like(out)
            host = torch.zeros(4, 64)
            before_bytes += batch.nbytes + out.nbytes + doubled.nbytes + target.nbytes
            assert tracked.current_bytes == before_bytes
            # What meets it is brought to it.
            difference = doubled - host
            assert tracked.current_bytes == before_bytes + host.nbytes + difference.nbytes


def test_a_model_keeps_its_session_s_budget() -> None:
    """The user holds the model alone: that is a session in use."""
    model, optimizer = make()
    lowtide.manage(model, optimizer, lowtide.make_plan(model, device_memory=SMALL), device="cpu")
    for _ in range(2):
        with pytest.raises(EmulatedOutOfMemoryError):
            step(model, optimizer, 256)


def test_a_worker_s_error_holds_no_cycle() -> None:
    worker = HostWorker()
    held: list[weakref.ref[object]] = []

    def fail() -> None:
        tensor = torch.ones(3)
        held.append(weakref.ref(tensor.untyped_storage()))
        raise ValueError(str(tensor.sum()))

    job = worker.submit(fail)
    worker.submit(lambda: None, after=[job])
    del job
    worker.close()
    with pytest.raises(ValueError, match="3"):
        worker.check()
    del worker
    assert [reference() for reference in held] == [None]
