"""A report's comparisons on the terminal: the columns that most questions are about, and the fastest within a budget."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from lowtide.lab.report.comparison import Comparison
from lowtide.lab.report.error_words import error_line
from lowtide.lab.report.fastest import fastest_words
from lowtide.lab.report.provenance import run_remarks
from lowtide.lab.report.rows import Row
from lowtide.lab.report.tables import Column, number, outcome_words, result_table, shortened
from lowtide.report.terminal_table import titled_table

SHOWN = ("peak", "reduction", "at", "reserved", "steps", "perplexity")
"""Beside the speed that rows are compared by; the files have all columns."""
DISPENSABLE = ("reserved", "reduction", "at", "steps")
"""Of these, what goes first where names are long."""
NUM_COLUMNS = 80
LONGEST_LABEL = 40
"""That leaves room for figures on 80 columns, on two lines at most."""

LONGEST_REASON = 400
"""The advice of an error stands at its end."""


def summary_of(comparison: Comparison) -> Iterator[RenderableType]:
    """The title, a table, and sentences where there are any; rows on the front are bold."""
    marks = _marks(comparison.rows)
    labels = [
        f"{row.name.rpartition('/')[2]} [{marks[row.settings]}]" if row.settings in marks else row.label
        for row in comparison.rows
    ]
    columns = _fitting(_shown(comparison), labels)
    # No lines, and heads of two lines: the names need the room of 80 columns.
    table = titled_table("", "configuration", *(f"{'>' if each.is_number else '<'}{_head(each)}" for each in columns))
    for index, (row, label) in enumerate(zip(comparison.rows, labels, strict=True)):
        name = Text(label, style="bold" if row in comparison.front else "")
        if not row.is_finished:
            name.append(f"\n{outcome_words(row)}", style="bold red")
        values = (column.values[index] for column in columns)
        table.add_row(name, *(Text("" if value is None else value.text) for value in values))
    yield Text(comparison.title, style="bold")
    yield table
    sentences = [f"[{mark}] {settings}" for settings, mark in marks.items()]
    sentences += _reasons(comparison, labels)
    sentences += [words] if (words := fastest_words(comparison)) else []
    sentences += _moments(comparison, labels)
    sentences += [f"Note: {remark}" for remark in run_remarks(comparison)]
    if sentences:
        yield Text("\n".join(sentences) + "\n")


def _reasons(comparison: Comparison, labels: Sequence[str]) -> list[str]:
    """Why rows did not finish, in one line each; the files have tracebacks."""
    return [
        f"{label}: {shortened(reason, LONGEST_REASON)}"
        for row, label in zip(comparison.rows, labels, strict=True)
        for reason in dict.fromkeys(error_line(ending.message) for ending in row.unfinished if ending.message)
    ]


def _moments(comparison: Comparison, labels: Sequence[str]) -> list[str]:
    """A line for each row that was evaluated on the way: `control: perplexity 160.0, 152.1 after 80, 100 steps`."""
    return [
        f"{label}: perplexity {', '.join(number(spread.mean) for spread in row.perplexities.values())} "
        f"after {', '.join(map(str, row.perplexities))} steps"
        for row, label in zip(comparison.rows, labels, strict=True)
        if row.perplexities
    ]


def _shown(comparison: Comparison) -> list[Column]:
    speed = "warm samples/s" if comparison.is_warm else "samples/s"
    columns = result_table(comparison).columns
    return [column for column in columns if column.head == speed or column.head.partition(",")[0] in SHOWN]


def _fitting(columns: list[Column], labels: Sequence[str]) -> list[Column]:
    """Without those that leave the names no room on 80 columns."""
    for kind in DISPENSABLE:
        # Two spaces between columns.
        used = max(map(len, labels)) + sum(2 + _width(column) for column in columns)
        if used > NUM_COLUMNS:
            columns = [column for column in columns if column.head.partition(",")[0] != kind]
    return columns


def _head(column: Column) -> str:
    return column.head.replace(" ", "\n", 1)


def _width(column: Column) -> int:
    return max(len(line) for line in (*_head(column).split("\n"), *(value.text for value in column.values if value)))


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
