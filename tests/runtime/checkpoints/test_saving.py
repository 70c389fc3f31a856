"""Saves beside training: the checkpoint of the step at which it began, to the bit, and losses that it does not touch."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.errors import BudgetError, CheckpointError, ConfigError
from lowtide.runtime.checkpoints import saving, snapshot
from lowtide.runtime.checkpoints.contents import session_contents
from lowtide.runtime.checkpoints.disk import Disk
from lowtide.runtime.checkpoints.format import CheckpointReader
from lowtide.runtime.updates.worker import HostWorker, Job
from tests.runtime.checkpoints.training_runs import RESIDENT, SPREAD, STREAMED_HOST, Run, Training, draw_from, training

Values = dict[tuple[str, str], Tensor]
PAGED: dict[str, Any] = {"weights": {"*": "streamed", "blocks.1": "resident"}, "update": "paged"}
STREAMED_DEVICE: dict[str, Any] = {"weights": "streamed", "update": "device"}
RESIDENT_HOST: dict[str, Any] = {"weights": "resident", "update": "host"}
HOST_RUN = Run(place=STREAMED_HOST)


class SlowDisk(Disk):
    """Writes at a rate, or when a test lets it."""

    def __init__(self, bytes_per_s: float | None = None, gate: threading.Event | None = None) -> None:
        self._bytes_per_s = bytes_per_s
        self._gate = gate
        self.num_bytes = 0

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        if self._gate is not None:
            assert self._gate.wait(timeout=20), "the test never lets the disk write"
        if self._bytes_per_s is not None:
            time.sleep(len(data) / self._bytes_per_s)
        self.num_bytes += len(data)
        return super().write(descriptor, data, offset)


def use_disk(patch: pytest.MonkeyPatch, disk: Disk) -> None:
    """The session's saver writes through this one."""
    made = saving.Saver.__init__

    def with_disk(saver: saving.Saver) -> None:
        made(saver, disk)

    patch.setattr(saving.Saver, "__init__", with_disk)


def contents_now(run: Training) -> Values:
    """Copies of all tensors of a checkpoint of this moment, made without any of what is tested."""
    plan_run = run.session._open()
    with plan_run.between_steps("the test"), plan_run.setup.on_host():
        contents = session_contents(plan_run, run.state)
        return {key: value.detach().cpu().clone() for part in contents.parts for key, value in part.tensors.items()}


def assert_is(folder: Path, expected: Values) -> None:
    """The checkpoint in the folder has these tensors, to the bit."""
    reader = CheckpointReader(folder)
    reader.verify()
    found = {(file, name) for file in reader.index.files for name in reader.names(file)}
    assert found == expected.keys()
    for (file, name), value in expected.items():
        saved = reader.read(file, name)
        assert saved.dtype == value.dtype
        as_bytes = [each.contiguous().reshape(-1).view(torch.uint8) for each in (saved, value)]
        assert torch.equal(*as_bytes), f"{name} of {file} is of another moment"


@contextmanager
def delays(seed: int) -> Iterator[None]:
    """Readers and the worker stop and start at random."""
    chance = random.Random(seed)
    read, submit = snapshot._Tensor.read, HostWorker.submit

    def pause() -> None:
        if chance.random() < 0.3:
            time.sleep(chance.random() * 0.01)

    def slow_read(tensor: Any, *arguments: Any) -> None:
        pause()
        read(tensor, *arguments)
        pause()

    def slow_submit(worker: HostWorker, work: Callable[[], None], **rest: Any) -> Job:
        def slow_work() -> None:
            pause()
            work()

        return submit(worker, slow_work, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot._Tensor, "read", slow_read)
        patch.setattr(HostWorker, "submit", slow_submit)
        yield


def random_run(chance: random.Random) -> Run:
    precision = chance.choice([None, None, "fp32", "bf16 exact", "bf16 stochastic", "fp16 exact"])
    places = [STREAMED_HOST, SPREAD, RESIDENT, STREAMED_DEVICE, RESIDENT_HOST] + [PAGED] * (precision is not None)
    place = chance.choice(places)
    return Run(
        precision=precision,
        moments="fp32" if precision is None else chance.choice(["fp32", "bf16", "8bit"]),
        optimizer=chance.choice(["adamw", "sgd", "amsgrad"]) if place is not PAGED else "adamw",
        place=place,
        schedule="deferred" if precision == "fp16 exact" else chance.choice(["deferred", "in_backward"]),
        chunk_bytes=chance.choice([None, 2048]),
        activations=chance.choice([None, None, "recompute"]),
    )


