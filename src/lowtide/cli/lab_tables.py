"""Predictions and ended runs as rows: plain ones for scripts, tables for people."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from lowtide.cli.lab_display import STYLES
from lowtide.cli.lab_prediction import Prediction
from lowtide.hardware import Hardware
from lowtide.lab.progress import shown_bytes
from lowtide.lab.record import RunRecord
from lowtide.lab.runner import EndedRun
from lowtide.plain_text import Plain
from lowtide.report.terminal_table import titled_table
from lowtide.units import format_bytes


def prediction_table(predictions: Mapping[str, Prediction], card: Hardware) -> Table:
    """What recipes need on a card, the smallest peak first; those that are not predicted are not in it."""
    title = f"predicted on {card.name}, {format_bytes(card.memory_bytes)}"
    table = titled_table(title, "recipe", ">peak", ">reserved", "<in", "<fits")
    predicted = [(name, each, each.figures) for name, each in predictions.items() if each.figures is not None]
    for name, prediction, figures in sorted(predicted, key=lambda row: row[2].peak_bytes):
        reserved_bytes = figures.reserved_bytes or figures.peak_bytes
        table.add_row(
            Text(name),
            shown_bytes(figures.peak_bytes),
            shown_bytes(reserved_bytes),
            figures.peak_phase,
            _fits(prediction, reserved_bytes + card.context_bytes, figures.peak_bytes + card.context_bytes, card),
        )
    return table


def _fits(prediction: Prediction, needed_bytes: int, least_bytes: int, card: Hardware) -> Text:
    if prediction.is_over:
        return Text(f"not its {prediction.budget}", style="red")
    if needed_bytes <= card.memory_bytes:
        return Text("yes", style="green")
    # What is cached can be given back, so that between the two it may.
    return Text("hardly", style="yellow") if least_bytes <= card.memory_bytes else Text("no", style="red")


def run_row(ended: EndedRun) -> dict[str, Plain]:
    """What a script needs of a run; everything else is in its record."""
    record = ended.record
    return {
        "name": ended.run.name,
        "seed": ended.run.recipe.seed,
        "outcome": str(record.outcome),
        "message": record.message,
        "peak_bytes": None if record.memory is None else record.memory.peak_bytes,
        "samples_per_s": _samples_per_s(record),
        "perplexity": perplexity(record),
        "record": str(ended.path),
    }


def _samples_per_s(record: RunRecord) -> float | None:
    speed = record.speed
    return speed.samples_per_s if speed is not None and speed.step_s and speed.is_alone else None


def perplexity(record: RunRecord) -> float | None:
    """Of the evaluation; None where there was none, or where it is beyond any number."""
    if record.evaluation_loss is None:
        return None
    try:
        return math.exp(record.evaluation_loss)
    except OverflowError:
        return None


def run_table(results: Sequence[EndedRun], folder: Path) -> Table:
    """All runs with their figures, by the folders of their recipes."""
    table = Table(caption=f"records are in {_short(folder / 'records')}/RECIPE", caption_justify="left")
    # Where there is no room for all, long names are broken: how a run ended is what is looked for.
    table.add_column("recipe", overflow="fold")
    table.add_column("seed", justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    for heading in ("peak", "samples/s", "perplexity"):
        table.add_column(heading, justify="right", no_wrap=True)
    for group_folder, group in itertools.groupby(results, key=lambda ended: ended.run.name.rpartition("/")[0]):
        table.add_section()
        if group_folder:
            table.add_row(Text(f"{group_folder}/", style="bold"))
        for ended in group:
            row = run_row(ended)
            table.add_row(
                Text(f"{'  ' if group_folder else ''}{ended.run.name.rpartition('/')[2]}"),
                str(ended.run.recipe.seed),
                Text(str(ended.record.outcome), style=STYLES[ended.record.outcome]),
                "" if ended.record.memory is None else shown_bytes(ended.record.memory.peak_bytes),
                _figure(row["samples_per_s"]),
                _figure(row["perplexity"]),
            )
    return table


def _figure(value: Plain) -> str:
    return f"{value:.4g}" if isinstance(value, float) else ""


def _short(path: Path) -> str:
    """From the current folder, where it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
