"""Results on the terminal: the comparisons of a report, and `lowtide lab sweep`."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from lowtide.cli.console import ERR, OUT, Json, friendly_errors, progress, require_writable
from lowtide.errors import ConfigError
from lowtide.lab.budget import reversals, run_sweep, sweep_data, write_sweep
from lowtide.lab.recipe_file import find_recipe, read_recipe
from lowtide.lab.records import SWEEPS
from lowtide.lab.report.comparison import Comparison, fastest_words, run_remarks
from lowtide.lab.report.rows import Row, error_line
from lowtide.lab.report.tables import outcome_words, perplexity_text, result_table, shortened, sweep_table
from lowtide.report.table import Cell, Column, Table, Tone, Value

SHOWN = ("peak", "reduction", "at", "reserved", "steps", "perplexity")
"""Beside the speed that rows are compared by; the files have all columns."""
DISPENSABLE = ("reserved", "reduction", "at", "steps")
"""The columns that go first where names are long, in this order."""
NUM_COLUMNS = 80
LONGEST_LABEL = 40
"""Labels up to this length leave room for figures on 80 columns, on two lines at most."""

LONGEST_REASON = 400
"""The advice of an error stands at its end."""


def summary_of(comparison: Comparison) -> Iterator[RenderableType]:
    """The title, a table, and sentences where there are any; rows on the front are bold."""
    marks = _marks(comparison.rows)
    labels = [
        f"{row.name.rpartition('/')[2]} [{marks[row.settings]}]" if row.settings in marks else row.label
        for row in comparison.rows
    ]
    speed = "warm samples/s" if comparison.is_warm else "samples/s"
    shown = [column for column in result_table(comparison).columns if column.head == speed or _kind(column) in SHOWN]
    columns = _fitting(shown, labels)
    names = tuple(_name(row, label, comparison) for row, label in zip(comparison.rows, labels, strict=True))
    # No lines, and heads of two lines: the names need the room of 80 columns. What the files say smaller is left out.
    figures = [
        replace(column, head=_head(column), values=tuple(map(_without_detail, column.values))) for column in columns
    ]
    name = Column(head="configuration", is_number=False, wraps=True, values=names)
    yield Text(comparison.title, style="bold")
    yield Table(caption="", columns=(name, *figures))
    sentences = [f"[{mark}] {settings}" for settings, mark in marks.items()]
    # Why rows did not finish, in one line each; the files have tracebacks.
    sentences += [
        f"{label}: {shortened(reason, LONGEST_REASON)}"
        for row, label in zip(comparison.rows, labels, strict=True)
        for reason in dict.fromkeys(error_line(ending.message) for ending in row.unfinished if ending.message)
    ]
    sentences += [words] if (words := fastest_words(comparison)) else []
    sentences += _perplexities(comparison, labels)
    sentences += [f"Note: {remark}" for remark in run_remarks(comparison)]
    if sentences:
        yield Text("\n".join(sentences) + "\n")


def _name(row: Row, label: str, comparison: Comparison) -> Value:
    tone = Tone.STRONG if row in comparison.front else Tone.PLAIN
    return Value(label, tone=tone) if row.is_finished else Value(f"{label}\n{outcome_words(row)}", tone=Tone.BAD)


def _perplexities(comparison: Comparison, labels: Sequence[str]) -> list[str]:
    """A line for each row that was evaluated on the way: `control: perplexity 160.0, 152.1 after 80, 100 steps`."""
    return [
        f"{label}: perplexity {', '.join(perplexity_text(spread.mean) for spread in row.perplexities.values())} "
        f"after {', '.join(map(str, row.perplexities))} steps"
        for row, label in zip(comparison.rows, labels, strict=True)
        if row.perplexities
    ]


def _without_detail(cell: Cell) -> Cell:
    return Value(cell.text) if isinstance(cell, Value) else cell


def _kind(column: Column) -> str:
    return column.head.partition(",")[0]


def _fitting(columns: list[Column], labels: Sequence[str]) -> list[Column]:
    """The columns without those that leave the names no room on 80 columns."""
    for kind in DISPENSABLE:
        # Two spaces between columns.
        used = max(map(len, labels)) + sum(2 + _width(column) for column in columns)
        if used > NUM_COLUMNS:
            columns = [column for column in columns if _kind(column) != kind]
    return columns


def _head(column: Column) -> str:
    return column.head.replace(" ", "\n", 1)


def _width(column: Column) -> int:
    texts = (value.text for value in column.values if isinstance(value, Value))
    return max(len(line) for line in (*_head(column).split("\n"), *texts))


def _marks(rows: Sequence[Row]) -> dict[str, str]:
    """Letters for settings that are too long to stand beside a name; all of them where one is, none where none is."""
    if all(len(row.label) <= LONGEST_LABEL for row in rows):
        return {}
    different = dict.fromkeys(row.settings for row in rows if row.settings)
    return {settings: _letters(number) for number, settings in enumerate(different)}


def _letters(number: int) -> str:
    """A to z, then aa, ab and so on.

    Example:
        >>> [_letters(number) for number in (0, 25, 26, 27, 52)]
        ['a', 'z', 'aa', 'ab', 'ba']
    """
    last = string.ascii_lowercase[number % 26]
    return last if number < 26 else _letters(number // 26 - 1) + last


FOLDER = Path("lowtide-lab")
"""Where runs and sweeps are written, and looked for, unless another folder is given."""
BUDGETS = "0,0.05,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1"


def sweep_command(
    name: Annotated[str, typer.Argument(help="a recipe: a name such as peak_memory/compile, or FILE.yaml")],
    budgets: Annotated[str, typer.Option(help="from 0 to 1, with commas")] = BUDGETS,
    set_: Annotated[list[str] | None, typer.Option("--set", help="batch=8x768, dtype=bfloat16, ...")] = None,
    out: Annotated[Path, typer.Option(help="folder that the sweep is written to, for `lab report`")] = FOLDER,
    json_: Json = False,
) -> None:
    """What torch's activation budget saves and costs for a recipe's model, compiled as a whole; no GPU is needed."""
    with friendly_errors():
        require_writable("--out", [out], are_folders=True)
        recipe = read_recipe(find_recipe(name), set_ or [])
        with progress(f"sweeping the budget of {recipe.model}") as say:
            sweep = run_sweep(recipe, parse_budgets(budgets), on_progress=lambda told: say(told.words))
        path = out / SWEEPS / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', recipe.model)}_{recipe.dtype}_{sweep.batch}.json"
        write_sweep(sweep, path)
        if json_:
            print(json.dumps(sweep_data(sweep), indent=2))
        else:
            OUT.print(sweep_table(sweep))
            for reversal in reversals(sweep.points):
                OUT.print(reversal.words, markup=False, highlight=False)
        ERR.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


def parse_budgets(text: str) -> list[float]:
    """The numbers of a list with commas.

    Example:
        >>> parse_budgets("0, 0.5,1")
        [0.0, 0.5, 1.0]

    Raises:
        ConfigError: One of them is no number.
    """
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"--budgets {text!r} is no list of numbers such as 0,0.5,1", key="budgets") from None