@pytest.mark.parametrize("seed", range(24))
def test_a_checkpoint_is_of_one_moment_while_training_goes_on(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    run = random_run(chance)
    num_before, num_after = chance.randint(0, 3), 4
    draw_from(seed)
    with training(run) as undisturbed:
        undisturbed.steps(num_before)
        expected = contents_now(undisturbed)
        losses = undisturbed.steps(num_after)
        values = undisturbed.values()
    draw_from(seed)
    allowance = chance.choice([snapshot.LEAST_BYTES, "16KiB", "auto", "64MiB"])
    with pytest.MonkeyPatch.context() as patch, delays(seed):
        use_disk(patch, SlowDisk(bytes_per_s=chance.choice([None, 1e6, 1e7])))
        with training(run) as saved:
            saved.steps(num_before)
            folder = saved.session.save(tmp_path, state=saved.state, allowance=allowance)
            assert saved.steps(num_after) == losses
            saved.session.wait_for_save()
            (row,) = saved.session.stats().saves
            after = saved.values()
    assert_is(folder, expected)
    assert after.keys() == values.keys()
    assert all(torch.equal(after[name], value) for name, value in values.items())
    assert row.error is None
    assert row.step == num_before
    assert row.num_bytes == sum(value.nbytes for value in expected.values())
    if isinstance(allowance, int):
        assert row.peak_staging_bytes <= allowance


def test_a_save_that_is_waited_for_equals_one_beside_training(tmp_path: Path) -> None:
    draw_from(1)
    with training(HOST_RUN) as run:
        run.steps(2)
        expected = contents_now(run)
        folder = run.session.save(tmp_path / "waited", state=run.state)
        assert_is(folder, expected)
        assert_is(run.session.save(tmp_path / "once more", state=run.state), expected)
        assert [row.error for row in run.session.stats().saves] == [None, None]


# -- what may change a part --------------------------------------------------------------------------------------------


def set_data(run: Training) -> None:
    for parameter in run.model.parameters():
        parameter.data = torch.full_like(parameter.data, 3.0)


def add_without_gradients(run: Training) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(1.0)


def write_through_data(run: Training) -> None:
    for parameter in run.model.parameters():
        parameter.data.copy_(torch.ones_like(parameter.data))


def write_through_numpy(run: Training) -> None:
    for parameter in run.model.parameters():
        parameter.detach().numpy()[:] = 7.0


def write_with_foreach(run: Training) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(run.model.parameters()), 0.5)


def initialise(run: Training) -> None:
    for parameter in run.model.parameters():
        torch.nn.init.constant_(parameter, 0.25)


def load_model(run: Training) -> None:
    run.model.load_state_dict({name: torch.zeros_like(value) for name, value in run.model.state_dict().items()})


def load_optimizer(run: Training) -> None:
    state = run.optimizer.state_dict()
    for entries in state["state"].values():
        for name, value in entries.items():
            if name.startswith("exp_avg"):
                value.zero_()
    run.optimizer.load_state_dict(state)


def write_state(run: Training) -> None:
    for entries in list(run.optimizer.state.values()):
        for value in entries.values():
            if isinstance(value, Tensor):
                value.fill_(2.0)


def write_buffers(run: Training) -> None:
    for buffer in run.model.buffers():
        buffer.fill_(5.0)


def add_group(run: Training) -> None:
    run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    run.step()


def change_settings(run: Training) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 2
    run.step()


def train(run: Training) -> None:
    run.steps(3)


def evaluate_and_write(run: Training) -> None:
    with torch.no_grad():
        run.model(torch.zeros(1, 3, dtype=torch.long))
    add_without_gradients(run)


def write_after_a_step(run: Training) -> None:
    run.step()
    add_without_gradients(run)
    run.step()


def move_memory(run: Training) -> None:
    # Every step: `defragment_every` below.
    run.steps(3)


