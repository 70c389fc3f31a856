"""The report as markdown, for a README or an issue."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.lab.budget import BudgetSweep, reversals
from lowtide.lab.record import RunRecord
from lowtide.lab.report.comparison import Comparison
from lowtide.lab.report.rows import alike_endings, error_line
from lowtide.lab.report.sentences import fastest_words, provenance, remarks
from lowtide.lab.report.tables import breakdown_table, perplexity_table, published_table, result_table, sweep_table
from lowtide.report.table import escape_markdown as escape
from lowtide.report.table import to_markdown


def render_markdown(
    comparisons: Sequence[Comparison],
    records: Sequence[RunRecord],
    *,
    title: str,
    skipped: Sequence[str] = (),
    sweeps: Sequence[BudgetSweep] = (),
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


def _comparison(comparison: Comparison, *, has_title: bool) -> list[str]:
    parts = [f"## {escape(comparison.title)}"] if has_title else []
    parts.append(to_markdown(result_table(comparison)))
    parts.append(escape(comparison.control_words) + _front_words(comparison))
    if words := fastest_words(comparison):
        parts.append(escape(words))
    if (published := published_table(comparison)) is not None:
        parts += [f"### {published.caption}", to_markdown(published)]
        sources = dict.fromkeys(row.published.source for row in comparison.rows if row.published)
        parts.append(f"Published: {escape('; '.join(sources))}.")
    if (perplexities := perplexity_table(comparison)) is not None:
        parts += [f"### {perplexities.caption}", to_markdown(perplexities)]
    if (breakdown := breakdown_table(comparison)) is not None:
        parts += [f"### {breakdown.caption}", to_markdown(breakdown)]
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


def _front_words(comparison: Comparison) -> str:
    if not comparison.front:
        return " No finished row has both a peak and a speed, so that there is no front."
    kind = " after warm-up" if comparison.is_warm else ""
    return f" In bold: no other row is as small and as fast{kind}."


def _sweep(sweep: BudgetSweep) -> list[str]:
    beaten = [f"- {escape(reversal.words)}" for reversal in reversals(sweep.points)]
    verdict = "\n".join(beaten) if beaten else "No smaller budget has a larger peak."
    return [f"### {escape(sweep.title)}", to_markdown(sweep_table(sweep)), verdict]
