"""The look of every table in the terminal: no lines, quiet heads, numbers to the right."""

from __future__ import annotations

from typing import Literal

from rich.table import Table


def titled_table(title: str, *columns: str) -> Table:
    """An empty table without lines.

    A leading ">" marks a column of numbers, right-aligned so that digits line up, "<" one of text; neither wraps.
    """
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        if column.startswith((">", "<")):
            justify: Literal["left", "right"] = "right" if column[0] == ">" else "left"
            table.add_column(column[1:], justify=justify, no_wrap=True, header_style="dim")
        else:
            table.add_column(column, overflow="fold", header_style="dim")
    return table