CHANGES = [
    train,
    set_data,
    add_without_gradients,
    write_through_data,
    write_through_numpy,
    write_with_foreach,
    initialise,
    load_model,
    load_optimizer,
    write_state,
    write_buffers,
    add_group,
    change_settings,
    evaluate_and_write,
    write_after_a_step,
    move_memory,
]
RUNS = {
    "streamed-host": HOST_RUN,
    "streamed-device": Run(place=STREAMED_DEVICE),
    "spread": Run(place=SPREAD, schedule="in_backward"),
    "resident": Run(place=RESIDENT),
    "resident-host": Run(place=RESIDENT_HOST),
    "exact": Run(place=SPREAD, precision="bf16 exact"),
    "paged": Run(place=PAGED, precision="bf16 exact", moments="8bit"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", RUNS)
def test_whoever_changes_something_waits_until_it_was_read(
    name: str, change: Callable[[Training], None], tmp_path: Path
) -> None:
    run = RUNS[name]
    if change is write_state and run.precision is not None:
        pytest.skip("our own kernels show their state to nobody")
    if change is write_through_numpy and run.precision is not None:
        pytest.skip("NumPy has no bfloat16")
    if change is move_memory:
        run = replace(run, place={**run.place, "defragment_every": 1})
    draw_from(5)
    run = replace(run, has_scheduler=False)
    with pytest.MonkeyPatch.context() as patch, delays(3), training(run) as trained:
        # Long enough that everything would change before it is read.
        use_disk(patch, SlowDisk(bytes_per_s=1e6))
        trained.steps(2)
        expected = contents_now(trained)
        folder = trained.session.save(tmp_path, state=trained.state, allowance="8KiB")
        change(trained)
        trained.session.wait_for_save()
        assert_is(folder, expected)


@pytest.mark.parametrize("name", RUNS)
def test_what_somebody_holds_already_is_read_at_once(name: str, tmp_path: Path) -> None:
    run = RUNS[name]
    draw_from(5)
    with pytest.MonkeyPatch.context() as patch, delays(3), training(run) as trained:
        use_disk(patch, SlowDisk(bytes_per_s=1e6))
        trained.steps(2)
        held = [parameter.detach() for parameter in trained.model.parameters()]
        states = trained.optimizer.state.values() if run.precision is None else []
        moments = [value for entries in states for value in entries.values() if isinstance(value, Tensor)]
        views = [value.view(-1)[:1] for value in moments if value.dim()][::2]
        expected = contents_now(trained)
        folder = trained.session.save(tmp_path, state=trained.state, allowance="8KiB")
        for tensor in (*held, *moments, *views):
            tensor.fill_(9.0)
        trained.session.wait_for_save()
        assert_is(folder, expected)


def test_streamed_weights_and_state_are_not_copied_before_save_returns(tmp_path: Path) -> None:
    gate = threading.Event()
    draw_from(5)
    with pytest.MonkeyPatch.context() as patch, training(HOST_RUN) as trained:
        use_disk(patch, SlowDisk(gate=gate))
        trained.steps(2)
        contents = contents_now(trained)
        small = sum(value.nbytes for (file, _), value in contents.items() if file == "state")
        allowance = small + 16 * 1024
        assert allowance < 0.5 * sum(value.nbytes for value in contents.values())
        # Nothing is written: if any more had to be read first, this would not return.
        trained.session.save(tmp_path, state=trained.state, allowance=allowance)
        gate.set()
        trained.session.wait_for_save()


@pytest.mark.parametrize("run", [HOST_RUN, Run(place=STREAMED_HOST, schedule="in_backward", precision="bf16 exact")])
def test_with_room_for_all_of_it_training_never_waits_for_the_disk(run: Run, tmp_path: Path) -> None:
    gate = threading.Event()
    draw_from(5)
    with pytest.MonkeyPatch.context() as patch, training(run) as trained:
        use_disk(patch, SlowDisk(gate=gate))
        trained.steps(2)
        expected = contents_now(trained)
        folder = trained.session.save(tmp_path, state=trained.state, allowance="64MiB")
        trained.steps(3)
        trained.session.settle()
        gate.set()
        trained.session.wait_for_save()
        assert_is(folder, expected)
        (row,) = trained.session.stats().saves
        assert row.peak_staging_bytes <= 1.1 * row.num_bytes + 4096


def test_a_change_of_plan_waits_until_it_is_written(tmp_path: Path) -> None:
    import lowtide

    draw_from(5)
    with pytest.MonkeyPatch.context() as patch, training(HOST_RUN) as trained:
        use_disk(patch, SlowDisk(bytes_per_s=1e6))
        trained.steps(2)
        expected = contents_now(trained)
        folder = trained.session.save(tmp_path, state=trained.state, allowance="8KiB")
        other = lowtide.make_plan(trained.session._open().setup.layout, **RESIDENT)
        trained.session._switch(other)
        assert folder.exists()
        trained.steps(2)
        assert_is(folder, expected)
        assert len(trained.session.stats().saves) == 1


@pytest.mark.parametrize("schedule", ["deferred", "in_backward"])
def test_a_table_on_the_host_is_read_before_it_is_updated(schedule: str, tmp_path: Path) -> None:
    import lowtide

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer, lowtide.Session]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Embedding(200, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        plan = lowtide.make_plan(model, weights={"*": "streamed", "0": "host"}, update="host", schedule=schedule)
        return model, optimizer, lowtide.manage(model, optimizer, plan, device="cpu")

    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
        losses = []
        for seed in range(count):
            ids = torch.randint(200, (8,), generator=torch.Generator().manual_seed(seed))
            loss = model(ids).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer, session = made()
    with session:
        losses = steps(model, optimizer, 2)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        losses += steps(model, optimizer, 3)
    with pytest.MonkeyPatch.context() as patch, delays(1):
        use_disk(patch, SlowDisk(bytes_per_s=1e6))
        model, optimizer, session = made()
        with session:
            found = steps(model, optimizer, 2)
            folder = session.save(tmp_path, allowance="8KiB")
            found += steps(model, optimizer, 3)
    assert found == losses
    reader = CheckpointReader(folder)
    assert all(torch.equal(reader.read("model", name), value) for name, value in expected.items())


def test_a_warm_up_may_end_meanwhile(tmp_path: Path) -> None:
    import lowtide
    from tests.runtime.checkpoints.training_runs import make_net, make_optimizer

    draw_from(5)
    model = make_net()
    optimizer = make_optimizer("adamw", model)

    def step() -> None:
        model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.MonkeyPatch.context() as patch:
        use_disk(patch, SlowDisk(bytes_per_s=1e6))
        with lowtide.manage(model, optimizer, lowtide.WarmUp(device_memory="128KiB"), device="cpu") as session:
            step()
            assert session.is_warming_up
            with session._open().between_steps("the test"), session._open().setup.on_host():
                contents = session_contents(session._open())
                expected = {
                    key: value.detach().clone() for part in contents.parts for key, value in part.tensors.items()
                }
                del contents
            folder = session.save(tmp_path, allowance="8KiB")
            step()
            assert not session.is_warming_up
            step()
    assert_is(folder, expected)


def test_close_waits_until_it_is_written(tmp_path: Path) -> None:
    draw_from(5)
    with pytest.MonkeyPatch.context() as patch:
        use_disk(patch, SlowDisk(bytes_per_s=1e6))
        with training(HOST_RUN) as trained:
            trained.steps(2)
            expected = contents_now(trained)
            folder = trained.session.save(tmp_path, state=trained.state, allowance="8KiB")
            trained.step()
    assert_is(folder, expected)


def test_loading_into_the_session_finds_the_save_under_way(tmp_path: Path) -> None:
    draw_from(5)
    with pytest.MonkeyPatch.context() as patch, training(HOST_RUN) as trained:
        use_disk(patch, SlowDisk(bytes_per_s=1e6))
        trained.steps(2)
        expected = contents_now(trained)
        trained.session.save(tmp_path, state=trained.state, allowance="8KiB")
        trained.steps(2)
        assert trained.load(tmp_path).step == 2
        found = contents_now(trained)
        assert all(torch.equal(found[key], value) for key, value in expected.items() if key[0] != "state")


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_the_host_budget_holds_and_is_given_back(tmp_path: Path) -> None:
    with training(HOST_RUN) as trained:
        trained.steps(1)
        host = trained.session._open().host_tiers.host
        before = host.used_bytes
        gate = threading.Event()
        with pytest.MonkeyPatch.context() as patch:
            use_disk(patch, SlowDisk(gate=gate))
            trained.session.save(tmp_path, allowance="16KiB")
            assert host.by_owner()[snapshot.OWNER] == 16 * 1024
            gate.set()
            trained.session.wait_for_save()
        assert host.used_bytes == before
        host.budget_bytes = before + 8 * 1024
        with pytest.raises(BudgetError, match=r"'staging of a checkpoint' needs 16\.0 KiB of the host tier"):
            trained.session.save(tmp_path, allowance="16KiB")
        assert host.used_bytes == before
        # Where the session may choose, it takes a quarter of what is there.
        trained.session.save(tmp_path, allowance="auto")
        trained.session.wait_for_save()
        assert trained.session.stats().saves[-1].peak_staging_bytes <= 4096
        host.budget_bytes = 1 << 40


def test_an_allowance_that_is_none_is_refused(tmp_path: Path) -> None:
    with training(HOST_RUN) as trained:
        with pytest.raises(ConfigError, match=r"allowance is '1KiB'; give at least 4\.0 KiB"):
            trained.session.save(tmp_path, allowance="1KiB")
        with pytest.raises(ConfigError, match="size"):
            trained.session.save(tmp_path, allowance="much")
        assert not list(tmp_path.glob("*step*"))


def test_a_second_save_waits_for_the_first_and_says_so(tmp_path: Path) -> None:
    draw_from(5)
    gate = threading.Event()
    with pytest.MonkeyPatch.context() as patch, training(HOST_RUN) as trained:
        use_disk(patch, SlowDisk(gate=gate))
        trained.step()
        first = contents_now(trained)
        one = trained.session.save(tmp_path, state=trained.state, allowance="64MiB")
        trained.step()
        second = contents_now(trained)
        threading.Timer(0.5, gate.set).start()
        other = trained.session.save(tmp_path, state=trained.state, allowance="64MiB")
        trained.session.wait_for_save()
        rows = trained.session.stats().saves
    assert_is(one, first)
    assert_is(other, second)
    assert [row.step for row in rows] == [1, 2]
    assert rows[0].stalled_s > 0.4


def test_the_statistics_say_what_it_took(tmp_path: Path) -> None:
    from lowtide.runtime.statistics.session_stats import SessionStats

    with training(HOST_RUN) as trained:
        trained.step()
        trained.session.save(tmp_path, allowance="64MiB")
        trained.session.wait_for_save()
        stats = trained.session.stats()
    assert "checkpoint of step 1: " in str(stats)
    assert SessionStats.from_dict(stats.to_dict()) == stats


def test_without_a_save_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with training(HOST_RUN) as trained:
        trained.step()
        trained.session.save(tmp_path)
        for name in ("wait_for", "reads_of", "has_unread", "wait_for_all"):
            monkeypatch.setattr(snapshot.Snapshot, name, lambda *_: pytest.fail("nothing is under way"))
        trained.steps(2)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


class FailingDisk(Disk):
    """Fails at one operation, which waits until a test lets it."""

    def __init__(self, operation: str, at: int, error: BaseException) -> None:
        self._operation, self._at, self._error, self._count = operation, at, error, 0
        self.gate = threading.Event()

    def _tick(self, operation: str) -> None:
        if operation == self._operation:
            assert self.gate.wait(timeout=20), "the test never lets the disk fail"
            self._count += 1
            if self._count == self._at:
                raise self._error

    def create(self, path: Path, num_bytes: int) -> int:
        self._tick("create")
        return super().create(path, num_bytes)

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        self._tick("write")
        return super().write(descriptor, data, offset)

    def sync(self, descriptor: int) -> None:
        self._tick("sync")
        super().sync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        self._tick("rename")
        super().rename(old, new)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("broken"), MemoryError()])
