"""The session's benchmarks on one GPU.

python -m benchmarks.session.run streaming --out FOLDER --commit 0123abc
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.session.suites import FILE, SUITES
from benchmarks.suite import main


def _prepare(suite: str) -> None:
    if suite == "start_up" and not Path(FILE).exists():
        maker = (
            "import torch; from benchmarks.session.row import build; from safetensors.torch import save_model; "
            f"save_model(build('3.14b', on='cuda'), {FILE!r})"
        )
        subprocess.run([sys.executable, "-c", maker], check=True)
        os.sync()


if __name__ == "__main__":
    main("benchmarks.session.row", "lowtide.session_benchmark/1", SUITES, _prepare)
