"""Short forms of a long run and of many sessions: nothing that a process holds grows; benchmarks.session.soak is the long form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.forks import REPO
from tests.faults.soak import MOST_RSS_GROWTH_BYTES, Window, growths

CODE = """
import json, sys
from dataclasses import asdict
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.faults import soak
root, kind, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if kind == "steps":
    windows = soak.long_run(root / "run", num_steps=count, num_windows=5, save_every=10)
else:
    windows = soak.many_sessions(root, num_sessions=count, num_windows=5)
print(json.dumps([asdict(window) for window in windows]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("steps", 200), ("sessions", 50)])
def test_nothing_grows(tmp_path: Path, kind: str, count: int) -> None:
    around = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPO / "src"), str(REPO)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CODE, str(tmp_path), kind, str(count)]
    done = subprocess.run(command, env=around, cwd=REPO, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    windows = [Window(**window) for window in json.loads(done.stdout)]
    assert windows[-1].num_done == count
    assert windows[-1].device_bytes > 0
    assert windows[-1].host_bytes > windows[-1].pinned_bytes > 0
    # On a machine that others use too, times say nothing.
    assert growths(windows, slower=None) == []


def test_growth_is_seen() -> None:
    flat = Window(
        num_done=10,
        device_bytes=1000,
        host_bytes=2000,
        pinned_bytes=500,
        host_bytes_after=1500,
        rss_bytes=300 << 20,
        num_objects=100_000,
        num_threads=2,
        num_descriptors=8,
        median_s=0.01,
    )
    assert growths([flat, flat, flat]) == []
    more = {
        "device_bytes": 1001, "host_bytes": 2001, "pinned_bytes": 501, "host_bytes_after": 1501, "num_threads": 3,
        "num_descriptors": 9, "num_objects": 102_000, "rss_bytes": flat.rss_bytes + MOST_RSS_GROWTH_BYTES + 1, "median_s": 0.02,
    }  # fmt: skip
    for name, value in more.items():
        (words,) = growths([flat, flat, replace(flat, **{name: value})])
        assert words.startswith(f"{name} rose from ")
