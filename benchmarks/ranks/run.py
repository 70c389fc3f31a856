"""The job of two ranks on CPUs, by each peer and by Lowtide; DeepSpeed's rows fail where it is not installed.

python -m benchmarks.ranks.run fp32 --out FOLDER --commit 0123abc
"""

from __future__ import annotations

from benchmarks.ranks.peers import PRECISIONS
from benchmarks.suite import Row, main

SCHEMA = "lowtide.ranks_benchmark/1"
BASE = "DDP"
"""What losses and times are compared with; run once more at the end."""
LOWTIDE = {"peer": "lowtide", "weights": "streamed", "update": "host"}
SPREAD = {**LOWTIDE, "collective": "gather"}
ENTRIES: list[Row] = [
    {"name": BASE, "peer": "ddp"},
    {"name": "FSDP2", "peer": "fsdp2"},
    {"name": "FSDP2, CPUOffloadPolicy", "peer": "fsdp2", "offload": True},
    {"name": "DeepSpeed ZeRO-3", "peer": "zero-3"},
    {"name": "DeepSpeed ZeRO-3, all on the host", "peer": "zero-3", "offload": True},
    {"name": "Lowtide, resident", "peer": "lowtide", "weights": "resident", "update": "device"},
    {"name": "Lowtide, streamed", **LOWTIDE},
    {"name": "Lowtide, sharded", **SPREAD, "weights": "sharded", "update": "device"},
    {"name": "Lowtide, streamed and sharded", **SPREAD},
    {"name": "Lowtide, streamed and sharded, in backward", **SPREAD, "schedule": "in_backward"},
    {"name": "Lowtide, streamed and sharded, one to all", **SPREAD, "collective": "one to all"},
    {"name": f"{BASE}, again", "peer": "ddp"},
]
SUITES: dict[str, list[Row]] = {
    precision: [{**entry, "precision": precision, "model": "36m"} for entry in ENTRIES] for precision in PRECISIONS
}

if __name__ == "__main__":
    main("benchmarks.ranks.row", SCHEMA, SUITES)
