"""Benchmark records: what they say of the machine, how they are read, and tables of their numbers."""

from __future__ import annotations

import json
import subprocess
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowtide.errors import BadRecordError
from lowtide.hardware.machine import this_machine
from lowtide.units import GiB

RESULTS = Path(__file__).resolve().parent / "results"
WIDTH = 100
"""Columns of the text in Markdown files."""


def machine() -> dict[str, object]:
    """The host of a measurement, for its record: `processor`, `memory_bytes` and the GPU's `driver`."""
    return asdict(this_machine())


def checkout() -> str:
    """The commit of this checkout, and whether it was changed since."""
    git = ["git", "-C", str(RESULTS), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


@dataclass(frozen=True, kw_only=True)
class Record:
    """One results file: where it lies and what it says."""

    path: Path
    content: dict[str, object]

    def text(self, key: str) -> str:
        """A field as text; hardware may be given as a mapping, whose `name` is shown."""
        value = _get(self.content, key, self.path)
        return str(_get(value, "name", self.path)) if isinstance(value, dict) else str(value)

    def rows(self, key: str, fields: Iterable[str]) -> list[dict[str, object]]:
        """The mappings listed under a key, each of which must have all the fields."""
        rows = _get(self.content, key, self.path)
        if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
            raise BadRecordError(f"{self.path}: {key!r} must be a list of mappings with at least one; run it again")
        for row in rows:
            for field in fields:
                _get(row, field, self.path)
        return rows

    @property
    def name(self) -> str:
        """Its folder and file below `benchmarks/results`: `accuracy/2026-11-18T0256_h200_dc9351e`."""
        return f"{self.path.parent.name}/{self.path.stem}"


def newest(folder: Path, schema: str, files: str = "*") -> Record:
    """The record with the latest date in a folder, or among its files of a pattern.

    Raises:
        BadRecordError: There is none, or one of them is not JSON or has another schema.
    """
    return _by_date(folder, schema, files)[-1]


def newest_rows(folder: Path, schema: str, *files: str) -> dict[str, tuple[dict[str, Any], Record]]:
    """Rows by name, each from the newest record that has it without a failure: a suite may be run in parts.

    Args:
        folder: Where the records are.
        schema: Which all of them have.
        files: Patterns of the names of those that count.

    Raises:
        BadRecordError: There is no record, or one of them is bad.
    """
    found: dict[str, tuple[dict[str, Any], Record]] = {}
    for record in _by_date(folder, schema, *files):
        for row in record.rows("rows", ("name",)):
            if "failed" not in row or str(row["name"]) not in found:
                found[str(row["name"])] = (row, record)
    return found


def _by_date(folder: Path, schema: str, *files: str) -> list[Record]:
    """Records of a folder, the oldest first; the file name decides between equal dates."""
    records = [read(path, schema) for pattern in files for path in folder.glob(f"{pattern}.json")]
    if not records:
        names = "" if files == ("*",) else f" named {' or '.join(files)}"
        raise BadRecordError(f"there are no records{names} in {folder}; run the benchmark before its table is rendered")
    return sorted(records, key=lambda record: (record.text("date"), record.path.name))


def row_of_the_run(record: Record, beginning: str) -> dict[str, Any] | None:
    """The first row of a record whose name begins so, and did not fail: what other rows of the same run are compared with.

    A machine is faster in one hour than in another; rows of one run met the same.
    """
    for row in record.rows("rows", ("name",)):
        if str(row["name"]).startswith(beginning) and "failed" not in row:
            return row
    return None


def sources(records: Iterable[Record], remark: str = "") -> str:
    """The footnote below a table: the names of its records, by what they were measured with, and a remark."""
    names: dict[str, list[str]] = {}
    for record in records:
        known = names.setdefault(f"{record.text('hardware')}, torch {record.text('torch')}", [])
        if record.name not in known:
            known.append(record.name)
    said = "; ".join(f"{machine}: {', '.join(f'`{name}`' for name in own)}" for machine, own in names.items())
    return footnote(f"Records. {said}. {remark}")


def footnote(text: str) -> str:
    """Small print below a table, in lines of the documentation's width."""
    return textwrap.fill(f"<sub>{text.strip()}</sub>", width=WIDTH, break_long_words=False, break_on_hyphens=False)


def read(path: Path, schema: str) -> Record:
    """One record; raises `BadRecordError` where it is not one of this schema."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadRecordError(f"{path} is not JSON: {error}; run the benchmark again") from error
    found = content.get("schema") if isinstance(content, dict) else None
    if found != schema:
        raise BadRecordError(
            f"{path} has the schema {found!r}, this renderer reads {schema!r}; run the benchmark again"
        )
    return Record(path=path, content=content)


def _get(mapping: object, key: str, path: Path) -> object:
    if not isinstance(mapping, dict) or key not in mapping:
        name = mapping.get("name") if isinstance(mapping, dict) else None
        raise BadRecordError(f"{path}: {f'{name!r} has' if name else 'there is'} no {key!r}; run the benchmark again")
    return mapping[key]


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, num_text: int) -> str:
    """A Markdown table whose first `num_text` columns are text and the others numbers, aligned to the right."""
    rule = ["---" if column < num_text else "---:" for column in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def gib(num_bytes: float) -> str:
    """Bytes as GiB, without the unit, which the column's header carries."""
    return f"{num_bytes / GiB:.3f}"


def percent(error: float) -> str:
    """A signed share, with no minus before a zero."""
    return f"{round(100 * error, 2) + 0.0:+.2f}%"
