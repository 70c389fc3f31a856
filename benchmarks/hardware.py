"""What `lowtide hardware` measures of this machine, as a record, and the table of one.

python -m benchmarks.hardware --out FOLDER --commit 0123abc
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

import torch

import lowtide
from benchmarks.records import newest, sources, table
from lowtide.config import from_plain, to_plain
from lowtide.hardware.calibration import Measurement
from lowtide.lab.record import write_json

SCHEMA = "lowtide.hardware/1"


_UNITS = {"FLOP": (1e12, "TFLOP/s"), "byte": (1e9, "GB/s")}


def reached(results: Path) -> str:
    """What each kernel, copy and update of an H200 and its host reached."""
    record = newest(results / "hardware", SCHEMA, "*_h200_*")
    calibration = record.content["calibration"]
    assert isinstance(calibration, dict)
    rows = []
    for plain in calibration["measurements"]:
        timed = from_plain(Measurement, plain)
        if timed.unit in _UNITS and "float16" not in timed.name.split() and "tiny" not in timed.name:
            factor, unit = _UNITS[timed.unit]
            rows.append([timed.name, f"{timed.median_s * 1e3:.3g}", f"{timed.per_s / factor:.4g}", unit])
    return table(["", "ms", "reached", ""], rows, num_text=1) + f"\n\n{sources([record])}"


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    given = parser.parse_args()
    found = lowtide.calibrate(again=True, on_progress=lambda text: print(text, flush=True))
    name = found.setting.device or "cpu"
    record = {
        "schema": SCHEMA,
        "commit": given.commit,
        "hardware": {"name": name, "processor": found.setting.processor, "driver": found.setting.driver},
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "calibration": to_plain(found),
    }
    kind = name.split()[-1].lower()
    path = given.out / f"{datetime.now(UTC):%Y-%m-%dT%H%M}_{kind}_{given.commit}.json"
    write_json(path, record)
    print(f"wrote {path} after {found.took_s:.1f} s")


if __name__ == "__main__":
    main()
