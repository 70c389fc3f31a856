"""Records read from folders: which of them are runs of the same configuration, which are the newest, and what tells
configurations of one name apart.
"""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import BadRecordError, ConfigError
from lowtide.lab.budget import BudgetSweep, read_sweep
from lowtide.lab.record import RunRecord, read_record
from lowtide.plain_text import Plain

SWEEPS = "sweeps"
"""The folder that sweeps are written to, beside that of the records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """The records and sweeps that were found."""

    records: tuple[RunRecord, ...]
    """The records in the order of the places given, and of their paths in each."""
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
    """Whichever it is, wherever it lies: a recipe may be called sweeps too. Where it is neither, the reason."""
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
    # The runner's folder has other things than its records, some of them JSON perhaps.
    inside = place / "records" if (place / "records").is_dir() else place
    return sorted({file.resolve() for folder in (inside, place / SWEEPS) for file in folder.rglob("*.json")})


Configuration = tuple[str, str, str]
"""The recipe's name, the device, and all settings as text."""

_UNKNOWN = "unknown"
"""The device of a run that ended before it had one, and whose recipe names none."""
_NOT_RUN = frozenset({"seed", "about", "published", "tolerance"})
"""Keys of a recipe that make no other configuration."""


def by_configuration(records: Sequence[RunRecord]) -> dict[Configuration, list[RunRecord]]:
    """Runs that differ in the seed and in their date alone, in the order of their first records."""
    groups: dict[Configuration, list[RunRecord]] = {}
    for record, device in zip(records, _devices(records), strict=True):
        # What cannot be JSON, such as a path, is told apart by its text.
        settings = json.dumps(flat_settings(record.recipe), sort_keys=True, default=str)
        groups.setdefault((record.name, device, settings), []).append(record)
    return groups


