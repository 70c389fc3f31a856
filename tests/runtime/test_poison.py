"""Memory that holds nothing is poisoned and copies happen as late as they may: each wait that is left out shows.

Every test here breaks one thing and asks whether training notices: another loss than plain torch's, or an error.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import lowtide
from lowtide.errors import LowtideError
from lowtide.memory.chunk import Chunk, ChunkState
from lowtide.memory.emulated_mover import EmulatedMover
from lowtide.memory.mover import Ticket
from lowtide.memory.store import ChunkStore
from lowtide.runtime import plan_run as plan_run
from lowtide.runtime.parameters.gradients import GradientMover, HostGradient
from lowtide.runtime.parameters.group import ManagedGroup
from lowtide.runtime.parameters.residency import ManagedResidency
from lowtide.runtime.updates import updater as updater_module
from lowtide.runtime.updates.updater import Updater
from lowtide.runtime.updates.worker import BEFORE_UPDATES, Awaited, HostWorker, Job
from tests.runtime.twins import PLACES, Twins, adamw, make_batch, make_net, take_step

Outcome = tuple[list[float], list[torch.Tensor], dict[str, torch.Tensor]]


class LateJob(Job):
    """Work that is done when somebody waits for it, or for a later one."""

    def __init__(self, worker: LateWorker) -> None:
        super().__init__(worker._queue)
        self.worker = worker
        self.work: Callable[[], None] = lambda: None
        self.after: tuple[Awaited, ...] = ()
        self.lastly: Callable[[], None] = lambda: None

    def wait(self) -> None:
        self.worker.run_until(self)
        super().wait()


class LateWorker(HostWorker):
    """As late as the mover: what nobody waits for has not happened."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[LateJob] = deque()

    def new_job(self) -> LateJob:
        return LateJob(self)

    def submit(
        self,
        work: Callable[[], None],
        *,
        after: Iterable[Awaited] = (),
        lastly: Callable[[], None] = lambda: None,
        place: int = BEFORE_UPDATES,
        job: Job | None = None,
    ) -> Job:
        late = job if isinstance(job, LateJob) else self.new_job()
        late.work, late.after, late.lastly = work, tuple(after), lastly
        self.queue.append(late)
        return late

    def wait_for_one(self) -> bool:
        if not self.queue:
            return False
        self.queue[0].wait()
        return True

    def run_until(self, job: LateJob) -> None:
        while not job.is_done():
            first = self.queue.popleft()
            try:
                try:
                    for awaited in first.after:
                        awaited.wait()
                    first.work()
                finally:
                    first.lastly()
            except Exception as error:
                first.future.set_exception(error)
            else:
                first.future.set_result(None)

    def close(self) -> None:
        while self.queue:
            with contextlib.suppress(Exception):
                self.queue[0].wait()
        super().close()


@pytest.fixture(autouse=True)
def late_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_run, "HostWorker", LateWorker)


def run(place: str | None, schedule: str = "deferred", **plan: Any) -> Outcome:
    """Five steps with a look at a weight in between: losses, what was read, and the weights at the end."""
    model = make_net()
    optimizer = adamw(model)
    losses: list[float] = []
    read: list[torch.Tensor] = []
    with contextlib.ExitStack() as stack:
        if place is not None:
            made = lowtide.make_plan(model, schedule=schedule, **{**PLACES[place], **plan})
            stack.enter_context(lowtide.manage(model, optimizer, made, device="cpu"))
        for seed in range(5):
            losses.append(take_step(model, optimizer, seed).item())
            if seed == 2:
                read.append(model.layers[0].inner.weight.detach().clone())
            if seed == 3:
                with torch.no_grad():
                    model.layers[2].inner.weight.mul_(0.5)
    return losses, read, {name: value.clone() for name, value in model.state_dict().items()}


plain = functools.cache(functools.partial(run, None))


def shows(place: str, schedule: str = "deferred", **plan: Any) -> bool:
    """Whether the run differs from the plain one or fails."""
    try:
        losses, read, weights = run(place, schedule, **plan)
    except (AssertionError, LowtideError, RuntimeError):
        return True
    expected = plain()
    same_weights = all(torch.equal(weights[name], value) for name, value in expected[2].items())
    return not (losses == expected[0] and torch.equal(read[0], expected[1][0]) and same_weights)


EVERYTHING = {"window_memory": "64KiB"}
"""A window in which every group has room: what is not dropped stays."""
every_schedule = pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
streamed = pytest.mark.parametrize("place", ["streamed-device", "streamed-host", "mixed"])
# One worker does its work in order, so that a wait for anything else on the host hides a missing one: not mixed.
on_host = pytest.mark.parametrize("place", ["resident-host", "streamed-host"])


@pytest.mark.parametrize("place", PLACES)
@every_schedule
def test_unbroken_it_is_the_same_however_late_everything_happens(place: str, schedule: str) -> None:
    assert not shows(place, schedule)
    assert not shows(place, schedule, **EVERYTHING)
    assert not shows(place, schedule, prefetch_depth=3)


@streamed
@every_schedule
def test_a_computation_that_does_not_wait_for_its_weights(
    place: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmulatedMover, "compute_after", lambda mover, ticket: None)
    assert shows(place, schedule)


class PromptWorker(HostWorker):
    """Has done everything as soon as it is asked to."""

    def submit(self, work: Callable[[], None], **options: Any) -> Job:
        job = super().submit(work, **options)
        job.wait()
        return job


