"""`write_report`: records of runs to files that people read; the report as markdown, for a README or an issue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lowtide.errors import ConfigError
from lowtide.lab.budget import BudgetSweep, reversals
from lowtide.lab.record import RunRecord
from lowtide.lab.report.charts import panel_of
from lowtide.lab.report.comparison import Comparison, LabReport, fastest_words, make_report, provenance, remarks
from lowtide.lab.report.html import render_html
from lowtide.lab.report.rows import alike_endings, error_line
from lowtide.lab.report.tables import breakdown_table, perplexity_table, published_table, result_table, sweep_table
from lowtide.report.table import escape_markdown as escape
from lowtide.report.table import to_markdown


def write_report(
    records: Sequence[RunRecord],
    *,
    html: Path | None,
    markdown: Path | None,
    png: Path | None,
    skipped: Sequence[str] = (),
    sweeps: Sequence[BudgetSweep] = (),
    with_older: bool = False,
) -> LabReport:
    """Write the report in each form that has a path; folders are made.

    Args:
        records: Of runs that finished and of those that did not: both are results.
        html: One self-contained page.
        markdown: Tables for a README or an issue.
        png: Charts as one picture; a name that ends in `.pdf` or `.svg` gives vectors.
        skipped: Files that could not be read, a line each with the reason.
        sweeps: Sweeps of torch's activation budget, shown on the page and in the markdown.
        with_older: Whether runs that a newer one of the same configuration and seed replaces get rows too.

    Raises:
        ConfigError: There is neither a record nor a sweep, no path, a picture of sweeps alone, or the picture's name ends in no
            known format.
    """
    if html is None and markdown is None and png is None:
        raise ConfigError("there is nothing to write: give a path for html, markdown or png")
    if not records and not sweeps:
        lost = f"; {len(skipped)} files were skipped: {'; '.join(skipped)}" if skipped else ""
        raise ConfigError(f"a report needs at least one record of a run, or a sweep, got none{lost}")
    if not records and png is not None:
        raise ConfigError("a picture shows runs, and there is no record of one; leave png out, or run some", key="png")
    if png is not None:
        from lowtide.report.figures import figure_path  # matplotlib takes a second to import

        figure_path(png)  # before anything is written: a wrong name is found at once
    report = make_report(records, skipped=skipped, sweeps=sweeps, with_older=with_older)
    for path, render in ((html, render_html), (markdown, render_markdown)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(render(report), encoding="utf-8")
    if png is not None:
        from lowtide.report.figures import save_panels

        save_panels([panel_of(comparison) for comparison in report.comparisons], png, title=report.title)
    return report


def render_markdown(report: LabReport) -> str:
    """The whole report as text."""
    parts = [f"# {escape(report.title)}"]
    for comparison in report.comparisons:
        parts += [f"## {escape(comparison.title)}"] if len(report.comparisons) > 1 else []
        parts += _comparison(comparison)
    parts += ["## Memory budget sweep"] if report.sweeps else []
    for sweep in report.sweeps:
        beaten = "\n".join(f"- {escape(reversal.words)}" for reversal in reversals(sweep.points))
        verdict = beaten or "No smaller budget has a larger peak."
        parts += [f"### {escape(sweep.title)}", to_markdown(sweep_table(sweep)), verdict]
    parts.append("## Where the figures come from")
    parts.append("\n".join(f"- {name}: {escape(value)}" for name, value in provenance(report)))
    if report.skipped:
        parts += ["## Skipped files", "\n".join(f"- {escape(line)}" for line in report.skipped)]
    return "\n\n".join(parts) + "\n"


def _comparison(comparison: Comparison) -> list[str]:
    kind = " after warm-up" if comparison.is_warm else ""
    front = f"In bold: no other row is as small and as fast{kind}."
    if not comparison.front:
        front = "No finished row has both a peak and a speed, so that there is no front."
    parts = [to_markdown(result_table(comparison)), f"{escape(comparison.control_words)} {front}"]
    if words := fastest_words(comparison):
        parts.append(escape(words))
    for make_table in (published_table, perplexity_table, breakdown_table):
        if (table := make_table(comparison)) is not None:
            parts += [f"### {table.caption}", to_markdown(table)]
            if make_table is published_table:
                parts.append(escape(comparison.sources))
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
