"""The replay against recordings of the real allocator on an NVIDIA H200: every call, to the byte."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from lowtide.tracing.allocator import AllocatorFullError, CachingAllocator, parse_allocator_conf
from tests.tracing.allocator.record_on_card import RANDOM_CASES, SAMPLE_EVERY, TRAINING_CASES, drive

RECORDS: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "h200-torch-2.11.json").read_text())


@pytest.mark.parametrize("case", RANDOM_CASES)
def test_random_requests_cost_what_the_card_says(case: str) -> None:
    record = RECORDS[case]
    settings = parse_allocator_conf(RANDOM_CASES[case][0], capacity_bytes=record["total_bytes"])
    allocator = CachingAllocator(replace(settings, allowed_bytes=record["allowed_bytes"]))
    allocated: list[int] = []
    reserved: list[int] = []
    failures: list[int] = []

    def malloc(size: int, stream: int) -> int | None:
        try:
            return allocator.malloc(size, stream)
        except AllocatorFullError:
            failures.append(size)
            return None

    def after() -> None:
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)

    drive(case, malloc, allocator.free, after)
    assert reserved == list(accumulate(record["reserved_steps"]))
    assert allocated[::SAMPLE_EVERY] == record["allocated_samples"]
    assert allocator.peak_allocated_bytes == record["peak_allocated"]
    assert allocator.peak_reserved_bytes == record["peak_reserved"]
    assert allocator.peak_requested_bytes == record["peak_requested"]
    assert (len(failures), allocator.num_retries) == (record["num_ooms"], record["num_retries"])


@pytest.mark.parametrize("case", TRAINING_CASES)
def test_a_training_run_peaks_where_the_card_says(case: str) -> None:
    record = RECORDS[case]
    allocator = CachingAllocator(parse_allocator_conf(TRAINING_CASES[case], capacity_bytes=record["total_bytes"]))
    for call in record["calls"]:
        if call >= 0:
            allocator.malloc(call)
        else:
            allocator.free(-1 - call)
    assert allocator.peak_allocated_bytes == record["peak_allocated"]
    assert allocator.peak_reserved_bytes == record["peak_reserved"]
