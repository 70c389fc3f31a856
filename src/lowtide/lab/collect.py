"""The records and sweeps of folders, read whole; what cannot be read is named and left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import BadRecordError, ConfigError
from lowtide.lab.budget import BudgetSweep, read_sweep
from lowtide.lab.record import RunRecord, read_record

SWEEPS = "sweeps"
"""The folder that sweeps are written to, beside that of the records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What was found."""

    records: tuple[RunRecord, ...]
    """In the order of the places given, and of their paths in each."""
    sweeps: tuple[BudgetSweep, ...]
    """Sweeps of torch's activation budget, in the same order."""
    skipped: tuple[str, ...]
    """One sentence for each file that is neither, with its path."""


def collect(places: Sequence[Path], on_progress: Callable[[str], None] | None = None) -> Collection:
    """The records and sweeps below each place, a folder that they were written to or one file; each file once.

    Raises:
        ConfigError: A place does not exist, or neither is in any of them.
    """
    say = on_progress or (lambda _: None)
    records: list[RunRecord] = []
    sweeps: list[BudgetSweep] = []
    skipped: list[str] = []
    files = dict.fromkeys(file for place in places for file in _files(place))
    for number, file in enumerate(files, start=1):
        say(f"record {number} of {len(files)}")
        read = _read(file)
        if isinstance(read, RunRecord):
            records.append(read)
        elif isinstance(read, BudgetSweep):
            sweeps.append(read)
        else:
            skipped.append(read)
    if not records and not sweeps:
        where = ", ".join(str(place) for place in places)
        what = f"no record could be read ({'; '.join(skipped)})" if skipped else "there are no records and no sweeps"
        raise ConfigError(f"{what} in {where}; `lowtide lab run NAME` makes some")
    return Collection(records=tuple(records), sweeps=tuple(sweeps), skipped=tuple(skipped))


def _read(file: Path) -> RunRecord | BudgetSweep | str:
    """Whichever it is, wherever it lies: a recipe may be called sweeps too. Of what is neither, why."""
    try:
        return read_record(file)
    except BadRecordError as no_record:
        try:
            return read_sweep(file)
        except BadRecordError as no_sweep:
            return str(no_sweep if file.parent.name == SWEEPS else no_record)


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place.resolve()]
    if not place.is_dir():
        raise ConfigError(f"there is no folder {str(place)!r}; `lowtide lab run NAME` makes one with records")
    # The runner's folder has other things beside its records, some of them JSON perhaps.
    inside = place / "records" if (place / "records").is_dir() else place
    return sorted({file.resolve() for folder in (inside, place / SWEEPS) for file in folder.rglob("*.json")})
