"""Training runs that are killed and resumed again and again, compared with undisturbed ones: the long form of `tests/faults`.

python -m benchmarks.session.kills --kills 1000 --out benchmarks/results/kills

It takes a quarter of an hour on two cores; with `--kinds` a part of it makes a record of its own.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import checkout, machine
from lowtide.lab.record import json_text
from tests.faults.forks import ForkServer
from tests.faults.kills import KINDS, Kind

SCHEMA = "lowtide.kills/1"


def measure(name: str, root: Path, *, num_kills: int, seed: int) -> dict[str, Any]:
    """The row of one kind of run; `failed` says what was lost."""
    began_s = time.perf_counter()
    failed = {}
    with ForkServer() as server:
        kind = Kind(server, KINDS[name], root)
        try:
            for _ in kind.killed_runs(seed, num_kills):
                pass
        except Exception as error:  # a loss is a result, too
            failed = {"failed": "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])}
    tally = kind.tally
    row = {
        "name": name,
        "runs": tally.runs,
        "kills": tally.kills,
        "kills_in_a_save": tally.in_a_save,
        "at_random": dict(sorted(tally.at_random.items())),
        "at_operations": dict(sorted(tally.at_operations.items())),
        "resumed": tally.resumed,
        "losses_compared": tally.losses,
        "steps_repeated": tally.repeated,
        "seconds": time.perf_counter() - began_s,
        **failed,
    }
    print(row, flush=True)
    return row


def main() -> None:
    """Kill, and write a record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--jobs", type=int, default=2, help="kinds at a time")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    num_kills = -(-given.kills // len(given.kinds))
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(given.jobs) as pool:
        rows = list(pool.map(lambda name: measure(name, Path(root), num_kills=num_kills, seed=given.seed), given.kinds))
    record = {
        "schema": SCHEMA,
        "commit": checkout(),
        "hardware": {"name": "cpu", **machine()},
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": given.seed,
        "rows": rows,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{datetime.now(UTC):%Y-%m-%dT%H%M}_cpu_{checkout()}.json"
    path.write_text(json_text(record), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
