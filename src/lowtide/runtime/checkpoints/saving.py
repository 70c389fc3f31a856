"""Saver: writes checkpoints of a session while training goes on, one after the other; see `snapshot` for how both fit together.

Note [Who announces what]
Updates announce what they change, on the host, on the device and paged. Streamed weights are pending (`parameters.pending`)
until they were read, so that whoever looks at one waits first. State of our own kernels is shown to nobody, and torch's own
only by `optimizer.state`, which waits as well. Everything else may change without a word, and is read before `save` returns:
resident weights, which models use as they are; buffers; parameters and state that the session does not manage; and what
somebody holds a tensor over already.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lowtide import compat
from lowtide.errors import CheckpointError, ConfigError
from lowtide.memory.tier import HostMemory, Tier
from lowtide.optim.state import ParameterState
from lowtide.runtime.checkpoints.contents import MODEL, OPTIMIZER, Contents, Part, kept_tensors
from lowtide.runtime.checkpoints.disk import Disk
from lowtide.runtime.checkpoints.folder import Retention, RunFolder, checkpoint_name
from lowtide.runtime.checkpoints.format import CheckpointWriter
from lowtide.runtime.checkpoints.layout import shards_of
from lowtide.runtime.checkpoints.lock import in_forked_children
from lowtide.runtime.checkpoints.snapshot import LEAST_BYTES, OWNER, Snapshot, Source, num_threads
from lowtide.runtime.parameters.pending import Changes
from lowtide.runtime.parameters.pieces import Values
from lowtide.runtime.plan_run import PlanRun
from lowtide.runtime.statistics.session_stats import SaveRow
from lowtide.units import MiB, format_bytes, parse_bytes

LOGGER = logging.getLogger("lowtide")
AUTO = "auto"
_WAITING_BYTES = 256 * MiB
"""The most that a save takes which is waited for: enough that reading and writing overlap."""
_AUTO_SHARE = 4
"""Of what the host has free, one part in so many is taken where the allowance is left to the session."""


def sources_of(contents: Contents, changes: Mapping[int, Changes]) -> list[Source]:
    """The tensors of a checkpoint, in the order in which updates will change them."""
    last = 1 + max((known.place for known in changes.values()), default=0)

    def place(part: Part) -> int:
        known = None if part.parameter is None else changes.get(id(part.parameter))
        return last if known is None else known.place

    offsets = {
        (file, name): known.offset
        for file, specs in contents.specs().items()
        for shard in shards_of(file, specs)
        for name, known in shard.places.items()
    }
    return [source for part in sorted(contents.parts, key=place) for source in _sources(part, changes, offsets)]


def _sources(part: Part, changes: Mapping[int, Changes], offsets: Mapping[tuple[str, str], int]) -> Iterator[Source]:
    known = None if part.parameter is None else changes.get(id(part.parameter))
    for file, name in part.tensors:
        is_announced = False
        if known is not None and part.tensors[file, name] is known.home:
            is_announced = known.announces_weight
        elif known is not None and known.announces_state:
            is_announced = known.hides_state or not _is_held(part.tensors, (file, name))
        yield Source(
            file=file,
            name=name,
            tensor=part.tensors[file, name],
            parameter=part.parameter,
            is_announced=is_announced,
            offset=offsets[file, name],
        )


def _num_references(named: Mapping[tuple[str, str], torch.Tensor], key: tuple[str, str]) -> int:
    return sys.getrefcount(named[key])


def _is_held(named: Mapping[tuple[str, str], torch.Tensor], key: tuple[str, str]) -> bool:
    """Whether somebody has a tensor of `optimizer.state` beside the optimizer, or a view of it, and may write to it unseen."""
    entries = {"probe": torch.empty(0, device="meta")}
    usual = {key: entries["probe"]}
    with compat.without_torch_function():
        is_seen = compat.num_storage_owners(named[key]) > 1
    return is_seen or _num_references(named, key) > _num_references(usual, key)


def staging_bytes(allowance: str | int | None, needed_bytes: int, host: Tier) -> int:
    """How many bytes of the host a save may take.

    Args:
        allowance: As the user gave it; None where the save is waited for.
        needed_bytes: With so many, nothing ever waits for the disk.
        host: Its budget.

    Raises:
        ConfigError: The allowance is no size, or too small for anything.
    """
    if allowance is None or allowance == AUTO:
        free = min(host.free_bytes, HostMemory().available_bytes()) // _AUTO_SHARE
        most = free if allowance == AUTO else min(free, _WAITING_BYTES)
        return max(LEAST_BYTES, min(most, needed_bytes))
    given = parse_bytes(allowance)
    if given < LEAST_BYTES:
        raise ConfigError(
            f"allowance is {allowance!r}; give at least {format_bytes(LEAST_BYTES)}, through which tensors go in pieces, or "
            f"{AUTO!r}",
            key="allowance",
        )
    return max(LEAST_BYTES, min(given, needed_bytes))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Order:
    """What a save is to write, and where."""

    run: RunFolder
    partial: Path
    step: int
    contents: Contents
    disk: Disk | None

    def write(self, writer: CheckpointWriter) -> None:
        """All that is not tensors; then the checkpoint is whole."""
        for name, text in self.contents.files.items():
            writer.add_file(name, text)
        writer.finish(step=self.step, state=self.contents.state)


class _Save:
    """One save under way: the thread that leads it, and the readers and writers that it starts."""

    def __init__(self, order: _Order, snapshot: Snapshot, give_back: Callable[[], None]) -> None:
        self.order = order
        self.snapshot = snapshot
        self._give_back = give_back
        self._threads: list[threading.Thread] = []
        self._lead = threading.Thread(target=self._run_to_the_end, name="lowtide checkpoint", daemon=True)
        self._over = threading.Event()
        self.began_s = time.perf_counter()
        self.seconds = 0.0
        self.held_up_s = 0.0
        """How long the loop was held up beside what the snapshot counts."""
        self.is_published = False

    def start(self) -> None:
        """Begin. The caller has told the session."""
        self._lead.start()

    @property
    def is_over(self) -> bool:
        """Whether all threads have ended and everything was given back."""
        return self._over.is_set() or (self._lead.ident is not None and not self._lead.is_alive())

    def wait(self) -> None:
        """Wait until it is over, well or not."""
        with compat.waiting():
            while not self.is_over:
                self._over.wait(timeout=1.0)

    def cancel(self, error: BaseException) -> None:
        """Nobody wants it any more; its threads end soon, and what was written is taken away."""
        self.snapshot.fail(error)
        if self._lead.ident is None:
            self._end()

    def row(self) -> SaveRow:
        """What it took; for one that is over."""
        error = self.snapshot.error
        return SaveRow(
            step=self.order.step,
            num_bytes=self.snapshot.num_bytes,
            seconds=self.seconds,
            stalled_s=self.held_up_s + self.snapshot.stalled_s,
            peak_staging_bytes=self.snapshot.peak_bytes,
            error=None if self.is_published or error is None else f"{type(error).__name__}: {error}",
        )

    def failure(self) -> CheckpointError | None:
        """What went wrong, for the caller."""
        error = self.snapshot.error
        if self.is_published or error is None:
            return None
        if isinstance(error, CheckpointError):
            return error
        failed = CheckpointError(
            f"the save of step {self.order.step} in {self.order.run.path} failed: {type(error).__name__}: {error}. Training "
            "and the checkpoints from before are as they were; save again"
        )
        failed.__cause__ = error
        return failed

    # -- in its thread ---------------------------------------------------------------------------------------------------

    def _run_to_the_end(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.snapshot.fail(error)
        finally:
            self._end()

    def _run(self) -> None:
        order, snapshot = self.order, self.snapshot
        num_readers, num_writers = num_threads()
        for _ in range(num_readers):
            self._start(snapshot.read)
        with CheckpointWriter(order.partial, order.contents.specs(), disk=order.disk) as writer:
            for _ in range(num_writers - 1):
                self._start(partial(snapshot.write, writer))
            try:
                snapshot.write(writer)
            finally:
                self._join()
            if snapshot.error is None:
                order.write(writer)
        if snapshot.error is None:
            order.run.publish(order.partial, order.step)
            self.is_published = True

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="lowtide checkpoint", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _join(self) -> None:
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _end(self) -> None:
        try:
            self._join()
            if not self.is_published:
                # What cannot be taken away now is so when the next save begins.
                with contextlib.suppress(Exception):
                    self.order.run.abandon(self.order.partial)
                if self.snapshot.error is not None:
                    LOGGER.warning("the save of step %d failed: %s", self.order.step, self.snapshot.error)
        finally:
            self.snapshot.release()
            self._give_back()
            self.seconds = time.perf_counter() - self.began_s
            self._over.set()


class Saver:
    """The saves of one session. It keeps the lock of the folder that it saves into, until `close` or the next folder.

    Args:
        disk: The operations on files; tests put their own here.
    """

    def __init__(self, disk: Disk | None = None) -> None:
        self._disk = disk
        self._run: RunFolder | None = None
        self._retention: Retention | None = None
        self._under_way: _Save | None = None
        self._failed: CheckpointError | None = None
        self._rows: list[SaveRow] = []
        _OPEN.add(self)

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        self._note()
        return self._under_way is not None

    @property
    def rows(self) -> tuple[SaveRow, ...]:
        """The saves that are over."""
        self._note()
        return tuple(self._rows)

    def save(
        self,
        plan_run: PlanRun,
        folder: Path,
        contents: Contents,
        *,
        step: int,
        retention: Retention,
        allowance: str | int | None,
    ) -> Path:
        """Begin a checkpoint; without an allowance it is whole when this returns. One that is under way is waited for first.

        Raises:
            CheckpointError: It could not be written, or the one before could not: then this one was not begun. The checkpoints
                from before are as they were.
        """
        self.wait()
        entered_s = time.perf_counter()
        run = self._opened(folder, retention)
        order = _Order(run=run, partial=run.begin(step), step=step, contents=contents, disk=self._disk)
        try:
            save = self._made(plan_run, order, allowance)
        except BaseException:
            run.abandon(order.partial)
            raise
        self._under_way = save
        try:
            plan_run.begin_save(save.snapshot)
            save.start()
            before_s = time.perf_counter() - entered_s
            save.snapshot.wait_for_unannounced()
            save.held_up_s += before_s
        except BaseException as error:
            save.cancel(error)
            raise
        if allowance is None or save.snapshot.error is not None:
            self.wait()
        return run.path / checkpoint_name(step)

    def save_spread(
        self,
        folder: Path,
        contents: Contents,
        values: Iterable[tuple[str, Values]],
        *,
        step: int,
        retention: Retention,
    ) -> Path:
        """Write a checkpoint of weights that are spread over ranks. It is whole when this returns.

        Args:
            folder: Of the run.
            contents: What spread values look like is on meta there.
            values: These values with the names of their parameters; all of them are taken in any case, because the other ranks
                send them.
            step: The number of the checkpoint.
            retention: Which checkpoints stay.

        Raises:
            CheckpointError: It could not be written, or the one before could not. The checkpoints from before are as they were.
        """
        coming = iter(values)
        try:
            self.wait()
            began_s = time.perf_counter()
            run = self._opened(folder, retention)
            order = _Order(run=run, partial=run.begin(step), step=step, contents=contents, disk=self._disk)
            try:
                with CheckpointWriter(order.partial, contents.specs(), disk=self._disk) as writer:
                    for part in contents.parts:
                        for (file, name), tensor in part.tensors.items():
                            if not tensor.is_meta:
                                writer.write(file, name, tensor.detach().to("cpu"))
                    for name, value in coming:
                        _write_values(writer, name, value)
                    order.write(writer)
                run.publish(order.partial, step)
            except BaseException:
                run.abandon(order.partial)
                raise
        finally:
            for _ in coming:
                pass
        seconds = time.perf_counter() - began_s
        num_bytes = sum(spec.nbytes for specs in contents.specs().values() for spec in specs.values())
        self._rows.append(
            SaveRow(
                step=step,
                num_bytes=num_bytes,
                seconds=seconds,
                stalled_s=seconds,
                peak_staging_bytes=0,
                error=None,
            )
        )
        return run.path / checkpoint_name(step)

    def wait(self) -> None:
        """Wait until the save under way is over.

        Raises:
            CheckpointError: It failed, or one before it did, and nobody was told.
        """
        self.finish()
        if self._failed is not None:
            failed, self._failed = self._failed, None
            try:
                raise failed
            finally:
                del failed  # the traceback holds this frame

    def finish(self) -> None:
        """Wait until the save under way is over; how it went is told by the next `wait` or `close`."""
        save = self._under_way
        if save is not None:
            entered_s = time.perf_counter()
            try:
                save.wait()
                save.held_up_s += time.perf_counter() - entered_s
            except BaseException as error:
                # Who does not wait for it does not want it: the process may end now.
                save.cancel(error)
                raise
        self._note()

    def close(self, raised: BaseException | None = None) -> None:
        """Let others save into the folder.

        Args:
            raised: The exception that ends the session, if one does: it gets a note instead of another exception.

        Raises:
            CheckpointError: The last save failed, and nobody was told.
        """
        try:
            self.wait()
        except CheckpointError as error:
            if raised is None:
                raise
            raised.add_note(f"A checkpoint was not written: {error}")
        finally:
            if self._run is not None:
                self._run.close()
                self._run = None

    def leave_to_parent(self) -> None:
        """This is a forked child, which has none of the threads."""
        self._under_way = None

    def _made(self, plan_run: PlanRun, order: _Order, allowance: str | int | None) -> _Save:
        tiers = plan_run.host_tiers
        sources = sources_of(order.contents, plan_run.changes())
        needed_bytes = sum(source.room_bytes(source.tensor.nbytes) for source in sources)
        allowance_bytes = staging_bytes(allowance, needed_bytes, tiers.host)
        tiers.host.charge(allowance_bytes, OWNER)

        def give_back() -> None:
            for tier in (tiers.host, tiers.pinned):
                tier.clear([OWNER])

        try:
            snapshot = Snapshot(
                sources,
                allowance_bytes=allowance_bytes,
                on_read=plan_run.end_save,
                pinned=(tiers.host, tiers.pinned),
            )
        except BaseException:
            give_back()
            raise
        return _Save(order, snapshot, give_back)

    def _note(self) -> None:
        save = self._under_way
        if save is not None and save.is_over:
            self._rows.append(save.row())
            self._failed = self._failed or save.failure()
            self._under_way = None

    def _opened(self, folder: Path, retention: Retention) -> RunFolder:
        if self._run is None or self._run.path != folder or self._retention != retention:
            if self._run is not None:
                self._run.close()
            self._run, self._retention = RunFolder(folder, retention=retention, disk=self._disk), retention
        return self._run


def _write_values(writer: CheckpointWriter, name: str, values: Values) -> None:
    if values.weight is not None and values.weight.dim():
        writer.write(MODEL, name, values.weight.contiguous())
    if values.state is not None:
        entries = kept_tensors(values.state) if isinstance(values.state, ParameterState) else values.state
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and value.dim():  # one number is among the contents
                writer.write(OPTIMIZER, f"{name}.{key}", value.contiguous())


_OPEN: weakref.WeakSet[Saver] = weakref.WeakSet()
in_forked_children(_OPEN, Saver.leave_to_parent)


@atexit.register
def _finish_all() -> None:
    """A process that ends without closing its sessions finishes their saves."""
    for saver in list(_OPEN):
        saver.finish()
