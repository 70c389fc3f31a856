"""`lowtide check`: a recipe trained plainly and under management, side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator

import typer
from rich.table import Table
from rich.text import Text

from lowtide.cli.console import OUT, progress
from lowtide.lab.check import CheckReport, run_check
from lowtide.lab.recipe_file import find_recipe, read_recipe
from lowtide.runtime.session_stats import TierRow
from lowtide.units import format_bytes

MAX_ROWS = 24
"""Steps that the table shows; `--json` has them all."""


def run_check_command(name: str, overrides: list[str], *, as_json: bool) -> None:
    """Check a recipe, print what was found, and exit with 1 on a difference beyond its tolerance."""
    recipe = read_recipe(find_recipe(name), overrides)
    with progress(f"checking {recipe.model}") as on_progress:
        report = run_check(recipe, on_progress)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        OUT.print(loss_table(report))
        OUT.print(tier_table(report))
        OUT.print(verdict(report))
    if not report.passed:
        raise typer.Exit(1)


def loss_table(report: CheckReport) -> Table:
    """Both losses of each step and whether they are the same; of a long run its two ends and the first difference."""
    where = "emulated device" if report.stats.is_emulated else report.device
    table = Table(title=f"{report.recipe.model}, {report.recipe.dtype}, {where}", title_justify="left")
    for heading in ("step", "plain loss", "managed loss", "equal"):
        table.add_column(heading, justify="right" if heading != "equal" else "left")
    for step in shown_steps(len(report.plain_losses), report.first_differing_step):
        if step is None:
            table.add_row("…", "…", "…", "…", style="dim")
            continue
        plain, managed = report.plain_losses[step], report.managed_losses[step]
        equal = Text("yes", style="green") if plain == managed else Text(f"by {abs(plain - managed):.3g}", style="red")
        # Nine digits tell any two fp32 numbers apart.
        table.add_row(str(step + 1), f"{plain:.9g}", f"{managed:.9g}", equal)
    return table


def shown_steps(num_steps: int, first_differing: int | None, limit: int = MAX_ROWS) -> Iterator[int | None]:
    """Steps to show, in order, None where some are left out."""
    half = limit // 2
    chosen = {step for step in range(num_steps) if num_steps <= limit or step < half or step >= num_steps - half}
    if first_differing is not None:
        chosen.add(first_differing)
    last = -1
    for step in sorted(chosen):
        if step > last + 1:
            yield None
        yield step
        last = step


def tier_table(report: CheckReport) -> Table:
    """The managed run's peak in each tier, beside its budget."""
    table = Table(title="The managed run's memory", title_justify="left")
    for heading in ("tier", "peak", "budget", "kept"):
        table.add_column(heading, justify="right" if heading in ("peak", "budget") else "left")
    for tier in report.stats.tiers:
        budget = "none" if tier.budget_bytes is None else format_bytes(tier.budget_bytes)
        table.add_row(tier.tier, format_bytes(tier.peak_bytes), budget, _kept(tier))
    return table


def _kept(tier: TierRow) -> Text:
    if tier.is_within_budget is None:
        return Text("")
    return Text("yes", style="green") if tier.is_within_budget else Text("NO", style="bold red")


def verdict(report: CheckReport) -> Text:
    """One sentence: the same, close enough, or different, and by how much."""
    what = f"{len(report.plain_losses)} losses and all weights"
    if report.is_identical:
        return Text(f"passed: {what} are the same, bit for bit", style="bold green")
    differences = (
        f"losses differ by at most {report.max_loss_difference:.3g}, weights by at most "
        f"{report.max_weight_difference:.3g}; first {report.first_difference}"
    )
    if report.passed:
        return Text(f"passed: within the tolerance of {report.tolerance:.3g}: {differences}", style="green")
    return Text(f"failed: beyond the tolerance of {report.tolerance:.3g}: {differences}", style="bold red")
