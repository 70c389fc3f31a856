"""Runs random requests through torch's real caching allocator and writes down what it says, for test_against_card.py.

By hand, where there is a CUDA card: `python tests/tracing/allocator/record_on_card.py OUT.json`. Each case runs in a process of its
own, because the allocator reads its configuration once.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

MiB = 1024**2

CASES: dict[str, dict[str, object]] = {
    "default": {"conf": "", "limit_mib": None},
    "default-tight": {"conf": "", "limit_mib": 900},
    "expandable": {"conf": "expandable_segments:True", "limit_mib": None},
    "expandable-tight": {"conf": "expandable_segments:True", "limit_mib": 900},
    "max-split-tight": {"conf": "max_split_size_mb:64", "limit_mib": 900},
    "max-split-rounding": {"conf": "max_split_size_mb:32,max_non_split_rounding_mb:48", "limit_mib": None},
    "garbage": {"conf": "garbage_collection_threshold:0.5", "limit_mib": 1200},
    "roundup": {"conf": "roundup_power2_divisions:[1:2,4:8,16:4,>:2]", "limit_mib": None},
    "large-segment": {"conf": "large_segment_size_mb:40", "limit_mib": None},
    "expandable-large-segment": {"conf": "expandable_segments:True,large_segment_size_mb:40", "limit_mib": 900},
    "two-streams": {"conf": "", "limit_mib": 900},
    "two-streams-expandable": {"conf": "expandable_segments:True", "limit_mib": 900},
}
NUM_CALLS = 1200


def drive(
    seed: int,
    num_streams: int,
    malloc: Callable[[int, int], object | None],
    free: Callable[[object], None],
    after: Callable[[], None],
) -> None:
    """Make `NUM_CALLS` requests and frees; `malloc` answers None when the memory is full.

    Only `Random.random` is used, whose sequence Python promises to keep.
    """
    draw = random.Random(seed).random
    usual = [
        int(2 ** (9 + 18 * draw())) for _ in range(12)
    ]  # sizes that come back, so that blocks of equal size compete
    live: list[object] = []
    for call in range(NUM_CALLS):
        # Memory fills and drains in waves, as in a training step.
        share = 0.35 if call // 100 % 2 else 0.65
        if live and draw() > share:
            free(live.pop(int(draw() * len(live))))
        else:
            kind = draw()
            if kind < 0.4:
                size = usual[int(draw() * len(usual))]
            elif kind < 0.6:
                size = 1 + int(draw() * 1.2 * MiB)
            elif kind < 0.8:
                size = int((0.9 + draw() * 10) * MiB)
            else:
                size = int((9 + draw() * 60) * MiB)
            handle = malloc(size, int(draw() * num_streams))
            if handle is not None:
                live.append(handle)
        after()


def _record(name: str) -> dict[str, object]:
    import torch

    limit_mib = CASES[name]["limit_mib"]
    total = torch.cuda.get_device_properties(0).total_memory
    allowed = None
    if isinstance(limit_mib, int):
        fraction = limit_mib * MiB / total
        torch.cuda.set_per_process_memory_fraction(fraction)
        allowed = int(fraction * total)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    allocated: list[int] = []
    reserved: list[int] = []
    addresses: list[int] = []

    def malloc(size: int, stream: int) -> object | None:
        try:
            pointer = torch.cuda.caching_allocator_alloc(size, 0, streams[stream])
        except torch.cuda.OutOfMemoryError:
            addresses.append(0)
            return None
        addresses.append(pointer)
        return pointer

    def free(pointer: object) -> None:
        torch.cuda.caching_allocator_delete(pointer)

    def after() -> None:
        allocated.append(torch.cuda.memory_allocated())
        reserved.append(torch.cuda.memory_reserved())

    drive(len(name), 2 if "streams" in name else 1, malloc, free, after)
    stats = torch.cuda.memory_stats()
    return {
        "allowed_bytes": allowed,
        "total_bytes": total,
        "allocated": allocated,
        "reserved": reserved,
        "addresses": addresses,
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "peak_requested": stats["requested_bytes.all.peak"],
        "num_ooms": stats["num_ooms"],
        "num_alloc_retries": stats["num_alloc_retries"],
        "torch": torch.__version__,
        "card": torch.cuda.get_device_name(),
    }


def main() -> None:
    """Record all cases, one process each, or (with a case's name) one case to standard output."""
    if sys.argv[1] in CASES:
        json.dump(_record(sys.argv[1]), sys.stdout)
        return
    records = {}
    for name, case in CASES.items():
        environment = {
            **os.environ,
            "PYTORCH_CUDA_ALLOC_CONF": str(case["conf"]),
            "PYTORCH_ALLOC_CONF": str(case["conf"]),
        }
        run = subprocess.run(
            [sys.executable, __file__, name], env=environment, capture_output=True, text=True, check=False
        )
        if run.returncode:
            print(f"{name} failed: {run.stderr[-600:]}")
            continue
        records[name] = json.loads(run.stdout)
        print(
            f"{name}: peak reserved {records[name]['peak_reserved'] / MiB:.0f} MiB, {records[name]['num_ooms']} out of memory"
        )
    Path(sys.argv[1]).write_text(json.dumps(records))


if __name__ == "__main__":
    main()
