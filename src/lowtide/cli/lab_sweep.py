"""`lowtide lab sweep`: torch's activation memory budget against the peak, in seconds a point, without compiling."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from lowtide.cli.console import ERR, OUT, friendly_errors, progress, require_writable
from lowtide.errors import ConfigError
from lowtide.lab.budget import BudgetSweep, not_monotone, run_sweep, sweep_data, write_sweep
from lowtide.lab.progress import shown_bytes
from lowtide.lab.recipe_file import find_recipe, read_recipe
from lowtide.lab.records import SWEEPS

BUDGETS = "0,0.05,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1"


def sweep_command(
    name: Annotated[str, typer.Argument(help="a recipe: a name such as peak_memory/compile, or FILE.yaml")],
    budgets: Annotated[str, typer.Option(help="from 0 to 1, with commas")] = BUDGETS,
    set_: Annotated[list[str] | None, typer.Option("--set", help="batch=8x768, dtype=bfloat16, ...")] = None,
    out: Annotated[Path, typer.Option(help="folder that the sweep is written to, for `lab report`")] = Path(
        "lowtide-lab"
    ),
    json_: Annotated[bool, typer.Option("--json", help="machine-readable on the standard output")] = False,
) -> None:
    """What torch's activation budget saves and costs for a recipe's model, compiled as a whole; no GPU is needed."""
    with friendly_errors():
        require_writable("--out", [out], are_folders=True)
        recipe = read_recipe(find_recipe(name), set_ or [])
        with progress(f"sweeping the budget of {recipe.model}") as say:
            sweep = run_sweep(recipe, parse_budgets(budgets), on_progress=lambda told: say(told.words))
        path = out / SWEEPS / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', recipe.model)}_{recipe.dtype}_{sweep.batch}.json"
        write_sweep(sweep, path)
        if json_:
            print(json.dumps(sweep_data(sweep), indent=2))
        else:
            OUT.print(sweep_table(sweep))
            for rise in not_monotone(sweep.points):
                OUT.print(f"not monotone: {rise.words}", markup=False, highlight=False)
        ERR.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


def parse_budgets(text: str) -> list[float]:
    """The numbers of a list with commas.

    Example:
        >>> parse_budgets("0, 0.5,1")
        [0.0, 0.5, 1.0]

    Raises:
        ConfigError: One of them is no number.
    """
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"--budgets {text!r} is no list of numbers such as 0,0.5,1", key="budgets") from None


def sweep_table(sweep: BudgetSweep) -> Table:
    """The points for people."""
    table = Table(title=f"{sweep.model}, {sweep.batch}, {sweep.dtype}, torch {sweep.torch}", title_justify="left")
    for heading in ("budget", "saved", "peak", "peak unfused", "recomputed", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in sweep.points:
        table.add_row(
            f"{point.budget:g}",
            shown_bytes(point.saved_bytes),
            shown_bytes(point.peak_bytes),
            shown_bytes(point.unfused_peak_bytes),
            f"{100 * point.recomputed_flops_share:.1f}%",
            f"{point.seconds:.1f}",
        )
    return table
