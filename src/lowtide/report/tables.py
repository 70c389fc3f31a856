"""A StepTrace in the terminal: rich renderables for the command line to print.

Every name from a model is wrapped in `Text`, never passed as markup: `layers[0]` is a module path here, not a style.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lowtide.planning.what_if import WhatIfRow
from lowtide.report.facts import circumstances, differences, fit_of, saving
from lowtide.report.palette import COLOURS, PEAK_COLOUR, STACK_ORDER
from lowtide.report.terminal_table import titled_table
from lowtide.tracing.attention.use import attention_use, fallbacks, is_on_attention
from lowtide.tracing.explanation.compare import Difference
from lowtide.tracing.explanation.instant import AliveGroup, group_alive, instant_of, largest_alive
from lowtide.tracing.step_trace import Allocation, Category, StepTrace
from lowtide.units import format_bytes, format_count

_BAR_WIDTH = 24
_GOOD, _BAD, _QUIET = "green", "bold red", "dim"


def trace_report(
    trace: StepTrace, *, observed: StepTrace | None = None, num_largest: int = 10, num_groups: int = 10
) -> Group:
    """Everything the terminal shows about a trace, from the headline down to the notes."""
    parts: list[RenderableType] = [
        headline(trace),
        category_table(trace),
        phase_table(trace),
        alive_table(trace, limit=num_groups),
        largest_table(trace, limit=num_largest),
    ]
    if observed is not None:
        parts.insert(1, comparison_table(differences(trace, observed)))
    others = [note for note in trace.notes if not is_on_attention(note)]
    if others:
        parts.append(notes(others))
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts))


def _weight_types(trace: StepTrace) -> str:
    """What the weights are stored in, the most bytes first: two runs that differ in nothing else differ twofold."""
    held: Counter[str] = Counter()
    for item in trace.allocations:
        if item.category is Category.WEIGHTS and item.dtype:
            held[item.dtype] += item.bytes
    return f" in {' and '.join(name for name, _ in held.most_common())}" if held else ""


def headline(trace: StepTrace) -> Panel:
    """The peak, whether it fits, and the instant it happens at."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style=_QUIET, no_wrap=True)
    facts.add_column(overflow="fold")
    peak = Text(format_bytes(trace.peak_bytes), style=f"bold {PEAK_COLOUR}")
    facts.add_row("peak allocated", peak + Text(f"  {trace.peak_bytes:,} bytes", style=_QUIET))
    facts.add_row("peak reserved", format_bytes(trace.peak_reserved_bytes))
    if trace.target.context_bytes:
        facts.add_row("context beside it", format_bytes(trace.target.context_bytes))
    facts.add_row("card", _fit_line(trace))
    moment = instant_of(trace, trace.peak_event)
    facts.add_row("the peak is in", Text(moment.phase.value if moment.phase else moment.place, style="bold"))
    if moment.phase is not None:
        facts.add_row("at", Text(moment.place))
        if moment.source:
            facts.add_row("line", Text(moment.source))
    uses = attention_use(trace)
    for use in uses:
        facts.add_row("attention" if use is uses[0] else "", Text(use.text))
    for note in fallbacks(trace):
        facts.add_row("", Text(note, style=_BAD))
    for name, words in circumstances(trace):
        if name != "hardware":  # the card has a line of its own above
            facts.add_row(name, Text(words))
    size = f"{format_count(trace.num_parameters)} parameters{_weight_types(trace)}"
    title = Text.assemble((trace.model, "bold"), f"  {size}, {trace.origin}")
    return Panel(facts, title=title, title_align="left", expand=False, padding=(1, 2))


def category_table(trace: StepTrace) -> Table:
    """Bytes by category at the peak, with bar and share; the last row is their sum."""
    table = titled_table("At the peak, by category", "category", ">bytes", ">share", "")
    at_peak, whole = trace.at_peak, max(trace.peak_bytes, 1)
    for category in STACK_ORDER:
        size = at_peak[category]
        name = Text("■ ", style=COLOURS[category]) + Text(category.value, style="default")
        bar = Bar(size=whole, begin=0, end=size, width=_BAR_WIDTH, color=COLOURS[category])
        table.add_row(name, format_bytes(size), f"{size / whole:.1%}", bar)
    table.add_section()
    table.add_row("sum", format_bytes(sum(at_peak.values())), "", "", style="bold")
    return table


