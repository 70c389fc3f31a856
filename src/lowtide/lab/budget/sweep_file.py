"""A sweep as one JSON file."""

from __future__ import annotations

import json
from pathlib import Path

from lowtide import config
from lowtide.errors import BadRecordError, ConfigError
from lowtide.lab.budget.sweep import BudgetSweep
from lowtide.plain_text import Plain

SCHEMA = "lowtide.budget_sweep/1"


def sweep_data(sweep: BudgetSweep) -> dict[str, Plain]:
    """What a file of it holds."""
    return {"schema": SCHEMA, **config.to_plain(sweep)}


def write_sweep(sweep: BudgetSweep, path: Path) -> None:
    """Write a sweep, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(json.dumps(sweep_data(sweep), indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def read_sweep(path: Path) -> BudgetSweep:
    """The sweep of a file.

    Raises:
        BadRecordError: It cannot be read, is no JSON, is of another kind, or lacks something; the path is in the message.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadRecordError(f"{path}: cannot be read as JSON: {error}") from error
    found = plain.pop("schema", None) if isinstance(plain, dict) else type(plain).__name__
    if found != SCHEMA:
        raise BadRecordError(f"{path}: the schema is {found!r}, not {SCHEMA!r}")
    try:
        return config.from_plain(BudgetSweep, plain)
    except ConfigError as error:
        raise BadRecordError(f"{path}: {error}") from error
