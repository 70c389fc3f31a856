"""Runs recipes, each in a fresh process, one after the other: one that fails or is killed leaves a record, and the next begins.

A process for each, because peaks, caches and compiled graphs of one run must not show in the next; never two at a time,
because they would share the device. Who starts several runners at once says so, and gets no speeds.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from lowtide import config, plain_text
from lowtide.errors import BadRecordError, ConfigError
from lowtide.lab.preflight import refuse_mistakes, unmet_requirements
from lowtide.lab.progress import Done, Message, Progress, Request, SoFar, named_surroundings
from lowtide.lab.recipe import Recipe
from lowtide.lab.record import Outcome, RunRecord, Surroundings, read_record, write_record
from lowtide.units import format_seconds

EXPERIMENT = "lowtide.lab.experiment:run_experiment"
STDERR_LINES = 10
"""How many of a worker's last lines its record has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One recipe with its seed."""

    name: str
    """The recipe's, which is a folder's below the records too."""
    recipe: Recipe

    @property
    def title(self) -> str:
        """The name of the run for people, different for each run of a list."""
        return f"{self.name}, seed {self.recipe.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """A run and what became of it."""

    run: Run
    record: RunRecord
    path: Path
    """The path of the record."""


OnRunProgress = Callable[[Run, Progress], None]


def run_all(
    runs: Sequence[Run],
    folder: Path,
    *,
    on_progress: OnRunProgress,
    limit_s: float | None = None,
    is_alone: bool = True,
    experiment: str = EXPERIMENT,
) -> Iterator[EndedRun]:
    """Run each in turn and give it back when its record is written, however it ended.

    A run that lacks something here is not started; its record is that of a failure, and says what it needs. Ctrl-C ends
    the running one, which is given back as killed, and then comes out of here.

    Args:
        runs: In this order.
        folder: Gets `records`, `logs` (what runs print) and `tensorboard`.
        on_progress: Called with each word of a run, the first as it is started.
        limit_s: A run is killed after so many seconds; None: never.
        is_alone: Whether no other work is on the device meanwhile; else the times are recorded, and are no speeds.
        experiment: What runs a recipe, as `package.module:function`.

    Raises:
        ConfigError: The folder cannot be written to, the limit is not above 0, or a recipe cannot run anywhere; nothing
            was started then, and nothing is recorded.
    """
    if limit_s is not None and not limit_s > 0:
        raise ConfigError(f"the limit of a run is {limit_s} s; give more than 0, or leave it out", key="limit")
    # All are checked before the first begins: a wrong device of the last one should not show after hours.
    lacking = [unmet_requirements(run.recipe) for run in runs]
    _refuse_mistakes([run for run, unmet in zip(runs, lacking, strict=True) if not unmet])
    try:
        (folder / "records").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"records cannot go to {str(folder)!r}: {error.strerror}", key="out") from error
    for run, unmet in zip(runs, lacking, strict=True):
        turn = _Turn(run, folder, on_progress, is_alone=is_alone)
        if unmet:
            yield turn.refused(unmet)
            continue
        try:
            ended = turn.run(limit_s, experiment)
        except KeyboardInterrupt:
            yield turn.ended("was interrupted from the keyboard")
            raise
        yield ended


def _refuse_mistakes(runs: Sequence[Run]) -> None:
    checked: dict[str, Recipe] = {}
    for run in runs:
        # Seeds change nothing that could be wrong, and a large model takes a moment to build.
        seedless = replace(run.recipe, seed=0)
        if checked.get(run.name) != seedless:
            refuse_mistakes(run.name, seedless)
        checked[run.name] = seedless


class _Turn:
    """One run, from its start to its record."""

    def __init__(self, run: Run, folder: Path, on_progress: OnRunProgress, *, is_alone: bool) -> None:
        self._run, self._is_alone = run, is_alone
        self._folder = folder.resolve()
        self._on_progress = on_progress
        self._file = _free_name(self._folder, run)
        self._path = self._folder / "records" / f"{self._file}.json"
        self._so_far = SoFar()
        self._surroundings: Surroundings | None = None
        self._worker: _Worker | None = None

    def run(self, limit_s: float | None, experiment: str) -> EndedRun:
        """Start the worker and wait for its end."""
        self._on_progress(self._run, Progress(words="starting"))
        out = _out_log(self._folder, self._file)
        err = out.with_suffix(".err")
        request = Request(
            name=self._run.name,
            recipe=self._run.recipe,
            record=self._path,
            tensorboard=self._folder / "tensorboard" / self._file,
            experiment=experiment,
            import_paths=tuple(sys.path),
            progress_fd=-1,
            is_alone=self._is_alone,
        )
        with _started(request, stdout=out, stderr=err) as worker:
            self._worker = worker
            for message in worker.messages(limit_s):
                if isinstance(message, Surroundings):
                    self._surroundings = message
                elif isinstance(message, Progress):
                    self._so_far.add(message)
                    self._on_progress(self._run, message)
        if worker.is_late and limit_s is not None:
            return self.ended(f"was killed at its limit of {format_seconds(limit_s)}")
        return self.ended(_how(worker.process.returncode))

    def refused(self, unmet: Sequence[str]) -> EndedRun:
        """Not started: the record says what is lacking."""
        ended = self._write(Outcome.FAILED, f"it cannot run here: {'; '.join(unmet)}")
        _out_log(self._folder, self._file).unlink()
        return ended

    def ended(self, how: str) -> EndedRun:
        """End with the worker's own record, or where there is none with one that says how the worker ended."""
        try:
            return EndedRun(run=self._run, record=read_record(self._path), path=self._path)
        except BadRecordError:
            elapsed = tail = ""
            if self._worker is not None:
                elapsed = f" after {format_seconds(time.monotonic() - self._worker.begun_s)}"
                tail = self._worker.stderr_tail(STDERR_LINES)
            message = f"the run {how}{elapsed}; {self._so_far.words}"
            return self._write(Outcome.KILLED, f"{message}\nits last errors:\n{tail}" if tail else message)

    def _write(self, outcome: Outcome, message: str) -> EndedRun:
        record = RunRecord(
            name=self._run.name,
            outcome=outcome,
            surroundings=self._surroundings or named_surroundings(self._run.recipe.device or "unknown"),
            recipe=config.to_plain(self._run.recipe),
            message=message,
            losses=self._so_far.losses,
            evaluations=self._so_far.evaluations,
        )
        write_record(record, self._path)
        plain_text.clear_unfinished(self._path)  # of a worker that was killed while it wrote
        return EndedRun(run=self._run, record=record, path=self._path)


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended without a record, with exit code {exit_code},"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    by_whom = ", as the system's memory killer does," if name == "SIGKILL" else ""
    return f"was ended by {name}{by_whom}"