@pytest.mark.parametrize(("operation", "at"), [("create", 1), ("write", 1), ("write", 5), ("sync", 1), ("rename", 1)])
def test_an_error_reaches_the_next_call_and_training_goes_on(
    operation: str, at: int, error: Exception, tmp_path: Path
) -> None:
    draw_from(5)
    with training(HOST_RUN) as undisturbed:
        losses = undisturbed.steps(6)
    draw_from(5)
    with training(HOST_RUN) as trained:
        found = trained.steps(2)
        former = trained.session.save(tmp_path, state=trained.state)
        expected = contents_now(trained)
        saver = trained.session._management._saver
        assert saver is not None
        run = saver._run
        assert run is not None
        disk = FailingDisk(operation, at, error)
        saver._disk = run._disk = disk
        found += trained.steps(2)
        trained.session.save(tmp_path, state=trained.state, allowance="64MiB")
        found += trained.steps(2)
        disk.gate.set()
        with pytest.raises(CheckpointError, match=r"step|partial"):
            trained.session.wait_for_save()
        trained.session.wait_for_save()  # told once
        assert found == losses
        assert_is(former, expected)
        (_, row) = trained.session.stats().saves
        assert row.error is not None
        assert trained.session._open().host_tiers.host.by_owner().get(snapshot.OWNER) is None
        assert [path.name for path in tmp_path.iterdir() if "step" in path.name] == [former.name]
        # The next one is written.
        saver._disk = run._disk = Disk()
        last = contents_now(trained)
        assert_is(trained.session.save(tmp_path, state=trained.state), last)


