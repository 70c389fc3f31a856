"""What `lowtide hardware` measures of this machine, as a record.

python -m benchmarks.hardware --out FOLDER --commit 0123abc
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

import torch

import lowtide
from lowtide.config import to_plain
from lowtide.lab.record import write_json

SCHEMA = "lowtide.hardware/1"


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
