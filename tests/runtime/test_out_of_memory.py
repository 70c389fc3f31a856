"""After an emulated out-of-memory error: what the step held is freed at once, and a dropped session has no say."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import EmulatedOutOfMemoryError
from lowtide.runtime.host_worker import HostWorker

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


def test_a_session_that_is_open_keeps_its_budget_and_says_how_to_end_it() -> None:
    model, optimizer = make()
    session = lowtide.manage(model, optimizer, lowtide.make_plan(model, device_memory=SMALL), device="cpu")
    with pytest.raises(EmulatedOutOfMemoryError, match=r"session\.close\(\) lifts the budget"):
        torch.ones(1000, 100)
    session.close()
    torch.ones(1000, 100)


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
