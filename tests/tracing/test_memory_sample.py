"""Which device a process watches, and what a sample says without one."""

from __future__ import annotations

import time

import pytest
import torch

from lowtide.errors import ConfigError
from lowtide.memory.capacity import HostMemory
from lowtide.tracing.memory_sample import own_device, own_index, take_sample


@pytest.mark.parametrize(
    ("current", "local_rank", "count", "expected"),
    [
        (0, None, 8, 0),
        (0, "0", 8, 0),
        (0, "5", 8, 5),  # the process has not chosen yet: not device 0
        (3, "5", 8, 3),  # it has
        (0, "5", 1, 0),  # it sees one device only, its own
        (0, "", 8, 0),
        (0, "five", 8, 0),
    ],
)
def test_own_index(current: int, local_rank: str | None, count: int, expected: int) -> None:
    assert own_index(current=current, local_rank=local_rank, count=count) == expected


def fake_cuda(monkeypatch: pytest.MonkeyPatch, *, current: int, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_own_device_is_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, current=0, count=4)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert own_device() == torch.device("cuda", 2)
    assert own_device("cuda") == torch.device("cuda", 2)
    assert own_device("cuda:1") == torch.device("cuda", 1)
    assert own_device(3) == torch.device("cuda", 3)
    assert own_device("cpu") is None


def test_own_device_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert own_device() is None
    with pytest.raises(ConfigError, match="device is cuda:0, but no CUDA device is available; use 'cpu'"):
        own_device("cuda:0")
    with pytest.raises(ConfigError, match="device is mps, but only cuda and cpu can be watched"):
        own_device("mps")


def test_reads_the_given_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def answer(value: object) -> object:
        return lambda device: (asked.append(device), value)[1]

    monkeypatch.setattr(torch.cuda, "memory_allocated", answer(10))
    monkeypatch.setattr(torch.cuda, "memory_reserved", answer(20))
    monkeypatch.setattr(torch.cuda, "mem_get_info", answer((70, 100)))
    device = torch.device("cuda", 3)
    sample = take_sample(device, HostMemory(), started_s=time.perf_counter(), event="tick", label="forward")
    assert asked == [device] * 3
    assert (sample.device_allocated_bytes, sample.device_reserved_bytes, sample.device_used_bytes) == (10, 20, 30)
    assert (sample.event, sample.label) == ("tick", "forward")
