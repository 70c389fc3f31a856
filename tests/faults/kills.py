"""Kills a run again and again, resumes it each time, and compares what it does with an undisturbed run.

A kill comes at a time drawn from the seed, or at one operation of a save. After each, what stands on the disk is looked at
before anybody else does: whatever was reported as saved is there and whole, the lock is free, and at most one unfinished
folder was left. At the end the run is what the undisturbed one is, to the bit.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lowtide.runtime.checkpoints.folder import RunFolder
from tests.faults import small_runs, train_runs
from tests.faults.forks import IN_A_SAVE, ForkServer, Life
from tests.faults.phases import KillAt, leftovers
from tests.faults.small_runs import Journal, SmallRun, journal_of
from tests.faults.train_runs import PUBLISHING, TrainRun

PER_SAVE = {"beginning": 6, "copying": 80, "writing": 80, "syncing": 6, "finishing": 1, "renaming": 1, "retaining": 6}
"""About how many operations of each phase a save has: the kills are spread over so many of the first saves of a life."""
KEPT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """When a process is killed: at an operation, so many seconds after its start, or not at all."""

    at: KillAt | None = None
    delay_s: float | None = None


@dataclass(slots=True, kw_only=True)
class Tally:
    """What became of the runs of one kind."""

    name: str
    runs: int = 0
    kills: int = 0
    at_random: Counter[str] = field(default_factory=Counter)
    """Kills at a random time, by what the process was doing."""
    at_operations: Counter[str] = field(default_factory=Counter)
    """Kills at a drawn operation, by its phase."""
    resumed: int = 0
    """Starts that ended with a checkpoint on the disk, from which the next one went on."""
    losses: int = 0
    """Compared, those of repeated steps included."""
    repeated: int = 0
    """Steps that were taken again after a kill."""
    reported: int = 0
    """Checkpoints that were reported as saved; all of them were found after the next kill, or a later one in their place."""

    @property
    def in_a_save(self) -> int:
        """Kills inside of a save."""
        return sum(
            count for by in (self.at_random, self.at_operations) for phase, count in by.items() if phase in IN_A_SAVE
        )


class Kind:
    """Runs of one kind, each beside the undisturbed one.

    Args:
        server: Has the children.
        run: What is trained.
        root: Gets a folder for each run.
    """

    def __init__(self, server: ForkServer, run: SmallRun | TrainRun, root: Path) -> None:
        self._server = server
        self._root = root / run.name.replace(" ", "-")
        self._root.mkdir()
        self.run: Any = replace(run, text=str(self._root)) if isinstance(run, TrainRun) else run
        self.tally = Tally(name=run.name)
        whole = self.live(self._root / "undisturbed")
        assert (whole.killed, whole.code, whole.is_hung) == (False, 0, False), whole.error
        self._seconds = whole.seconds
        self.expected = self.told(self._root / "undisturbed")
        assert len(self.expected.losses) == self.run.steps

    def killed_runs(self, seed: int, num_kills: int) -> Iterator[Life]:
        """The lives of one run after another, each but the last of a run killed; after so many kills the run comes to its end."""
        draws = random.Random(seed)
        while self.tally.kills < num_kills:
            folder = self._root / str(self.tally.runs)
            while True:
                kill = self._drawn(draws) if self.tally.kills < num_kills else Kill()
                life = self.live(folder, kill)
                with noted(f"{self.run.name}, run {self.tally.runs} of seed {seed}, {kill}: {life}\n{life.error}"):
                    assert not life.is_hung
                    assert life.killed or life.code == 0
                    self.look_at(folder)
                if life.killed:
                    self.tally.kills += 1
                    if kill.at is None:
                        self.tally.at_random[life.phase] += 1
                    else:
                        self.tally.at_operations[kill.at.phase] += 1
                yield life
                if not life.killed:
                    break
            with noted(f"{self.run.name}, the end of run {self.tally.runs} of seed {seed}"):
                self.look_at_the_end(folder)
            shutil.rmtree(folder)
            journal_of(folder).unlink(missing_ok=True)
            self.tally.runs += 1

    def _drawn(self, draws: random.Random) -> Kill:
        if draws.random() < 0.4:
            return Kill(delay_s=draws.uniform(0.0, 0.7 * self._seconds))
        phase = draws.choice([*PER_SAVE, *([PUBLISHING] if isinstance(self.run, TrainRun) else [])])
        number = draws.randrange(8 if phase == PUBLISHING else 3 * PER_SAVE[phase])
        return Kill(at=KillAt(phase=phase, number=number, where=draws.choice(["before", "within", "after"])))

    def live(self, folder: Path, kill: Kill | None = None, fault: str | None = None, **changes: Any) -> Life:
        """One life of a run, from its newest checkpoint on.

        Args:
            folder: Of the run.
            kill: What ends it.
            fault: A function of `faults`, by its name.
            changes: Of the run.
        """
        what = "train" if isinstance(self.run, TrainRun) else "session"
        job: dict[str, Any] = {"folder": str(folder), what: asdict(replace(self.run, **changes))}
        job["fault"] = None if fault is None else f"tests.faults.faults:{fault}"
        at = None if kill is None else kill.at
        signals = [] if kill is None or kill.delay_s is None else [(kill.delay_s, signal.SIGKILL)]
        return self._server.run(job | {"kill": None if at is None else asdict(at)}, signals=signals)

    # -- what stands on the disk -----------------------------------------------------------------------------------------

    def _checkpoints(self, folder: Path) -> Path:
        return folder / "checkpoints" if isinstance(self.run, TrainRun) else folder

    def told(self, folder: Path) -> Told:
        """What a run has written down."""
        return told_by_rows(folder) if isinstance(self.run, TrainRun) else told_by_journal(folder)

    def look_at(self, folder: Path) -> None:
        """Whether all is there that a run was told is saved, and nothing is there that should not be."""
        checkpoints = self._checkpoints(folder)
        told = self.told(folder)
        for step, loss in told.losses:
            assert loss == self.expected.by_step[step], f"the loss of step {step} is {loss}"
        self.tally.losses += len(told.losses)
        assert_lock_is_free(checkpoints)
        assert_lock_is_free(folder)
        newest = newest_step(checkpoints)
        assert newest >= told.saved, f"step {told.saved} was reported as saved, and the newest is {newest}"
        assert told.is_joined(newest), f"the rows end before step {newest}, which is saved"
        assert len(leftovers(checkpoints)) <= 1, leftovers(checkpoints)
        num_there = len(RunFolder(checkpoints).checkpoints())
        assert num_there <= KEPT + 1, f"{num_there} checkpoints are there"
        self.tally.resumed += newest > 0
        self.tally.repeated += max(0, told.reached - newest)
        self.tally.reported += told.saved > 0

    def look_at_the_end(self, folder: Path) -> None:
        """Whether the run is what the undisturbed one is."""
        told = self.told(folder)
        assert told.by_step == self.expected.by_step
        assert told.end == self.expected.end, (
            "the weights, or the optimizer's state, are not those of the undisturbed run"
        )
        # Who holds the lock takes away what is left of the last kill, where the last start had nothing to save.
        with RunFolder(self._checkpoints(folder)):
            assert leftovers(self._checkpoints(folder)) == []
        found, expected = listed(folder), listed(self._root / "undisturbed")
        # A kill before the last of the old checkpoints went leaves that one, too, until the next save.
        assert expected.items() <= found.items(), f"missing, or of another size: {expected.items() - found.items()}"
        more = found.keys() - expected.keys()
        folders = {Path(name).parent.name for name in more}
        assert len(folders) <= 1, f"left over: {more}"
        assert all(name.startswith("step-") for name in folders), f"left over: {more}"


@contextlib.contextmanager
def noted(words: str) -> Iterator[None]:
    """What fails inside says where."""
    try:
        yield
    except Exception as error:
        error.add_note(words)
        raise


# -- what a run has told -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a run has written down of its steps and saves."""

    losses: Sequence[tuple[int, float]]
    saved: int
    """The last step that was reported as saved; 0 for none."""
    reached: int
    """The last step of the last start."""
    end: object

    @property
    def by_step(self) -> dict[int, float]:
        """The loss of each step."""
        return dict(self.losses)

    def is_joined(self, newest: int) -> bool:
        """Whether each step up to the newest checkpoint has its loss."""
        return set(range(1, newest + 1)) <= self.by_step.keys()