def test_an_error_while_save_still_reads_is_its_own(tmp_path: Path) -> None:
    disk = FailingDisk("write", 1, OSError(28, "No space left on device"))
    disk.gate.set()
    with pytest.MonkeyPatch.context() as patch, training(HOST_RUN) as trained:
        use_disk(patch, disk)
        trained.step()
        with pytest.raises(CheckpointError, match="No space left"):
            trained.session.save(tmp_path, state=trained.state, allowance=snapshot.LEAST_BYTES)
        trained.step()
        trained.session.wait_for_save()


@pytest.mark.parametrize("told_by", ["save", "close", "with"])
def test_a_failed_save_is_told_by_whatever_comes_next(told_by: str, tmp_path: Path) -> None:
    trained = Training(HOST_RUN)
    with pytest.MonkeyPatch.context() as patch:
        disk = FailingDisk("write", 4, OSError(28, "No space left on device"))
        use_disk(patch, disk)
        trained.step()
        trained.session.save(tmp_path, allowance="64MiB")
        trained.step()
        disk.gate.set()
        if told_by == "save":
            with pytest.raises(CheckpointError, match="No space left"):
                trained.session.save(tmp_path)
            trained.session.close()
        elif told_by == "close":
            with pytest.raises(CheckpointError, match="No space left"):
                trained.session.close()
        else:
            with pytest.raises(ZeroDivisionError) as raised, trained.session:
                _ = 1 / 0
            assert "A checkpoint was not written" in raised.value.__notes__[0]
    assert not trained.session.is_open
    assert not [path for path in tmp_path.iterdir() if "step" in path.name]


