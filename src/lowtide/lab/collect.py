"""The records of folders, read whole; what cannot be read is named and left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import BadRecordError, ConfigError
from lowtide.lab.budget import BudgetSweep, read_sweep
from lowtide.lab.record import RunRecord, read_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What was found."""

    records: tuple[RunRecord, ...]
    """In the order of the places given, and of their paths in each."""
    sweeps: tuple[BudgetSweep, ...]
    """Of torch's activation budget, from `sweeps` in each place."""
    skipped: tuple[str, ...]
    """One sentence for each file that is no record, with its path."""


def collect(places: Sequence[Path], on_progress: Callable[[str], None] | None = None) -> Collection:
    """The records below each place, a folder that runs were written to or one record's file; each file once.

    Raises:
        ConfigError: A place does not exist, or no record is in any of them.
    """
    say = on_progress or (lambda _: None)
    records, skipped = [], []
    files = dict.fromkeys(file for place in places for file in _files(place))
    for number, file in enumerate(files, start=1):
        say(f"record {number} of {len(files)}")
        try:
            records.append(read_record(file))
        except BadRecordError as error:
            skipped.append(str(error))
    if not records:
        where = ", ".join(str(place) for place in places)
        what = f"no record could be read ({'; '.join(skipped)})" if skipped else "there are no records"
        raise ConfigError(f"{what} in {where}; `lowtide lab run NAME` makes some")
    sweeps = []
    for file in dict.fromkeys(file for place in places for file in sorted((place / "sweeps").glob("*.json"))):
        try:
            sweeps.append(read_sweep(file))
        except BadRecordError as error:
            skipped.append(str(error))
    return Collection(records=tuple(records), sweeps=tuple(sweeps), skipped=tuple(skipped))


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place.resolve()]
    if not place.is_dir():
        raise ConfigError(f"there is no folder {str(place)!r}; `lowtide lab run NAME` makes one with records")
    # The runner's folder has other things beside its records, some of them JSON perhaps.
    inside = place / "records" if (place / "records").is_dir() else place
    return sorted(file.resolve() for file in inside.rglob("*.json"))