def generations(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Runs of one configuration: the newest of each seed, then those before them, and so on; each by rising seed."""
    by_seed: dict[int, list[RunRecord]] = {}
    # Among equally old ones the later in the list counts as newer.
    for _, run in sorted(enumerate(runs), key=lambda pair: (_when(pair[1]), pair[0]), reverse=True):
        by_seed.setdefault(seed_of(run), []).append(run)
    most = max(map(len, by_seed.values()), default=0)
    return [[by_seed[seed][age] for seed in sorted(by_seed) if age < len(by_seed[seed])] for age in range(most)]


def newest_records(records: Sequence[RunRecord]) -> list[RunRecord]:
    """The newest record of each configuration and seed, in the order given."""
    newest = {id(run) for runs in by_configuration(records).values() for run in generations(runs)[0]}
    return [record for record in records if id(record) in newest]


def folder_of(name: str) -> str:
    """The folder part of a recipe's name, which configurations of one experiment share."""
    return name.rpartition("/")[0]


def seed_of(run: RunRecord) -> int:
    """The recipe's seed."""
    seed = run.recipe.get("seed", 0)
    return seed if isinstance(seed, int) else 0


def flat_settings(recipe: Mapping[str, Plain], prefix: str = "") -> dict[str, Plain]:
    """Dotted keys of all that makes the configuration."""
    flat: dict[str, Plain] = {}
    for key, value in recipe.items():
        if not prefix and key in _NOT_RUN:
            continue
        if isinstance(value, dict) and value:
            flat |= flat_settings(value, f"{prefix}{key}.")
        elif value not in (None, []):  # left out, none and an empty list are the same: older records lack newer keys
            flat[f"{prefix}{key}"] = value
    return flat


def _devices(records: Sequence[RunRecord]) -> list[str]:
    """The device of each record. A run that ended too early to say has the experiment's, where there is only one."""
    known: dict[str, dict[str, None]] = {}
    for record in records:
        if not _is_word(record.surroundings.device):
            known.setdefault(folder_of(record.name), {})[record.surroundings.device] = None
    devices = []
    for record in records:
        own = record.surroundings.device
        others = [
            name
            for name in known.get(folder_of(record.name), ())
            if _is_word(own) and (own == _UNKNOWN or name.startswith("cpu") == (own == "cpu"))
        ]
        devices.append(others[0] if len(others) == 1 else own)
    return devices


def _is_word(device: str) -> bool:
    """Whether it is what a recipe says, and no name of a GPU, which the run itself asks for."""
    return device in (_UNKNOWN, "cpu") or device.partition(":")[0] == "cuda"


def _when(run: RunRecord) -> float:
    try:
        return dt.datetime.fromisoformat(run.surroundings.date).timestamp()
    except ValueError:
        return -math.inf


_MAX_WORD = 24
"""Letters of a value: labels stand in charts."""


def settings_apart(mine: Mapping[str, Plain], all_of_name: Sequence[Mapping[str, Plain]]) -> str:
    """The settings in which namesakes are not all alike, as a recipe has them; "" where it has no namesake.

    A part that some lack altogether, such as `compile`, is `none` where it is lacking; where it is there, its first
    setting stands for it, and those follow in which the ones that have it differ. Where a part comes in kinds, the
    settings of another kind are not named, and those that one kind alone has only where they differ within it.

    Example:
        >>> settings_apart({"steps": 2}, [{"steps": 2}, {"steps": 3, "compile.scope": "model", "compile.backend": "x"}])
        'steps=2, compile=none'
        >>> settings_apart({"steps": 3, "compile.scope": "model"}, [{"steps": 2}, {"steps": 3, "compile.scope": "model"}])
        'steps=3, compile.scope=model'

    Args:
        mine: By dotted keys, as `flat_settings` gives them.
        all_of_name: The same of all of the name, this one among them.
    """
    keys = list(dict.fromkeys(key for recipe in all_of_name for key in recipe))
    words: dict[str, None] = {}
    for key in keys:
        if any(other.startswith(f"{key}.") for other in keys):
            continue  # an empty part of one, whose settings others have
        values = [recipe.get(key) for recipe in all_of_name]
        if all(value == values[0] for value in values):
            continue
        for word in _words(key, mine, all_of_name, keys):
            words[word] = None
    return ", ".join(words)


def _words(
    key: str, mine: Mapping[str, Plain], all_of_name: Sequence[Mapping[str, Plain]], keys: Sequence[str]
) -> list[str]:
    kind = f"{key.rpartition('.')[0]}.kind"
    others = [recipe for recipe in all_of_name if kind in mine and recipe.get(kind, mine[kind]) != mine[kind]]
    if others and (key not in mine or _is_said_by_kind(key, mine, all_of_name, kind)):
        return []
    part = _lacking_part(key, all_of_name)
    if part is None:
        return [f"{key}={_word(mine.get(key))}"]
    if not _has(mine, part):
        # Only the outermost: where the plan is none, all of its parts are.
        return [f"{part}=none"]
    inside = [recipe for recipe in all_of_name if _has(recipe, part)]
    is_first = key == next(other for other in keys if other.startswith(f"{part}."))
    if not is_first and all(recipe.get(key) == mine.get(key) for recipe in inside):
        return []
    return [f"{key}={_word(mine.get(key))}"]


def _is_said_by_kind(
    key: str, mine: Mapping[str, Plain], all_of_name: Sequence[Mapping[str, Plain]], kind: str
) -> bool:
    """Whether only recipes of my kind have a setting, and all of them alike."""
    if any(key in recipe for recipe in all_of_name if recipe.get(kind) != mine[kind]):
        return False
    return all(recipe.get(key) == mine[key] for recipe in all_of_name if recipe.get(kind) == mine[kind])


def _lacking_part(key: str, all_of_name: Sequence[Mapping[str, Plain]]) -> str | None:
    """The outermost part around a setting that some do not have at all."""
    names = key.split(".")
    parts = (".".join(names[:length]) for length in range(1, len(names)))
    return next((part for part in parts if not all(_has(recipe, part) for recipe in all_of_name)), None)


def _has(recipe: Mapping[str, Plain], part: str) -> bool:
    return any(key.startswith(f"{part}.") for key in recipe)


def _word(value: Plain) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    text = str(value)
    return text if len(text) <= _MAX_WORD else f"{text[: _MAX_WORD - 1]}…"
