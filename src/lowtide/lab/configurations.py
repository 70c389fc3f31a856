"""Configurations: which records are runs of the same thing, and which of those are the newest."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Mapping, Sequence

from lowtide.lab.record import RunRecord
from lowtide.plain_text import Plain

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
    # Of equally old ones the later in the list counts as newer.
    for _, run in sorted(enumerate(runs), key=lambda pair: (_when(pair[1]), pair[0]), reverse=True):
        by_seed.setdefault(seed_of(run), []).append(run)
    most = max(map(len, by_seed.values()), default=0)
    return [[by_seed[seed][age] for seed in sorted(by_seed) if age < len(by_seed[seed])] for age in range(most)]


def newest_records(records: Sequence[RunRecord]) -> list[RunRecord]:
    """The newest record of each configuration and seed, in the order given."""
    newest = {id(run) for runs in by_configuration(records).values() for run in generations(runs)[0]}
    return [record for record in records if id(record) in newest]


def folder_of(name: str) -> str:
    """Of a recipe's name: configurations of one experiment share it."""
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
    """Of each record. A run that ended before it could say belongs to the experiment's device, where there is only one."""
    known: dict[str, dict[str, None]] = {}
    for record in records:
        if not _is_word(record.surroundings.device):
            known.setdefault(folder_of(record.name), {})[record.surroundings.device] = None
    devices = []
    for record in records:
        own = record.surroundings.device
        others = [name for name in known.get(folder_of(record.name), ()) if _is_word(own) and _may_be(own, name)]
        devices.append(others[0] if len(others) == 1 else own)
    return devices


def _is_word(device: str) -> bool:
    """Whether it is what a recipe says, and no name of a card: that is asked by the run itself."""
    return device in (_UNKNOWN, "cpu") or device.partition(":")[0] == "cuda"


def _may_be(word: str, name: str) -> bool:
    return word == _UNKNOWN or name.startswith("cpu") == (word == "cpu")


def _when(run: RunRecord) -> float:
    try:
        return dt.datetime.fromisoformat(run.surroundings.date).timestamp()
    except ValueError:
        return -math.inf
