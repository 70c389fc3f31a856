"""What a process holds over 10,000 steps of one session, and over 500 sessions: the long form of `tests/faults/test_soak.py`.

python -m benchmarks.session.soak --out benchmarks/results/soak
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.records import checkout, machine
from lowtide.lab.record import json_text
from tests.faults.soak import Window, growths, long_run, many_sessions

SCHEMA = "lowtide.soak/1"
KINDS = ("steps", "sessions")


def measure(kind: str, count: int) -> None:
    """In a process of its own: print a line for each window."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        windows = (
            long_run(folder / "run", num_steps=count) if kind == "steps" else many_sessions(folder, num_sessions=count)
        )
        for window in windows:
            print(json.dumps(asdict(window)), flush=True)


def row(kind: str, count: int) -> dict[str, object]:
    """The windows of one kind, and what grew."""
    around = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.session.soak", "--measure", kind, "--count", str(count)]
    process = subprocess.Popen(command, env=around, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    windows = []
    for line in process.stdout:
        print(line, end="", flush=True)
        windows.append(Window(**json.loads(line)))
    found: dict[str, object] = {"name": kind, "count": count, "windows": [asdict(window) for window in windows]}
    if process.wait():
        return found | {"failed": f"exit code {process.returncode}"}
    return found | {"growths": growths(windows)}


def main() -> None:
    """Measure both kinds, and write a record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", choices=KINDS)
    parser.add_argument("--count", type=int)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.measure is not None:
        measure(given.measure, given.count)
        return
    record = {
        "schema": SCHEMA,
        "commit": checkout(),
        "hardware": {"name": "cpu", **machine()},
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": [row("steps", given.steps), row("sessions", given.sessions)],
    }
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{datetime.now(UTC):%Y-%m-%dT%H%M}_cpu_{checkout()}.json"
    path.write_text(json_text(record), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
