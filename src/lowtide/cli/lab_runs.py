"""Runs on the terminal: a bar or plain lines while they go on, and a table when they are over."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from lowtide.lab.progress import Progress as RunProgress
from lowtide.lab.progress import describe, figures, shown_bytes
from lowtide.lab.record import Outcome, perplexity
from lowtide.lab.runner import EndedRun, Run
from lowtide.plain_text import Plain
from lowtide.report.table import Table, Tone, Value, make_table, number, words

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


@contextmanager
def display_of(runs: Sequence[Run], console: Console) -> Iterator[BarDisplay | LineDisplay]:
    """The display that fits a console."""
    if not console.is_terminal:
        yield LineDisplay(runs, console)
        return
    said = TextColumn("{task.fields[words]}", markup=False)
    columns = (SpinnerColumn(), BarColumn(bar_width=12), said, TimeElapsedColumn())
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
        """Print a line, if the progress is worth one."""
        # Numbers count something up, such as batches of an evaluation: no line for each.
        words = re.sub(r"\d+", "", progress.words)
        tenth = progress.step * LINES_A_RUN // progress.steps if progress.steps else 0
        now_s = time.monotonic()
        if (words, tenth) == (self._words, self._tenth) and now_s - self._said_s < LINE_AFTER_S:
            return
        self._words, self._tenth, self._said_s = words, tenth, now_s
        _print(self._console, f"{self._titles[run.title]}: {describe(progress)}")

    def ended(self, ended: EndedRun) -> None:
        """Print how the run ended."""
        self._words = ""
        _print_end(self._console, self._titles[ended.run.title], ended)


def numbered(runs: Sequence[Run]) -> dict[str, str]:
    """The title of each run, and the same with its number of all: `[2/11] peak_memory/control, seed 0`."""
    return {run.title: f"[{number}/{len(runs)}] {run.title}" for number, run in enumerate(runs, start=1)}


def outcome_words(ended: EndedRun) -> str:
    """How a run ended, in a line, and the peak or the first line of the error."""
    record = ended.record
    if record.outcome is not Outcome.FINISHED:
        return f"{record.outcome}: {record.message.partition(chr(10))[0]}"
    return "finished" if record.memory is None else f"finished, peak {shown_bytes(record.memory.peak_bytes)}"


def _print_end(console: Console, title: str, ended: EndedRun) -> None:
    _print(console, f"{title}: {outcome_words(ended)}", STYLES[ended.record.outcome])


def _print(console: Console, line: str, style: str | None = None) -> None:
    # One line stays one, wherever it is read: a log has no width.
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def run_row(ended: EndedRun) -> dict[str, Plain]:
    """What a script needs of a run; everything else is in its record."""
    record = ended.record
    speed, loss = record.speed, record.evaluation_loss
    found = math.inf if loss is None else perplexity(loss)
    return {
        "name": ended.run.name,
        "seed": ended.run.recipe.seed,
        "outcome": str(record.outcome),
        "message": record.message,
        "peak_bytes": None if record.memory is None else record.memory.peak_bytes,
        "samples_per_s": speed.samples_per_s if speed is not None and speed.step_s and speed.is_alone else None,
        # JSON has no number for one that is beyond any.
        "perplexity": found if math.isfinite(found) else None,
        "record": str(ended.path),
    }


def run_table(results: Sequence[EndedRun]) -> Table:
    """All runs with their figures, by the folders of their recipes."""
    rows: list[list[Value | str]] = []
    for folder, group in itertools.groupby(results, key=lambda ended: ended.run.name.rpartition("/")[0]):
        if folder:
            rows.append([Value(f"{folder}/", tone=Tone.STRONG), "", "", "", "", ""])
        rows += [_run_cells(ended, indent="  " if folder else "") for ended in group]
    return make_table(
        "",
        rows,
        # Where there is no room for all, long names are broken: how a run ended is what is looked for.
        words("recipe", lambda row: row[0], wraps=True),
        number("seed", lambda row: row[1]),
        words("outcome", lambda row: row[2]),
        number("peak", lambda row: row[3]),
        number("samples/s", lambda row: row[4]),
        number("perplexity", lambda row: row[5]),
    )


def _run_cells(ended: EndedRun, *, indent: str) -> list[Value | str]:
    row, outcome = run_row(ended), ended.record.outcome
    return [
        f"{indent}{ended.run.name.rpartition('/')[2]}",
        str(ended.run.recipe.seed),
        Value(str(outcome), tone=Tone.GOOD if outcome is Outcome.FINISHED else Tone.BAD),
        "" if ended.record.memory is None else shown_bytes(ended.record.memory.peak_bytes),
        *(f"{value:.4g}" if isinstance(value, float) else "" for value in (row["samples_per_s"], row["perplexity"])),
    ]


def records_words(folder: Path) -> str:
    """Where the records of runs are, from the current folder where they are below it."""
    records = folder / "records"
    shown = records.relative_to(Path.cwd()) if records.is_relative_to(Path.cwd()) else records
    return f"records are in {shown}/RECIPE"
