"""A sweep as one JSON file."""

from __future__ import annotations

from pathlib import Path

from lowtide import config
from lowtide.errors import BadRecordError, ConfigError
from lowtide.lab.budget.sweep import BudgetSweep
from lowtide.lab.json_file import read_json, write_json
from lowtide.plain_text import Plain

SCHEMA = "lowtide.budget_sweep/1"


def sweep_data(sweep: BudgetSweep) -> dict[str, Plain]:
    """What a file of it holds."""
    return {"schema": SCHEMA, **config.to_plain(sweep)}


def write_sweep(sweep: BudgetSweep, path: Path) -> None:
    """Write a sweep, whole or not at all."""
    write_json(path, sweep_data(sweep))


def read_sweep(path: Path) -> BudgetSweep:
    """The sweep of a file.

    Raises:
        BadRecordError: It cannot be read, is no JSON, is of another kind, or lacks something; the path is in the message.
    """
    plain = read_json(path, SCHEMA)
    try:
        sweep = config.from_plain(BudgetSweep, plain)
    except ConfigError as error:
        raise BadRecordError(f"{path}: {error}") from error
    if not sweep.points:
        raise BadRecordError(f"{path}: the sweep has no points")
    return sweep
