"""`lowtide check`: a recipe trained plainly and under management, side by side, here or on several ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator

import typer
from rich.text import Text

from lowtide.cli.console import OUT, progress
from lowtide.lab.check import CheckReport, run_check
from lowtide.lab.check_ranks import Gap, RanksReport, run_check_on_ranks
from lowtide.lab.recipe_file import find_recipe, read_recipe
from lowtide.report.table import Table, Tone, Value, make_table, number, words
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


def run_ranks_check_command(name: str, overrides: list[str], num_ranks: int, *, as_json: bool) -> None:
    """The same, the managed run on several ranks."""
    recipe = read_recipe(find_recipe(name), overrides)
    with progress(f"checking {recipe.model}") as on_progress:
        report = run_check_on_ranks(recipe, num_ranks, on_progress)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        OUT.print(loss_table(report.runs, num_ranks))
        OUT.print(tier_table(report.runs, "Rank 0's memory"))
        OUT.print(gap_table(report))
        OUT.print(ranks_verdict(report))
    if not report.passed:
        raise typer.Exit(1)


def loss_table(report: CheckReport, num_ranks: int | None = None) -> Table:
    """Both losses of each step and whether they are the same; of a long run its two ends and the first difference."""
    where = "emulated device" if report.stats.is_emulated else report.device
    tone = Tone.BAD
    if num_ranks is not None:
        where = f"{num_ranks} ranks, {'emulated' if report.stats.is_emulated else report.device}"
        # Another order of a sum is no fault; the table of differences says whether it is.
        tone = Tone.QUIET
    rows = [
        [Value("…", tone=Tone.QUIET)] * 4 if step is None else _losses(report, step, tone)
        for step in shown_steps(len(report.plain_losses), report.first_differing_step)
    ]
    return make_table(
        f"{report.recipe.model}, {report.recipe.dtype}, {where}",
        rows,
        number("step", lambda row: row[0]),
        number("plain loss", lambda row: row[1]),
        number("managed loss" if num_ranks is None else "loss of the ranks", lambda row: row[2]),
        words("equal", lambda row: row[3]),
    )


def _losses(report: CheckReport, step: int, tone: Tone) -> list[Value]:
    plain, managed = report.plain_losses[step], report.managed_losses[step]
    equal = Value("yes", tone=Tone.GOOD) if plain == managed else Value(f"by {abs(plain - managed):.3g}", tone=tone)
    # Nine digits tell any two fp32 numbers apart.
    return [Value(str(step + 1)), Value(f"{plain:.9g}"), Value(f"{managed:.9g}"), equal]


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


def tier_table(report: CheckReport, title: str = "The managed run's memory") -> Table:
    """The managed run's peak in each tier, and its budget."""
    kept = {True: Value("yes", tone=Tone.GOOD), False: Value("NO", tone=Tone.BAD), None: Value("")}
    return make_table(
        title,
        report.stats.tiers,
        words("tier", lambda tier: tier.tier),
        number("peak", lambda tier: format_bytes(tier.peak_bytes)),
        number("budget", lambda tier: "none" if tier.budget_bytes is None else format_bytes(tier.budget_bytes)),
        words("kept", lambda tier: kept[tier.is_within_budget]),
    )


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


def gap_table(report: RanksReport) -> Table:
    """What is furthest apart, as shares of the loss and of the tensor's norm."""
    kinds = {"losses": report.loss, "weights": report.weight}

    def share(value: float, gap: Gap) -> str:
        return f"{value / gap.size if value and gap.size else value:.2g}"

    return make_table(
        "The largest differences, as shares",
        [*kinds.items()],
        words("of", lambda row: row[0]),
        number("found", lambda row: Value(share(row[1].difference, row[1]), tone=_tone(row[1]))),
        number("allowed", lambda row: share(row[1].allowed, row[1])),
        number("by rounding", lambda row: share(row[1].by_rounding, row[1])),
        words("in", lambda row: row[1].where if row[1].difference else "none"),
    )


def _tone(gap: Gap) -> Tone:
    return Tone.GOOD if gap.is_allowed else Tone.BAD


def ranks_verdict(report: RanksReport) -> Text:
    """The tolerance, and one sentence."""
    what = f"{len(report.runs.plain_losses)} losses and all weights"
    one = f"of {report.num_ranks} ranks and of one process"
    if report.parted:
        ranks = ", ".join(map(str, report.parted))
        return Text(f"failed: the last weights of rank {ranks} are not those of rank 0", style="bold red")
    if report.runs.is_identical:
        return Text(f"passed: {what} {one} are the same, bit for bit", style="bold green")
    tolerance = f"the tolerance of {report.tolerance}"
    if report.passed:
        return Text(f"passed: {what} {one} differ within {tolerance}", style="green")
    return Text(
        f"failed: {what} {one} differ beyond {tolerance}; first {report.runs.first_difference}", style="bold red"
    )
