"""`write_report`: records of runs to files that people read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lowtide.errors import ConfigError
from lowtide.lab.budget import BudgetSweep
from lowtide.lab.record import RunRecord
from lowtide.lab.records import newest_records
from lowtide.lab.report.charts import panel_of
from lowtide.lab.report.comparison import Comparison, make_comparisons
from lowtide.lab.report.html import render_html
from lowtide.lab.report.markdown import render_markdown
from lowtide.lab.report.sentences import report_title


def write_report(
    records: Sequence[RunRecord],
    *,
    html: Path | None,
    markdown: Path | None,
    png: Path | None,
    skipped: Sequence[str] = (),
    sweeps: Sequence[BudgetSweep] = (),
    with_older: bool = False,
) -> tuple[Comparison, ...]:
    """Write the report in each form that has a path; folders are made. Returns what was compared.

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
    comparisons = make_comparisons(records, with_older=with_older)
    # What the figures were made with is said of those that count.
    counted = records if with_older else newest_records(records)
    num_older = len(records) - len(counted)
    title = report_title(
        [row for comparison in comparisons for row in comparison.rows], [sweep.model for sweep in sweeps]
    )
    if html is not None:
        _write(
            html, render_html(comparisons, counted, title=title, skipped=skipped, sweeps=sweeps, num_older=num_older)
        )
    if markdown is not None:
        _write(
            markdown,
            render_markdown(comparisons, counted, title=title, skipped=skipped, sweeps=sweeps, num_older=num_older),
        )
    if png is not None:
        from lowtide.report.figures import save_panels

        save_panels([panel_of(comparison) for comparison in comparisons], png, title=title)
    return comparisons


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
