"""What is alive at a peak, from a record of the allocator."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from benchmarks.compiled.peak import asked_by, find_peak, main, rows_of

OURS = [
    {"filename": "/torch/_inductor/runtime.py", "line": 1, "name": "empty"},
    {"filename": f"/tmp/torchinductor/ab/c{'x' * 50}.py", "line": 70, "name": "call"},
    {"filename": "loop.py", "line": 9, "name": "main"},
]


def alloc(addr: int, size: int, frames: Any = ()) -> dict[str, Any]:
    return {"action": "alloc", "addr": addr, "size": size, "frames": frames}


def free(addr: int) -> dict[str, Any]:
    return {"action": "free_completed", "addr": addr, "size": 0}


def test_the_highest_moment_and_what_lives_then() -> None:
    events = [alloc(1, 10), alloc(2, 5), free(2), alloc(2, 7), free(1), alloc(3, 8), free(3), free(2)]
    peak = find_peak(events)
    assert peak.num_bytes == 17
    assert [block["size"] for block in peak.blocks] == [10, 7]


def test_a_record_that_ends_at_its_peak() -> None:
    assert find_peak([alloc(1, 4), free(1), alloc(1, 5), alloc(2, 6)]).num_bytes == 11


def test_blocks_from_before_the_record_do_not_count() -> None:
    assert find_peak([free(9), alloc(1, 4)]).num_bytes == 4


def test_generated_code_is_named_before_the_loop() -> None:
    assert asked_by(OURS) == f"c{'x' * 50}.py:70"
    assert asked_by(OURS[::2]) == "loop.py:9 main"
    assert asked_by(()) == "-"


def test_blocks_of_one_line_are_one_row() -> None:
    peak = find_peak([alloc(1, 8, OURS), alloc(2, 8, OURS), alloc(3, 10, OURS[::2])])
    rows = [(row["num_blocks"], row["block_bytes"]) for row in rows_of(peak)]
    assert rows == [(2, 8), (1, 10)]


@pytest.mark.parametrize(("has_gpu", "message"), [(False, "torch sees no CUDA device"), (True, "is not compiled")])
def test_what_cannot_be_asked_is_said(monkeypatch: pytest.MonkeyPatch, has_gpu: bool, message: str) -> None:
    monkeypatch.setattr(sys, "argv", ["compiled_peak", "peak_memory/control", "--out", "unused", "--budget", "0.5"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with pytest.raises(SystemExit, match=message):
        main()
