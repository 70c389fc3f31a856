"""Table: figures as plain data, with one renderer each for the terminal, the page and Markdown.

A column appears with its line of the legend. Names come from a user's model and recipes: they are wrapped in `Text`,
escaped or marked as text, never passed on as markup.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from html import escape
from typing import TypeAlias, TypeVar

from rich.bar import Bar as RichBar
from rich.table import Table as RichTable
from rich.text import Text

from lowtide.report.palette import COLOURS, PEAK_COLOUR
from lowtide.units import GiB, KiB, MiB, format_bytes

R = TypeVar("R")
"""What a table has a row for."""


class Tone(enum.Enum):
    """How a value is meant, whatever it is shown on."""

    PLAIN = ""
    STRONG = "strong"
    GOOD = "good"
    BAD = "bad"
    QUIET = "quiet"
    PEAK = "peak"


STYLES = {
    Tone.PLAIN: "",
    Tone.STRONG: "bold",
    Tone.GOOD: "green",
    Tone.BAD: "bold red",
    Tone.QUIET: "dim",
    Tone.PEAK: f"bold {PEAK_COLOUR}",
}
"""The tones in a terminal."""

_BAR_WIDTH = 24
_KIND_COLOURS = {
    **{category.value: colour for category, colour in COLOURS.items()},
    "peak": PEAK_COLOUR,
    "kind-waiting": "red",
}


@dataclass(frozen=True, slots=True)
class Value:
    """What a cell says."""

    text: str
    order: float | str | None = None
    """What the page sorts by; None: the text."""
    detail: str = ""
    """What is said smaller: a range, a reason, a line of code."""
    _: KW_ONLY
    num_bytes: int | None = None
    """The exact size behind the text."""
    tone: Tone = Tone.PLAIN
    swatch: str = ""
    """The kind, such as a category, whose colour stands before the text."""
    badge: str = ""
    """A word that stands out behind the text."""
    is_code: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of one or several kinds, each with its share of the column's width."""

    parts: tuple[tuple[str, float], ...]


Cell = Value | Bar | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column: its head, what it means, and its cells."""

    head: str
    legend: str = ""
    is_number: bool = True
    """Whether it is set to the right, so that digits line up."""
    wraps: bool = False
    """Whether long words go on in the next line, in a terminal."""
    is_for_page: bool = False
    """Whether a terminal, with its 80 columns, goes without it."""
    values: tuple[Cell, ...] = ()
    """One for each row; None where it has nothing to say."""

    @property
    def has_bars(self) -> bool:
        """Whether it is drawn; what it says stands in another column as a number."""
        return any(isinstance(value, Bar) for value in self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns over the same rows. Rich prints it as it is."""

    caption: str
    columns: tuple[Column, ...]
    kind: str = ""
    """Classes of the page's style sheet: sortable, narrow, wide, reasons."""

    @property
    def rows(self) -> tuple[tuple[Cell, ...], ...]:
        """The cells row by row."""
        return tuple(zip(*(column.values for column in self.columns), strict=True))

    def with_row(self, *cells: Cell | str) -> Table:
        """The table with one more row below the others, such as their sum."""
        pairs = zip(self.columns, _values(cells), strict=True)
        return replace(self, columns=tuple(replace(column, values=(*column.values, cell)) for column, cell in pairs))

    def __rich__(self) -> RichTable:
        return to_terminal(self)


Fill: TypeAlias = Callable[[Sequence[R]], Column]
"""A column before there are rows: given them, it has a cell for each."""


def make_table(caption: str, rows: Iterable[R], *columns: Fill[R], kind: str = "") -> Table:
    """A table in which each column says something of each row.

    Example:
        >>> table = make_table("", ["a", "bc"], words("text", lambda row: row), number("length", lambda row: str(len(row))))
        >>> [cell.text for cell in table.rows[1]]
        ['bc', '2']
    """
    known = list(rows)
    return Table(caption=caption, columns=tuple(column(known) for column in columns), kind=kind)


