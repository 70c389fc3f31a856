"""`lowtide lab`: lists recipes, runs them one after the other, and makes a report of their records.

While runs go on the terminal has a bar or plain lines, and a table when they are over.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from lowtide.cli.console import ERR, OUT, Gpu, Json, Recipes, friendly_errors, progress, require_writable
from lowtide.cli.lab_recipes import predict_all, prediction_table, recipe_lines, recipe_row, show_command
from lowtide.cli.lab_results import FOLDER, sweep_command
from lowtide.errors import ConfigError
from lowtide.hardware import find_hardware
from lowtide.lab.catalogue import choose_recipes, matching_recipes
from lowtide.lab.progress import Progress as RunProgress
from lowtide.lab.progress import describe, figures, shown_bytes
from lowtide.lab.recipe_file import known_recipes, read_recipe
from lowtide.lab.record import Outcome, perplexity
from lowtide.lab.records import collect
from lowtide.lab.runner import EXPERIMENT, EndedRun, Run, run_all
from lowtide.plain_text import Plain
from lowtide.report.table import Table, Tone, Value, make_table, number, words

lab_app = typer.Typer(
    name="lab",
    help="Experiments from recipes: list them, run them, and set their records side by side.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

MOST_SEEDS = 20
"""The most seeds a number may ask for: a larger one is likely to be a seed itself."""


@lab_app.command("ls")
def list_command(
    patterns: Annotated[
        list[str] | None,
        typer.Argument(help="only these: names, folders, patterns such as '*checkpoint', or FILE.yaml"),
    ] = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="instead the peaks that the trace predicts, the smallest first")
    ] = False,
    gpu: Gpu = "h200",
    recipes: Recipes = None,
    json_: Json = False,
) -> None:
    """The recipes, a line each; `lab show NAME` has all settings of one."""
    with friendly_errors():
        known = known_recipes(recipes or [])
        listed = matching_recipes(patterns, known) if patterns else known
        rows = [recipe_row(name, path) for name, path in listed.items()]
        predictions = predict_all(listed, gpu) if predict else {}
        for row in rows if predict else ():
            row |= predictions[str(row["name"])].plain(gpu)
        if json_:
            print(json.dumps({"schema": "lowtide.lab_recipes/1", "recipes": rows}, indent=2))
        elif predict:
            OUT.print(prediction_table(predictions, find_hardware(gpu)))
            for name, prediction in predictions.items():
                if prediction.figures is None:
                    OUT.print(f"{name}: {prediction.words}", markup=False, highlight=False, soft_wrap=True)
        else:
            for line in recipe_lines(rows, is_folded=not patterns):
                if OUT.is_terminal:
                    OUT.print(line, highlight=False, no_wrap=line.no_wrap, overflow=line.overflow)
                else:  # a file or a pipe has no width that notes would have to be cut to
                    OUT.print(line, highlight=False, soft_wrap=True)
            OUT.print("all settings of one: lowtide lab show NAME", style="dim", highlight=False)


@lab_app.command("run")
def run_command(
    names: Annotated[list[str], typer.Argument(help="names, patterns such as 'peak_memory/*', or FILE.yaml")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="steps=5, dtype=bfloat16, plan.weights=resident, ...")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="3 (so many, from the recipe's own on) or 0,1,2; without: the recipe's own")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for records, logs and TensorBoard curves")] = FOLDER,
    limit: Annotated[float | None, typer.Option(help="seconds after which a run is killed")] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="other work is on the device meanwhile: times are no speeds then")
    ] = False,
    recipes: Recipes = None,
    json_: Json = False,
) -> None:
    """Run recipes one after the other, each in a process of its own; exits with 1 if any did not finish."""
    with friendly_errors():
        require_writable("--out", [out], are_folders=True)
        runs = make_runs(choose_recipes(names, known_recipes(recipes or [])), set_ or [], seeds)
        results: list[EndedRun] = []
        try:
            with display_of(runs, ERR) as display:
                for ended in run_all(
                    runs, out, on_progress=display.progressed, limit_s=limit, is_alone=not shared, experiment=EXPERIMENT
                ):
                    results.append(ended)
                    display.ended(ended)
        finally:  # also of what was run before an interrupt
            if json_:
                print(json.dumps({"schema": "lowtide.lab_runs/1", "runs": [run_row(e) for e in results]}, indent=2))
            elif results:
                OUT.print(run_table(results), records_words(out), sep="\n", highlight=False)
        if any(ended.record.outcome is not Outcome.FINISHED for ended in results):
            raise typer.Exit(1)


@lab_app.command("report")
def report_command(
    folders: Annotated[list[Path] | None, typer.Argument(help="folders that runs were written to")] = None,
    out: Annotated[
        Path | None, typer.Option(help="the page; report.html where neither this nor another form is given")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="the tables as markdown")] = None,
    png: Annotated[Path | None, typer.Option(help="the figure; .pdf and .svg give vectors")] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="also older runs of the same recipe, seed and settings, in rows of their own")
    ] = False,
) -> None:
    """Set the records of folders side by side, here in short and in a file whole; of one recipe, seed and settings the newest."""
    with friendly_errors():
        if out is None and markdown is None and png is None:
            out = Path("report.html")
        for option, path in (("--out", out), ("--markdown", markdown), ("--png", png)):
            require_writable(option, [path])
        with progress("making the report") as say:
            found = collect(folders or [FOLDER], say)
            say(f"{len(found.records)} records")
            # It draws, and what draws takes a second to import.
            from lowtide.cli.lab_results import summary_of
            from lowtide.lab.report.tables import sweep_table
            from lowtide.lab.report.write import write_report

            report = write_report(
                found.records,
                html=out,
                markdown=markdown,
                png=png,
                skipped=found.skipped,
                sweeps=found.sweeps,
                with_older=all_,
            )
        for comparison in report.comparisons:
            OUT.print(*summary_of(comparison), sep="\n")
        for sweep in () if report.comparisons else found.sweeps:
            OUT.print(sweep_table(sweep))
        if report.num_older:
            records = "1 older record" if report.num_older == 1 else f"{report.num_older} older records"
            ERR.print(f"left out {records} of the same recipe, seed and settings; --all shows them", highlight=False)
        for line in found.skipped:
            ERR.print(f"skipped {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)
        for path in (out, markdown, png):
            if path is not None:
                ERR.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


lab_app.command("show")(show_command)
lab_app.command("sweep")(sweep_command)


def make_runs(chosen: dict[str, Path], overrides: Sequence[str], seeds: str | None) -> list[Run]:
    """A run for each recipe and seed. All recipes are read before the first is run, so that a mistake shows at once.

    Raises:
        ConfigError: A recipe, an override or the seeds cannot be read.
    """
    recipes = {name: read_recipe(path, overrides) for name, path in chosen.items()}
    return [
        Run(name=name, recipe=replace(recipe, seed=seed))
        for name, recipe in recipes.items()
        for seed in parse_seeds(seeds, recipe.seed)
    ]


def parse_seeds(text: str | None, own: int) -> tuple[int, ...]:
    """The seeds that `--seeds` asks for: a number of them, or a list; one seed in a list is `7,`.

    Example:
        >>> parse_seeds(None, 42), parse_seeds("3", 42), parse_seeds("0,1,2", 42), parse_seeds("7,", 42)
        ((42,), (42, 43, 44), (0, 1, 2), (7,))

    Raises:
        ConfigError: It is neither, a seed is given twice, there is none, or so many that a seed is likely to be meant.
    """
    if text is None:
        return (own,)
    words = [word.strip() for word in text.split(",")]
    if len(words) > 1 and not words[-1]:
        words.pop()
    # Not `int` alone, which takes -1 and 1_000 as well.
    if not all(word.isascii() and word.isdigit() for word in words) or len(set(words)) < len(words):
        raise ConfigError(f"--seeds {text!r} is neither a number of seeds nor a list such as 0,1,2", key="seeds")
    if "," in text:
        return tuple(int(word) for word in words)
    if int(text) < 1:
        raise ConfigError("--seeds 0 asks for no run at all; give 1 or more, or the seed itself as 0,", key="seeds")
    if int(text) > MOST_SEEDS:
        raise ConfigError(
            f"--seeds {text} asks for {text} runs of each recipe, from the seed {own} on; for the seed {text} alone write "
            f"--seeds {text}, with the comma, and for more than {MOST_SEEDS} seeds write them out",
            key="seeds",
        )
    return tuple(range(own, own + int(text)))


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