@every_schedule
def test_a_computation_that_does_not_wait_for_weights_that_come_before_it_asks(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_run, "HostWorker", PromptWorker)
    assert not shows("resident-host", schedule)
    monkeypatch.setattr(EmulatedMover, "compute_after", lambda mover, ticket: None)
    assert shows("resident-host", schedule)


@every_schedule
def test_memory_that_is_released_before_it_is_written_back(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = EmulatedMover.shrink
    monkeypatch.setattr(EmulatedMover, "shrink", lambda mover, buffer, after: whole(mover, buffer, []))
    assert shows("streamed-device", schedule)


@every_schedule
def test_a_fetch_that_does_not_wait_for_the_update(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ChunkStore._fetch

    def impatient(store: ChunkStore, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            chunk.host_work = None
        whole(store, chunks)

    monkeypatch.setattr(ChunkStore, "_fetch", impatient)
    assert shows("streamed-host", schedule)


@pytest.mark.parametrize("place", ["streamed-host", "mixed"])
@every_schedule
def test_an_old_copy_that_stays_after_an_update(place: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkStore, "drop", lambda store, name: None)
    assert shows(place, schedule, **EVERYTHING)


@pytest.mark.parametrize("place", ["streamed-host", "mixed"])
def test_an_old_copy_that_stays_after_an_update_in_backward(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ManagedResidency, "forget_old_copy", lambda residency, group: None)
    assert shows(place, "in_backward", **EVERYTHING)


@pytest.mark.parametrize("place", ["streamed-device", "mixed"])
@every_schedule
def test_an_update_on_the_device_that_is_not_written_back(
    place: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(store: ChunkStore, chunk: Chunk, at: Ticket | None = None) -> None:
        if chunk.state is not ChunkState.DIRTY:
            chunk.become(ChunkState.DIRTY)
        chunk.become(ChunkState.WRITING_BACK)

    monkeypatch.setattr(ChunkStore, "write_back", forgetful)
    assert shows(place, schedule)


@on_host
@every_schedule
def test_an_update_that_does_not_wait_for_its_gradients(
    place: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, send = Updater.update_on_host, GradientMover.send
    awaited: list[HostGradient] = []

    def send_unnoticed(mover: GradientMover) -> None:
        send(mover)
        for gradient in awaited:
            gradient.pending.clear()

    def impatient(updater: Updater, group: ManagedGroup, chunk: Chunk, members: Any, settings: Any) -> None:
        # Small gradients are sent when the update asks for them, which it does first.
        awaited[:] = [managed.host_gradient for managed in members]
        for gradient in awaited:
            gradient.pending.clear()
        whole(updater, group, chunk, members, settings)
        awaited.clear()

    monkeypatch.setattr(GradientMover, "send", send_unnoticed)
    monkeypatch.setattr(Updater, "update_on_host", impatient)
    # In a backward the verdict on the gradients comes behind them, and is waited for too: one wait would do.
    monkeypatch.setattr(updater_module, "judge_sent", lambda members, watch: None)
    assert shows(place, schedule)


@on_host
def test_a_buffer_that_is_recycled_before_the_update_has_read_it(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Updater.update_on_host

    def hasty(updater: Updater, group: ManagedGroup, chunk: Chunk, members: Any, settings: Any) -> None:
        staging = chunk.staging
        whole(updater, group, chunk, members, settings)
        if staging is not None:
            updater._cache.give_back(staging)

    monkeypatch.setattr(Updater, "update_on_host", hasty)
    assert shows(place, "in_backward")


@pytest.mark.parametrize("place", ["resident-host", "mixed"])
@every_schedule
def test_resident_weights_that_do_not_get_the_hosts_update(
    place: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChunkStore, "refresh", lambda store, name: None)
    assert shows(place, schedule)


@every_schedule
def test_a_write_to_resident_weights_that_the_host_does_not_take_over(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChunkStore, "refresh_host", lambda store, chunk: None)
    assert shows("resident-host", schedule)


@every_schedule
def test_a_look_at_a_weight_that_does_not_settle_it(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chunk, "settle_host", lambda chunk: None)
    assert shows("streamed-host", schedule)


@on_host
def test_a_look_at_a_gradient_that_does_not_wait_for_it(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def norms(both: Twins) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []

        def measure(model: torch.nn.Module, _: object) -> None:
            model(*make_batch(0)).backward()
            found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))

        both.each(measure)
        return found

    both = Twins(place)
    with contextlib.closing(both.session):
        one, other = norms(both)
        assert torch.equal(one, other)
    monkeypatch.setattr(HostGradient, "make_pending", lambda gradient, mover: None)
    both = Twins(place)
    with contextlib.closing(both.session):
        one, other = norms(both)
        assert not torch.equal(one, other)


def test_released_weights_have_no_memory_and_come_back_poisoned() -> None:
    both = Twins("streamed-host", prefetch_depth=0)
    with contextlib.closing(both.session):
        both.step(0)
        store = both.session._open()._executor.residency.store
        store.drop_all()
        for group in store.groups.values():
            for chunk in group.chunks:
                assert chunk.device.untyped_storage().nbytes() == 0
                EmulatedMover().grow(chunk.device)
                assert chunk.device.view(torch.float32).isnan().all()
                EmulatedMover().shrink(chunk.device, [])
        both.step(1)
        both.assert_same()
