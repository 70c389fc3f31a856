"""Escaped HTML for the page's small things: cells, tables, bars and notes.

They are complete by themselves, so that a reader without scripts, or with a screen reader, misses no number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from lowtide.units import format_bytes


@dataclass(frozen=True, slots=True)
class Markup:
    """HTML that is safe as it is; plain strings are escaped wherever they are placed."""

    html: str


Cell = str | Markup


def figures(items: Iterable[tuple[str, Cell, Cell]]) -> str:
    """The large numbers at the top of a section: name, value and a detail below it."""
    cards = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{text(value)}<small>{text(detail)}</small></dd></div>"
        for name, value, detail in items
    )
    return f'<dl class="figures">{cards}</dl>'


def notes(lines: Sequence[str]) -> str:
    """What the reader must know about how the numbers were made; "" without lines."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<aside class="notes"><h3>Notes</h3><ul>{items}</ul></aside>' if lines else ""


def table(caption: str, heads: Iterable[str], rows: Iterable[Sequence[Cell]], *, kind: str = "") -> str:
    """A table with a caption; in a head, "#" marks a column of numbers and "%" one of bars.

    Screen readers skip the bars: the share beside them says it already.
    """
    heads = list(heads)
    classes = [{"#": "number", "%": "bars"}.get(head[:1], "") for head in heads]
    hidden = ' aria-hidden="true"'
    top = "".join(
        f'<th scope="col" class="{name}"{hidden if name == "bars" else ""}>{escape(head.lstrip("#%"))}</th>'
        for head, name in zip(heads, classes, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{name}"{hidden if name == "bars" else ""}>{text(cell)}</td>'
            for cell, name in zip(row, classes, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    # The wrapper scrolls sideways on a phone; it takes the focus so that the keyboard can scroll it too.
    return (
        f'<div class="table {kind}" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def text(cell: Cell) -> str:
    """A cell as HTML."""
    return cell.html if isinstance(cell, Markup) else escape(cell)


def size(num_bytes: int) -> Markup:
    """Bytes for people, the exact number in its tooltip."""
    return Markup(f'<span title="{num_bytes:,} bytes" data-bytes="{num_bytes}">{format_bytes(num_bytes)}</span>')


def bar(kind: str, share: float) -> Markup:
    """A bar as wide as its share of the cell, in the colour of its kind."""
    return Markup(f'<i class="bar {kind}" style="width:{share:.2%}"></i>' if share else "")