def _free_name(folder: Path, run: Run) -> str:
    """A name that no other run has, also of another runner within the same second: its log is there from now on."""
    date = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H%M%SZ")
    for number in itertools.count(1):
        name = f"{run.name}/seed-{run.recipe.seed}_{date}{'' if number == 1 else f'-{number}'}"
        log = _out_log(folder, name)
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            log.touch(exist_ok=False)
        except FileExistsError:
            continue
        # An empty log goes with the end of its run, and the record stays.
        if not (folder / "records" / f"{name}.json").exists():
            return name
        log.unlink()
    raise AssertionError("numbers do not end")


def _out_log(folder: Path, name: str) -> Path:
    # Not with_suffix: the dots of a name are its own.
    return folder / "logs" / f"{name}.out"


POLL_S = 0.1
CLOSING_LIMIT_S = 60.0
"""How long a worker that has written its record may take to end: some thread of the run may hang."""
STDERR_TAIL_BYTES = 1 << 16


@contextlib.contextmanager
def _started(request: Request, *, stdout: Path, stderr: Path) -> Iterator[_Worker]:
    """A worker in a process group of its own; at the end what is left of the group is killed.

    Args:
        request: What to run; the pipe is put into it here.
        stdout: A file for what the run prints.
        stderr: A file for its errors and warnings.
    """
    stdout.parent.mkdir(parents=True, exist_ok=True)
    pipe, workers_end = Pipe(duplex=False)
    with pipe, tempfile.TemporaryDirectory(prefix="lowtide-lab-") as folder:
        request_file = Path(folder) / "request.json"
        with workers_end, stdout.open("wb") as out, stderr.open("wb") as err:
            config.write_config(replace(request, progress_fd=workers_end.fileno()), request_file)
            process = subprocess.Popen(
                # A crash in native code then leaves the Python lines that led to it.
                [sys.executable, "-X", "faulthandler", "-m", "lowtide.lab.worker", str(request_file)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=(workers_end.fileno(),),
                env=_environment(Path(folder)),
                # Ctrl-C on the terminal must come to the runner alone, which then ends the worker and says so.
                start_new_session=True,
            )
        try:
            yield _Worker(process, pipe, stderr)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for log in (stdout, stderr):
                if log.stat().st_size == 0:
                    log.unlink()


class _Worker:
    """A running worker, and what is known of it when it has ended."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: Connection, stderr: Path) -> None:
        self.process = process
        self.begun_s = time.monotonic()
        self.is_late = False
        """Whether `messages` ended because its limit had passed."""
        self._pipe, self._stderr = pipe, stderr

    def messages(self, limit_s: float | None) -> Iterator[Message]:
        """What the worker says, until it ends or the limit passes."""
        end_s = None if limit_s is None else self.begun_s + limit_s
        # Not until the pipe closes: a process that the worker forked may hold it open for ever.
        # Nor is the exit status taken: until then no other process can get the number that the group is killed by.
        while os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            for message in self._read(POLL_S):
                if isinstance(message, Done):
                    end_s = time.monotonic() + CLOSING_LIMIT_S
                yield message
            if end_s is not None and time.monotonic() > end_s:
                self.is_late = True
                return
        yield from self._read(0.0)

    def stderr_tail(self, num_lines: int) -> str:
        """The last lines of what went to the error stream; of a crash in native code the first of its report."""
        if not self._stderr.exists():
            return ""
        with self._stderr.open("rb") as file:
            file.seek(max(self._stderr.stat().st_size - STDERR_TAIL_BYTES, 0))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return "\n".join(_crash_report(lines)[:num_lines] or lines[-num_lines:])

    def _read(self, timeout_s: float) -> Iterator[Message]:
        """The messages that are there, or come within that time."""
        try:
            while self._pipe.poll(timeout_s):
                yield self._pipe.recv()
                timeout_s = 0.0
        except (EOFError, OSError):
            time.sleep(timeout_s)  # the worker has closed its end, and nothing waits for it any more


def _crash_report(lines: list[str]) -> list[str]:
    """Python's report of a crash in native code: what happened, and where in the thread that it happened in."""
    fatal = next((number for number, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    if fatal is None:
        return []
    # Other threads may come before it.
    report = lines[fatal + 1 :]
    current = next((number for number, line in enumerate(report) if line.startswith("Current thread")), 0)
    return [lines[fatal], *report[current:]]


def _environment(folder: Path) -> dict[str, str]:
    """The user's, with caches of compiled code that begin empty and go with the run.

    The compilation of one run would otherwise be found by the next of the same graph, and by its own other seeds, so that
    the first step says what ran before it. Also where the variables are set: torch itself sets them in any process that
    has looked for its cache, as this one may have.
    """
    caches = {name: str(folder / name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    folders = (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, **caches, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
