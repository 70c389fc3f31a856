"""Run a suite of rows, one process each, and write one record.

python -m benchmarks.session.run streaming --out FOLDER --commit 0123abc
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.session.suites import FILE, SUITES


def run_row(row: dict[str, object], timeout_s: float) -> dict[str, object]:
    """One row in a process of its own; a death without an answer is a result too."""
    command = [sys.executable, "-m", "benchmarks.session.row", json.dumps(row)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {**row, "failed": f"no answer after {timeout_s:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {**row, "failed": f"exit code {done.returncode}", "message": done.stderr[-1500:]}
    answer: dict[str, object] = json.loads(lines[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--timeout", type=float, default=150.0)
    parser.add_argument("--match", default="", help="only rows whose name has this in it")
    arguments = parser.parse_args()
    if arguments.suite == "start_up" and not Path(FILE).exists():
        maker = (
            "import torch; from benchmarks.session.row import build; from safetensors.torch import save_model; "
            f"save_model(build('3.14b', on='cuda'), {FILE!r})"
        )
        subprocess.run([sys.executable, "-c", maker], check=True)
        os.sync()
    rows = []
    for row in SUITES[arguments.suite]:
        if arguments.match not in row["name"]:
            continue
        result = run_row(row, arguments.timeout)
        rows.append(result)
        shown = result.get("failed") or f"{1000 * float(str(result['median_s'])):.0f} ms"
        reserved = float(str(result.get("max_reserved_bytes", 0))) / 2**30
        print(f"{row['name']}: {shown}, reserved {reserved:.2f} GiB {result.get('message', '')}", flush=True)
    record = {
        "schema": "lowtide.session_benchmark/1",
        "suite": arguments.suite,
        "commit": arguments.commit,
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "rows": rows,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y-%m-%dT%H%M")
    path = arguments.out / f"{arguments.suite}_{stamp}_h200_{arguments.commit}.json"
    path.write_text(json.dumps(record, indent=1))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