def phase_table(trace: StepTrace) -> Table:
    """The highest allocated bytes of each phase; the peak's phase is marked."""
    table = titled_table("Highest in each phase", "phase", ">bytes", ">of the peak", "")
    whole = max(trace.peak_bytes, 1)
    for phase, size in trace.phase_peaks().items():
        at_peak = trace.peak_event >= 0 and phase is trace.peak_phase
        name = Text(phase.value + (" ◀ peak" if at_peak else ""), style=f"bold {PEAK_COLOUR}" if at_peak else "")
        bar = Bar(size=whole, begin=0, end=size, width=_BAR_WIDTH, color=PEAK_COLOUR if at_peak else "default")
        table.add_row(name, format_bytes(size), f"{size / whole:.1%}", bar)
    return table


def alive_table(trace: StepTrace, *, limit: int = 10) -> Table:
    """What is alive at the peak, equal tensors of equal layers counted together; rows sum to the peak."""
    table = titled_table("Alive at the peak, equal layers together", ">bytes", ">count", *_TENSOR_COLUMNS)
    groups = group_alive(trace, trace.peak_event)
    for group in groups[:limit]:
        table.add_row(format_bytes(group.bytes), f"{group.count}", *_tensor_cells(group))
    rest = groups[limit:]
    if rest:
        count, size = sum(group.count for group in rest), sum(group.bytes for group in rest)
        table.add_row(format_bytes(size), f"{count}", "", f"{len(rest)} smaller kinds", style=_QUIET)
    return table


def largest_table(trace: StepTrace, *, limit: int = 10) -> Table:
    """The largest single tensors alive at the peak, with where each comes from."""
    table = titled_table("Largest tensors at the peak", ">bytes", *_TENSOR_COLUMNS)
    for item in largest_alive(trace, trace.peak_event, limit):
        table.add_row(format_bytes(item.bytes), *_tensor_cells(item))
    return table


def comparison_table(rows: Iterable[Difference]) -> Table:
    """Predicted against observed."""
    table = titled_table("Predicted against observed", "", ">predicted", ">observed", ">error")
    for row in rows:
        error = "" if row.error is None else f"{row.error:+.2%}"
        table.add_row(row.what, format_bytes(row.predicted_bytes), format_bytes(row.observed_bytes), error)
    return table


def what_if_table(rows: Sequence[WhatIfRow]) -> Group:
    """What each technique would do to the peak, and below it why: reasons are sentences and want the whole width."""
    table = titled_table("What would lower the peak", "technique", ">before", ">after", ">saves")
    for row in rows:
        saved = Text(saving(row))
        saved.stylize(_GOOD if row.saved_bytes > 0 else _BAD if row.saved_bytes < 0 else _QUIET)
        table.add_row(Text(row.technique), format_bytes(row.before_bytes), format_bytes(row.after_bytes), saved)
    return Group(table, "", *(Text.assemble((row.technique, "bold"), f": {row.reason}") for row in rows))


def notes(lines: Sequence[str]) -> Panel:
    """What the reader must know about how the trace was made."""
    text = Text("\n").join(Text(f"• {line}") for line in lines)
    return Panel(text, title="Notes", title_align="left", expand=False, border_style=_QUIET)


_TENSOR_COLUMNS = ("<category", "<tensor", "made by")


def _tensor_cells(item: AliveGroup | Allocation) -> tuple[Text, Text, Text]:
    # Module, op and line share a column, because as three they are unreadable in 80 characters.
    made_by = Text.assemble(item.module or "(outside the model)", " ", item.op, " ", (item.source, _QUIET))
    return (
        Text(item.category.value, style=COLOURS[item.category]),
        Text(f"{list(item.shape)} {item.dtype}"),
        made_by,
    )


def _fit_line(trace: StepTrace) -> Text:
    card, fit = trace.target.card, fit_of(trace)
    if fit is None:
        return Text(f"{card}, memory not known")
    line = Text(f"{card}, {format_bytes(fit.capacity_bytes)}: ")
    return line.append(fit.verdict, style=_GOOD if fit.fits else _BAD)