def told_by_journal(folder: Path, *, lost: int | None = None) -> Told:
    """What the user's own loop has written down; starts must be at a step that was reached, and at the last that was saved.

    Args:
        folder: Of the run.
        lost: A checkpoint of this step was damaged.
    """
    lines = Journal.lines(journal_of(folder))
    reached = saved = 0
    for kind, step, _ in lines:
        assert kind != "start" or saved <= step <= reached, (
            f"started from step {step}: saved {saved}, reached {reached}"
        )
        assert kind != "loss" or step <= reached + 1, f"step {step} follows {reached}: a batch was left out"
        reached = step if kind in ("start", "loss") else reached
        saved = step if kind == "saved" else saved
    return Told(
        losses=[(step, value) for kind, step, value in lines if kind == "loss"],
        saved=saved,
        reached=reached,
        # Killed after it, a run comes to its end again.
        end={value for kind, _, value in lines if kind == "end"},
    )


def told_by_rows(folder: Path) -> Told:
    """What the rows of a run say, each step of which has one row, in order; a row that a kill has torn may be the last."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    losses = [(row["step"], row["loss"]) for row in rows if row["kind"] == "step"]
    assert [step for step, _ in losses] == list(range(1, len(losses) + 1)), f"{path} has rows twice, or none of a step"
    evaluations = [(row["step"], row["loss"]) for row in rows if row["kind"] == "evaluation"]
    newest = RunFolder(folder / "checkpoints").newest_good() if (folder / "checkpoints").exists() else None
    weights = None if newest is None else sorted((str(name), str(spec)) for name, spec in newest.index.files.items())
    return Told(
        losses=losses,
        saved=max((row["saved_step"] for row in rows if row["kind"] == "checkpoint"), default=0),
        reached=len(losses),
        end=(evaluations, weights),
    )


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint; every one that has a name is whole, and none is reported as damaged."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = RunFolder(folder)
        for step in run.checkpoints():
            reader = RunFolder(folder).newest_good()
            assert reader is not None
            assert reader.index.step >= step
        return max(run.checkpoints(), default=0)


def assert_lock_is_free(folder: Path) -> None:
    """Nobody holds the lock of a run's folder."""
    if not (folder / ".lock").exists():
        return
    descriptor = os.open(folder / ".lock", os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def listed(folder: Path) -> dict[str, int]:
    """The files of a folder, those of tensors with their sizes; an index has the plan, whose memory may have been changed."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size if path.suffix == ".safetensors" else 0
        for path in found
    }


KINDS: dict[str, SmallRun | TrainRun] = {**small_runs.RUNS, **train_runs.RUNS}