def number(head: str, cell: Callable[[R], Cell | str], legend: str = "", *, is_for_page: bool = False) -> Fill[R]:
    """A column of numbers; plain texts become values."""
    return lambda rows: Column(head=head, legend=legend, is_for_page=is_for_page, values=_values(map(cell, rows)))


def words(
    head: str, cell: Callable[[R], Cell | str], legend: str = "", *, wraps: bool = False, is_for_page: bool = False
) -> Fill[R]:
    """A column of text; plain texts become values."""
    return lambda rows: Column(
        head=head, legend=legend, is_number=False, wraps=wraps, is_for_page=is_for_page, values=_values(map(cell, rows))
    )


def _values(cells: Iterable[Cell | str]) -> tuple[Cell, ...]:
    return tuple(Value(cell) if isinstance(cell, str) else cell for cell in cells)


def size(num_bytes: int | None, tone: Tone = Tone.PLAIN) -> Value:
    """Bytes for people, with the exact number behind them; a dash where they are not known."""
    if num_bytes is None:
        return Value("–")
    return Value(format_bytes(num_bytes), num_bytes, num_bytes=num_bytes, tone=tone)


def bar(kind: str, share: float) -> Bar:
    """A bar of one kind."""
    return Bar(((kind, share),))


def to_terminal(table: Table) -> RichTable:
    """The table without lines, with quiet heads and numbers to the right."""
    shown = RichTable(
        title=table.caption or None,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    columns = [column for column in table.columns if not column.is_for_page]
    for column in columns:
        head = Text("" if column.has_bars else column.head)
        if column.wraps:
            shown.add_column(head, overflow="fold", header_style="dim")
        else:
            shown.add_column(head, justify="right" if column.is_number else "left", no_wrap=True, header_style="dim")
    for cells in zip(*(column.values for column in columns), strict=True):
        shown.add_row(*map(_terminal_cell, cells))
    return shown


def _terminal_cell(cell: Cell) -> Text | RichBar:
    if cell is None:
        return Text("")
    if isinstance(cell, Bar):
        kind, share = cell.parts[0]
        return RichBar(size=1.0, begin=0, end=share, width=_BAR_WIDTH, color=_KIND_COLOURS.get(kind, "default"))
    text = Text()
    if cell.swatch in _KIND_COLOURS and not cell.swatch.startswith("kind-"):
        text.append("■ ", style=_KIND_COLOURS[cell.swatch])
    text.append(cell.text, style=STYLES[cell.tone])
    if cell.badge:
        text.append(f" ◀ {cell.badge}", style=STYLES[cell.tone])
    if cell.detail:
        text.append(f" {cell.detail}", style=STYLES[Tone.QUIET])
    return text


def to_html(table: Table) -> str:
    """The table with its caption, and its legend below it; screen readers skip the bars."""
    # The wrapper scrolls sideways on a phone; it takes the focus so that the keyboard can scroll it too.
    caption = escape(table.caption)
    classes = [
        ' class="bars" aria-hidden="true"' if column.has_bars else ' class="number"' if column.is_number else ""
        for column in table.columns
    ]
    heads = "".join(
        f'<th scope="col"{kind}>{escape(column.head)}</th>' for column, kind in zip(table.columns, classes, strict=True)
    )
    rows = "".join(
        f"<tr>{''.join(f'<td{kind}>{_html_content(cell)}</td>' for cell, kind in zip(row, classes, strict=True))}</tr>"
        for row in table.rows
    )
    meanings = "".join(
        f"<dt>{escape(column.head)}</dt><dd>{escape(column.legend)}</dd>" for column in table.columns if column.legend
    )
    summary = '<details class="columns"><summary>What the columns mean</summary>'
    legend = f"{summary}<dl>{meanings}</dl></details>" if meanings else ""
    return (
        f'<div class="table {table.kind}" tabindex="0" role="region" aria-label="{caption}">'
        f"<table><caption>{caption}</caption><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>{legend}"
    )


def _html_content(cell: Cell) -> str:
    if isinstance(cell, Value):
        return value_html(cell)
    if cell is None:
        return '<span class="quiet">–</span>'
    bars = "".join(f'<i class="bar {kind}" style="width:{share:.2%}"></i>' for kind, share in cell.parts if share)
    return f'<span class="stack">{bars}</span>' if len(cell.parts) > 1 else bars


def value_html(cell: Value) -> str:
    """A value as escaped HTML."""
    # Long names may break after an underscore, which no browser does by itself.
    text = escape(cell.text).replace("_", "_<wbr>")
    if cell.is_code:
        text = f"<code>{text}</code>"
    if cell.tone is Tone.QUIET:
        text = f'<span class="quiet">{text}</span>'
    elif cell.tone is not Tone.PLAIN:
        text = f'<b class="{cell.tone.value}">{text}</b>'
    if cell.num_bytes is not None:
        text = f'<span title="{cell.num_bytes:,} bytes" data-bytes="{cell.num_bytes}">{text}</span>'
    if cell.order is not None:
        text = f'<span data-value="{escape(str(cell.order))}">{text}</span>'
    swatch = f'<i class="swatch {cell.swatch}"></i>' if cell.swatch else ""
    badge = f' <em class="{cell.badge}">{cell.badge}</em>' if cell.badge else ""
    detail = f" <small>{escape(cell.detail)}</small>" if cell.detail else ""
    return f"{swatch}{text}{badge}{detail}"


def to_markdown(table: Table) -> str:
    """The table, and its legend as a list below it; bars are left out, what stands out is bold."""
    columns = [column for column in table.columns if not column.has_bars]
    lines = [
        _markdown_line([column.head for column in columns]),
        _markdown_line(["---:" if column.is_number else "---" for column in columns]),
        *(_markdown_line(map(_markdown_cell, row)) for row in zip(*(each.values for each in columns), strict=True)),
    ]
    legend = [f"- {column.head}: {escape_markdown(column.legend)}" for column in columns if column.legend]
    return "\n".join(lines) + ("\n\n" + "\n".join(legend) if legend else "")


def _markdown_cell(cell: Cell) -> str:
    if not isinstance(cell, Value):
        return ""
    text = escape_markdown(cell.text)
    if cell.tone in (Tone.STRONG, Tone.BAD):
        text = f"**{text}**"
    return f"{text} ({escape_markdown(cell.detail)})" if cell.detail else text


def _markdown_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def escape_markdown(text: str) -> str:
    r"""Plain text that markdown takes as it is, on one line, in a table or elsewhere.

    Example:
        >>> print(escape_markdown("a|b *c* bf16_fused _d_"))
        a\|b \*c\* bf16_fused \_d\_
    """
    # An underscore within a word marks nothing, and names read better without backslashes.
    return re.sub(r"([\\`*\[\]<>|~$&]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(text.split()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteUnit:
    """One unit for all sizes of a table, so that its columns can be compared at a glance."""

    name: str
    num_bytes: int
    decimals: int

    def text(self, num_bytes: float) -> str:
        """A size without the unit's name, which stands in the head of the column."""
        return f"{num_bytes / self.num_bytes:,.{self.decimals}f}"

    def value(self, num_bytes: int | None) -> Value | None:
        """A cell of such a column."""
        return None if num_bytes is None else Value(self.text(num_bytes), num_bytes)


_UNITS = (
    # Published tables say GiB with three digits; differences of a few MiB are what they argue about.
    ByteUnit(name="GiB", num_bytes=GiB, decimals=3),
    ByteUnit(name="MiB", num_bytes=MiB, decimals=2),
    ByteUnit(name="KiB", num_bytes=KiB, decimals=1),
)


def byte_unit(largest_bytes: int) -> ByteUnit:
    """The largest unit of which there is at least one; KiB for less; GiB where nothing is known."""
    if not largest_bytes:
        return _UNITS[0]
    return next((unit for unit in _UNITS if largest_bytes >= unit.num_bytes), _UNITS[-1])
