"""A report's comparisons on the terminal: the columns that most questions are about, and the fastest within a budget."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from lowtide.lab.report.comparison import Comparison
from lowtide.lab.report.fastest import fastest_words
from lowtide.lab.report.provenance import run_remarks
from lowtide.lab.report.tables import outcome_words, result_table
from lowtide.report.terminal_table import titled_table

SHOWN = ("peak", "reduction", "at", "reserved", "steps", "perplexity")
"""Beside the speed that rows are compared by; the files have all columns."""


def summary_of(comparison: Comparison) -> Iterator[RenderableType]:
    """The title, a table, and sentences where there are any; rows on the front are bold."""
    speed = "warm samples/s" if comparison.is_warm else "samples/s"
    columns = [
        column
        for column in result_table(comparison).columns
        if column.head == speed or column.head.partition(",")[0] in SHOWN
    ]
    # No lines, and heads of two lines: the names need the room of 80 columns.
    heads = (f"{'>' if column.is_number else '<'}{column.head.replace(' ', chr(10), 1)}" for column in columns)
    table = titled_table("", "configuration", *heads)
    for index, row in enumerate(comparison.rows):
        name = Text(row.label, style="bold" if row in comparison.front else "")
        if not row.is_finished:
            name.append(f"\n{outcome_words(row)}", style="bold red")
        values = (column.values[index] for column in columns)
        table.add_row(name, *(Text("" if value is None else value.text) for value in values))
    yield Text(comparison.title, style="bold")
    yield table
    sentences = [words] if (words := fastest_words(comparison)) else []
    sentences += [f"Note: {remark}" for remark in run_remarks(comparison)]
    if sentences:
        yield Text("\n".join(sentences) + "\n")
