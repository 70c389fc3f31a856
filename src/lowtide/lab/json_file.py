"""A JSON file with a schema: written whole or not at all, and read with its path in every complaint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.errors import BadRecordError


def write_json(path: Path, plain: Mapping[str, object]) -> None:
    """Write a file in one piece, so that a run killed here leaves no half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def read_json(path: Path, schema: str) -> dict[str, Any]:
    """What a file holds beside its schema.

    Raises:
        BadRecordError: It cannot be read, is no JSON, or is of another schema; the path is in the message.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadRecordError(f"{path}: cannot be read as JSON: {error}") from error
    found = plain.pop("schema", None) if isinstance(plain, dict) else type(plain).__name__
    if not isinstance(plain, dict) or found != schema:
        raise BadRecordError(f"{path}: the schema is {found!r}, not {schema!r}")
    return plain
