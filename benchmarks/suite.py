"""Run a suite of rows, one process each, and write one record."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


def run_row(module: str, row: Row, timeout_s: float) -> Row:
    """One row in a process of its own; a death without an answer is a result too."""
    command = [sys.executable, "-m", module, json.dumps(row)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {**row, "failed": f"no answer after {timeout_s:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {**row, "failed": f"exit code {done.returncode}", "message": done.stderr[-1500:]}
    answer: Row = json.loads(lines[-1])
    return answer


def answer(run: Callable[[Row], Row]) -> None:
    """What a row's process does: run it, and print the result as its last line; a failure is a result."""
    row = json.loads(sys.argv[1])
    try:
        result = run(row)
    except torch.OutOfMemoryError as error:
        result = {**row, "failed": "out of memory", "message": str(error)[:500]}
    except Exception as error:
        import traceback

        where = traceback.format_exc()[-3000:]
        result = {**row, "failed": type(error).__name__, "message": f"{error}"[:2000], "where": where}
    print(json.dumps(result), flush=True)


def main(
    module: str,
    schema: str,
    suites: Mapping[str, Sequence[Row]],
    prepare: Callable[[str], None] = lambda suite: None,
) -> None:
    """The command line: SUITE --out FOLDER --commit HASH [--match TEXT]."""
    parser = argparse.ArgumentParser()
    parser.add_argument("suite", choices=sorted(suites))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--timeout", type=float, default=150.0)
    parser.add_argument("--match", default="", help="only rows whose name has this in it")
    arguments = parser.parse_args()
    prepare(arguments.suite)
    record: dict[str, Any] = {
        "schema": schema,
        "suite": arguments.suite,
        "commit": arguments.commit,
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "rows": [],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.suite}_{time.strftime('%Y-%m-%dT%H%M')}_h200_{arguments.commit}.json"
    for row in suites[arguments.suite]:
        if arguments.match not in row["name"]:
            continue
        result = run_row(module, row, arguments.timeout)
        record["rows"].append(result)
        path.write_text(json.dumps(record, indent=1))  # after each row: what was measured is not lost with the next one
        shown = result.get("failed") or f"{1000 * float(str(result['median_s'])):.0f} ms"
        reserved = float(str(result.get("max_reserved_bytes", 0))) / 2**30
        print(f"{row['name']}: {shown}, reserved {reserved:.2f} GiB {result.get('message', '')}", flush=True)
    print(f"wrote {path}")
