"""How runs of the lab are shown while they go on: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from lowtide.lab.progress import Progress as RunProgress
from lowtide.lab.progress import describe, figures, shown_bytes
from lowtide.lab.record import Outcome
from lowtide.lab.runner import EndedRun, Run

LINES_A_RUN = 10
"""Lines for the steps of one run, where there is no bar."""
LINE_AFTER_S = 30.0
"""A line also after so long without one."""

STYLES = {
    Outcome.FINISHED: "green",
    Outcome.OUT_OF_MEMORY: "yellow",
    Outcome.FAILED: "bold red",
    Outcome.KILLED: "bold red",
}


class Display(Protocol):
    """Told of everything that happens."""

    def progressed(self, run: Run, progress: RunProgress) -> None:
        """A run is somewhere; the first call of a run is its start."""

    def ended(self, ended: EndedRun) -> None:
        """A run is over."""


@contextmanager
def display_of(runs: Sequence[Run], console: Console) -> Iterator[Display]:
    """The display that fits a console."""
    if not console.is_terminal:
        yield LineDisplay(runs, console)
        return
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[words]}", markup=False),
        TimeElapsedColumn(),
    )
    with _TitledProgress(*columns, console=console, transient=True) as bar:
        yield BarDisplay(runs, bar)


class _TitledProgress(Progress):
    """The title stands above the bar: beside it there is no room for the figures on a terminal of 80 columns."""

    def get_renderables(self) -> Iterator[RenderableType]:
        for task in self.tasks:
            yield Text(task.description, no_wrap=True, overflow="ellipsis")
        yield self.make_tasks_table(self.tasks)


class BarDisplay:
    """One bar for the running one; a line above it for each that is over."""

    def __init__(self, runs: Sequence[Run], bar: Progress) -> None:
        self._titles = numbered(runs)
        self._bar = bar
        self._tasks: dict[str, TaskID] = {}

    def progressed(self, run: Run, progress: RunProgress) -> None:
        """Move the bar."""
        if run.title not in self._tasks:
            self._tasks[run.title] = self._bar.add_task(self._titles[run.title], words="", total=None)
        step = [f"{progress.step}/{progress.steps}"] if progress.steps else []
        words = " ".join([progress.words, *step, *figures(progress)])
        # One more than the steps: a full bar stops its clock, and after the last step comes the evaluation.
        total = progress.steps + 1 if progress.steps else None
        self._bar.update(self._tasks[run.title], completed=progress.step, total=total, words=words)

    def ended(self, ended: EndedRun) -> None:
        """Take the bar away."""
        if ended.run.title in self._tasks:
            self._bar.remove_task(self._tasks.pop(ended.run.title))
        _print_end(self._bar.console, self._titles[ended.run.title], ended)


class LineDisplay:
    """A line when something else is being done, at each tenth of the steps, and when long nothing was said."""

    def __init__(self, runs: Sequence[Run], console: Console) -> None:
        self._titles = numbered(runs)
        self._console = console
        self._words = ""
        self._tenth = 0
        self._said_s = 0.0

    def progressed(self, run: Run, progress: RunProgress) -> None:
        """Say it, if it is worth a line."""
        # Numbers count something up, such as batches of an evaluation: no line for each.
        words = re.sub(r"\d+", "", progress.words)
        tenth = progress.step * LINES_A_RUN // progress.steps if progress.steps else 0
        now_s = time.monotonic()
        if (words, tenth) == (self._words, self._tenth) and now_s - self._said_s < LINE_AFTER_S:
            return
        self._words, self._tenth, self._said_s = words, tenth, now_s
        _print(self._console, f"{self._titles[run.title]}: {describe(progress)}")

    def ended(self, ended: EndedRun) -> None:
        """Say how."""
        self._words = ""
        _print_end(self._console, self._titles[ended.run.title], ended)


def numbered(runs: Sequence[Run]) -> dict[str, str]:
    """The title of each run, and the same with its number of all: `[2/11] peak_memory/control, seed 0`."""
    return {run.title: f"[{number}/{len(runs)}] {run.title}" for number, run in enumerate(runs, start=1)}


def outcome_words(ended: EndedRun) -> str:
    """In a line: how it ended, and the peak or the first line of the error."""
    record = ended.record
    if record.outcome is not Outcome.FINISHED:
        return f"{record.outcome}: {record.message.partition(chr(10))[0]}"
    return "finished" if record.memory is None else f"finished, peak {shown_bytes(record.memory.peak_bytes)}"


def _print_end(console: Console, title: str, ended: EndedRun) -> None:
    _print(console, f"{title}: {outcome_words(ended)}", STYLES[ended.record.outcome])


def _print(console: Console, line: str, style: str | None = None) -> None:
    # One line stays one, wherever it is read: a log has no width.
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
