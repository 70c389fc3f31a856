"""The report as markdown, for a README or an issue."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lowtide.lab.record import RunRecord
from lowtide.lab.report.byte_unit import byte_unit
from lowtide.lab.report.comparison import Comparison
from lowtide.lab.report.error_words import error_line
from lowtide.lab.report.fastest import fastest_words
from lowtide.lab.report.provenance import provenance, remarks
from lowtide.lab.report.rows import alike_endings
from lowtide.lab.report.sweep import Sweep
from lowtide.lab.report.tables import Column, Table, breakdown_table, moments_table, published_table, result_table


def render_markdown(
    comparisons: Sequence[Comparison],
    records: Sequence[RunRecord],
    *,
    title: str,
    skipped: Sequence[str] = (),
    sweeps: Sequence[Sweep] = (),
    num_older: int = 0,
) -> str:
    """The whole report as text."""
    parts = [f"# {escape(title)}"]
    for comparison in comparisons:
        parts += _comparison(comparison, has_title=len(comparisons) > 1)
    if sweeps:
        parts.append("## Memory budget sweep")
    for sweep in sweeps:
        parts += _sweep(sweep)
    parts.append("## Where the figures come from")
    parts.append("\n".join(f"- {name}: {escape(value)}" for name, value in provenance(records, num_older)))
    if skipped:
        parts += ["## Skipped files", "\n".join(f"- {escape(line)}" for line in skipped)]
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    r"""Plain text that markdown takes as it is, on one line, in a table or elsewhere.

    Example:
        >>> print(escape("a|b *c* bf16_fused _d_"))
        a\|b \*c\* bf16_fused \_d\_
    """
    # An underscore within a word marks nothing, and names read better without backslashes.
    return re.sub(r"([\\`*\[\]<>|~$&]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(text.split()))


def _comparison(comparison: Comparison, *, has_title: bool) -> list[str]:
    parts = [f"## {escape(comparison.title)}"] if has_title else []
    parts += _table(result_table(comparison), comparison)
    parts.append(escape(comparison.control_words) + _front_words(comparison))
    if words := fastest_words(comparison):
        parts.append(escape(words))
    if (published := published_table(comparison)) is not None:
        parts += [f"### {published.caption}", *_table(published, comparison)]
        sources = dict.fromkeys(row.published.source for row in published.rows if row.published)
        parts.append(f"Published: {escape('; '.join(sources))}.")
    if (moments := moments_table(comparison)) is not None:
        parts += [f"### {moments.caption}", *_table(moments, comparison)]
    if (breakdown := breakdown_table(comparison)) is not None:
        parts += [f"### {breakdown.caption}", *_table(breakdown, comparison)]
    endings = [
        f"- {escape(row.label)}, {seeds}: {ending.outcome}"
        + (f": {escape(error_line(ending.message))}" if ending.message else "")
        for row in comparison.rows
        for seeds, ending in alike_endings(row)
    ]
    if endings:
        parts += ["### Runs that did not finish", "\n".join(endings)]
    if lines := remarks(comparison):
        parts += ["### Notes", "\n".join(f"- {escape(line)}" for line in lines)]
    return parts


def _table(table: Table, comparison: Comparison) -> list[str]:
    heads = ["configuration", *(column.head for column in table.columns)]
    rules = ["---", *("---:" if column.is_number else "---" for column in table.columns)]
    lines = [_line(heads), _line(rules)]
    for index, row in enumerate(table.rows):
        name = escape(row.label)
        cells = [f"**{name}**" if row in comparison.front else name]
        lines.append(_line([*cells, *(_cell(column, index) for column in table.columns)]))
    legend = [f"- {column.head}: {escape(column.legend)}" for column in table.columns if column.legend]
    return ["\n".join(lines), *(["\n".join(legend)] if legend else [])]


def _cell(column: Column, index: int) -> str:
    value = column.values[index]
    if value is None:
        return ""
    return escape(f"{value.text} ({value.detail})" if value.detail else value.text)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _front_words(comparison: Comparison) -> str:
    if not comparison.front:
        return " No finished row has both a peak and a speed, so that there is no front."
    kind = " after warm-up" if comparison.is_warm else ""
    return f" In bold: no other row is as small and as fast{kind}."


def _sweep(sweep: Sweep) -> list[str]:
    unit = byte_unit(max(point.peak_bytes for point in sweep.points))
    marked = {id(reversal.point) for reversal in sweep.reversals}
    lines = [
        _line(["budget", f"saved, {unit.name}", f"peak, {unit.name}", "recomputed", "kind"]),
        _line(["---:", "---:", "---:", "---:", "---"]),
    ]
    for point in sweep.points:
        peak = unit.text(point.peak_bytes)
        cells = [f"{point.budget:g}", unit.text(point.saved_bytes), f"**{peak}**" if id(point) in marked else peak]
        lines.append(_line([*cells, f"{point.recomputed_flops_share:.1%}", point.kind]))
    words = [f"- {escape(reversal.words)}" for reversal in sweep.reversals]
    monotone = "No smaller budget has a larger peak."
    return [f"### {escape(sweep.title)}", "\n".join(lines), "\n".join(words) if words else monotone]
