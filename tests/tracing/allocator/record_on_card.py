"""Writes down what torch's real caching allocator says, for test_against_card.py to compare the replay with.

By hand, where there is a CUDA card: `python tests/tracing/allocator/record_on_card.py OUT.json`. Each case runs in a
process of its own, because the allocator reads its configuration once. There are two kinds of cases: random requests,
which can be drawn again, so that only the answers are kept; and a small model in training, whose requests are kept too.
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
NUM_CALLS = 1200
SAMPLE_EVERY = 20

RANDOM_CASES: dict[str, tuple[str, int | None]] = {
    "default": ("", None),
    "default-tight": ("", 900),
    "expandable": ("expandable_segments:True", None),
    "expandable-tight": ("expandable_segments:True", 900),
    "max-split-tight": ("max_split_size_mb:64", 900),
    "max-split-rounding": ("max_split_size_mb:32,max_non_split_rounding_mb:48", None),
    "garbage": ("garbage_collection_threshold:0.5", 1200),
    "roundup": ("roundup_power2_divisions:[1:2,4:8,16:4,>:2]", None),
    "large-segment": ("large_segment_size_mb:40", None),
    "expandable-large-segment": ("expandable_segments:True,large_segment_size_mb:40", 900),
    "two-streams": ("", 900),
    "two-streams-expandable": ("expandable_segments:True", 900),
}
"""Name: allocator configuration, and the MiB that `set_per_process_memory_fraction` allows."""
TRAINING_CASES = {"training": "", "training-expandable": "expandable_segments:True"}


def num_streams(case: str) -> int:
    """How many streams a random case requests on."""
    return 2 if "streams" in case else 1


def drive(
    case: str,
    malloc: Callable[[int, int], int | None],
    free: Callable[[int], None],
    after: Callable[[], None],
) -> None:
    """Make the requests (size, stream) and frees of a random case; `malloc` answers None when the memory is full.

    Only `Random.random` is used, whose sequence Python promises to keep.
    """
    draw = random.Random(len(case)).random
    usual = [int(2 ** (9 + 18 * draw())) for _ in range(12)]  # they come back, so that equal blocks compete
    live: list[int] = []
    for call in range(NUM_CALLS):
        # Memory fills and drains in waves, as in a training step.
        request_share = 0.35 if call // 100 % 2 else 0.65
        if live and draw() > request_share:
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
            handle = malloc(size, int(draw() * num_streams(case)))
            if handle is not None:
                live.append(handle)
        after()


def _record_random(case: str) -> dict[str, object]:
    import torch

    limit_mib = RANDOM_CASES[case][1]
    total = torch.cuda.get_device_properties(0).total_memory
    allowed = None
    if limit_mib is not None:
        fraction = limit_mib * MiB / total
        torch.cuda.set_per_process_memory_fraction(fraction)
        allowed = int(fraction * total)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    allocated: list[int] = []
    reserved: list[int] = []

    def malloc(size: int, stream: int) -> int | None:
        try:
            return int(torch.cuda.caching_allocator_alloc(size, 0, streams[stream]))
        except torch.cuda.OutOfMemoryError:
            return None

    def after() -> None:
        allocated.append(torch.cuda.memory_allocated())
        reserved.append(torch.cuda.memory_reserved())

    drive(case, malloc, torch.cuda.caching_allocator_delete, after)
    stats = torch.cuda.memory_stats()
    return {
        "allowed_bytes": allowed,
        "total_bytes": total,
        "allocated_samples": allocated[::SAMPLE_EVERY],
        "reserved_steps": [now - before for now, before in zip(reserved, [0, *reserved], strict=False)],
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "peak_requested": stats["requested_bytes.all.peak"],
        "num_ooms": stats["num_ooms"],
        "num_retries": stats["num_alloc_retries"],
    }


def _record_training() -> dict[str, object]:
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(32000, 768), encoder, nn.Linear(768, 32000))
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None, stacks="python")
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(3):
        ids = torch.randint(0, 32000, (8, 512), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(ids)
        nn.functional.cross_entropy(logits.float().view(-1, 32000), ids.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return training_record(trace, torch.cuda.get_device_properties(0).total_memory, peaks)


def training_record(trace: list[dict[str, object]], total_bytes: int, peaks: tuple[int, int]) -> dict[str, object]:
    """A history as a list of calls: a request is its size, a free is -1 minus the number of the request."""
    calls: list[int] = []
    live: dict[object, int] = {}
    num_requests = 0
    for entry in trace:
        if entry["action"] == "alloc":
            live[entry["addr"]] = num_requests
            num_requests += 1
            calls.append(int(str(entry["size"])))
        elif entry["action"] == "free_completed":
            calls.append(-1 - live.pop(entry["addr"]))
    return {"total_bytes": total_bytes, "calls": calls, "peak_allocated": peaks[0], "peak_reserved": peaks[1]}


def main() -> None:
    """Record all cases, one process each, or (with a case's name) one case to standard output."""
    target = sys.argv[1]
    if target in RANDOM_CASES or target in TRAINING_CASES:
        json.dump(_record_random(target) if target in RANDOM_CASES else _record_training(), sys.stdout)
        return
    import torch

    records: dict[str, object] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    for case, conf in {**{name: conf for name, (conf, _) in RANDOM_CASES.items()}, **TRAINING_CASES}.items():
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf, "PYTORCH_ALLOC_CONF": conf}
        output = subprocess.run(
            [sys.executable, __file__, case], env=environment, capture_output=True, check=True
        ).stdout
        records[case] = json.loads(output)
        print(f"recorded {case}")
    Path(target).write_text(json.dumps(records, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