# -- on CUDA -----------------------------------------------------------------------------------------------------------

ON_CUDA = [
    Run(place=place, precision=precision, moments=moments, schedule=schedule, device="cuda")
    for place in (STREAMED_HOST, SPREAD, RESIDENT, STREAMED_DEVICE, RESIDENT_HOST, PAGED)
    for precision, moments in ((None, "fp32"), ("bf16 exact", "fp32"), ("bf16 stochastic", "8bit"))
    for schedule in ("deferred", "in_backward")
    if precision is not None or place is not PAGED
]


@pytest.mark.gpu
@pytest.mark.parametrize("run", ON_CUDA, ids=str)
@pytest.mark.parametrize("allowance", ["8KiB", "64MiB"])
def test_a_checkpoint_is_of_one_moment_on_cuda(run: Run, allowance: str, tmp_path: Path) -> None:
    draw_from(5)
    with pytest.MonkeyPatch.context() as patch, delays(3), training(run) as trained:
        use_disk(patch, SlowDisk(bytes_per_s=1e6))
        trained.steps(2)
        expected = contents_now(trained)
        folder = trained.session.save(tmp_path, state=trained.state, allowance=allowance)
        trained.steps(3)
        add_without_gradients(trained)
        trained.session.wait_for_save()
        (row,) = trained.session.stats().saves
        tiers = trained.session._open().host_tiers
        assert snapshot.OWNER not in tiers.host.by_owner() | tiers.pinned.by_owner()
    assert_is(folder, expected)
    assert row.error is None


@pytest.mark.gpu
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_a_tensor_on_cuda_is_read_after_what_was_told_before(is_contiguous: bool) -> None:
    device = torch.device("cuda")
    large = torch.zeros(4096, 4096, device=device)
    tensor = large if is_contiguous else large.t()
    for _ in range(50):
        large @ large  # what is told before takes a while
    large.copy_(torch.arange(4096.0, device=device).repeat(4096, 1))
    made = snapshot.Source(file="model", name="0", tensor=tensor, parameter=tensor, is_announced=True)
    taken = snapshot.Snapshot([made], allowance_bytes=1 << 28)
    found: dict[int, Tensor] = {}

    class Writer:
        def write(self, file: str, name: str, value: Tensor, *, start: int) -> None:
            found[start] = value.clone()

    threads = [threading.Thread(target=taken.read), threading.Thread(target=taken.write, args=[Writer()])]
    for thread in threads:
        thread.start()
    taken.wait_for([tensor])
    large.fill_(-1.0)
    for thread in threads:
        thread.join()
    assert taken.error is None
    whole = torch.cat([found[start] for start in sorted(found)]).view(4096, 4096)
    expected = torch.arange(4096.0).repeat(4096, 1)
    assert torch.equal(whole, expected if is_contiguous else expected.t())
