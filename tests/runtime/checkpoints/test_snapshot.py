"""Snapshots of plain tensors: the bytes of one instant, whatever changes meanwhile, in bounded memory."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lowtide.runtime.checkpoints.snapshot import LEAST_BYTES, Snapshot, Source, num_threads

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int16, torch.float64, torch.bool, torch.complex64)


class Disk:
    """Keeps what is written, at a rate that a test chooses."""

    def __init__(self, seconds_per_byte: float = 0.0, delay: Callable[[], None] = lambda: None) -> None:
        self.found: dict[tuple[str, str], dict[int, Tensor]] = {}
        self._seconds_per_byte = seconds_per_byte
        self._delay = delay
        self._lock = threading.Lock()

    def write(self, file: str, name: str, value: Tensor, *, start: int) -> None:
        self._delay()
        if self._seconds_per_byte:
            time.sleep(value.nbytes * self._seconds_per_byte)
        with self._lock:
            pieces = self.found.setdefault((file, name), {})
            assert start not in pieces, f"{name}: two pieces at {start}"
            pieces[start] = value.clone()

    def bytes_found(self) -> dict[str, bytes]:
        found = {}
        for (_, name), pieces in self.found.items():
            end = 0
            for start, value in sorted(pieces.items()):
                assert start == end, f"{name}: a piece at {start} after one that ends at {end}"
                end += value.numel()
            found[name] = b"".join(as_bytes(value) for _, value in sorted(pieces.items()))
        return found


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randint(0, 256, (int(np.prod(shape)) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (
        (flat % 2).view(torch.bool).view(tuple(shape)) if dtype is torch.bool else flat.view(dtype).view(tuple(shape))
    )


@contextmanager
def running(snapshot: Snapshot, disk: Disk, num_threads: int = 2) -> Iterator[None]:
    jobs = [snapshot.read, partial(snapshot.write, disk)] * num_threads
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(timeout=60)
        assert not any(thread.is_alive() for thread in threads), "the snapshot hangs"
        snapshot.release()


def made_up(seed: int) -> list[Source]:
    """Parameters with some tensors each, of many shapes and orders of memory, and tensors that change without a word."""
    chance = random.Random(seed)
    sources: list[Source] = []
    for number in range(chance.randint(1, 8)):
        parameter = torch.zeros(1)
        for kind in range(chance.randint(1, 3)):
            shape = tuple(chance.choice([0, 1, 2, 3, 7, 40]) for _ in range(chance.randint(0, 3)))
            tensor = values(shape, chance.choice(DTYPES), 100 * seed + number)
            if chance.random() < 0.4 and tensor.dim() > 1:
                tensor = tensor.transpose(0, -1)
            sources.append(
                Source(
                    file="model",
                    name=f"{number}.{kind}",
                    tensor=tensor,
                    parameter=parameter,
                    is_announced=chance.random() < 0.8,
                )
            )
    return sources


@pytest.mark.parametrize("seed", range(40))
def test_it_is_of_one_instant_whatever_changes(seed: int) -> None:
    chance = random.Random(seed)
    sources = made_up(seed)
    expected = {source.name: as_bytes(source.tensor) for source in sources if source.tensor.numel()}
    total = sum(map(len, expected.values()))
    allowance = chance.choice([LEAST_BYTES, LEAST_BYTES + 1000, max(LEAST_BYTES, total), 1 << 24])
    disk = Disk(delay=lambda: time.sleep(chance.choice([0, 0, 0.002])))
    snapshot = Snapshot(sources, allowance_bytes=allowance)
    with running(snapshot, disk, chance.randint(1, 3)):
        snapshot.wait_for_unannounced()
        parameters = list({id(source.parameter): source.parameter for source in sources}.values())
        chance.shuffle(parameters)
        for parameter in parameters:
            assert parameter is not None
            if chance.random() < 0.5:
                snapshot.wait_for([parameter])
            else:
                reads = snapshot.reads_of([parameter])
                while not reads.is_done() and chance.random() < 0.5:
                    time.sleep(0.001)
                reads.wait()
            for source in sources:
                if source.parameter is parameter and source.tensor.numel():
                    source.tensor.copy_(torch.zeros_like(source.tensor))
    assert snapshot.error is None
    assert disk.bytes_found() == expected
    assert snapshot.peak_bytes <= allowance
    assert snapshot.num_bytes == total


def test_a_slow_disk_holds_a_change_up_only_beyond_the_allowance() -> None:
    tensors = [values((64 * 1024,), torch.uint8, seed) for seed in range(8)]
    sources = [
        Source(file="model", name=str(number), tensor=tensor, parameter=tensor, is_announced=True)
        for number, tensor in enumerate(tensors)
    ]
    stalls = {}
    for allowance in (1 << 20, 1 << 16):
        disk = Disk(seconds_per_byte=1e-6)  # half a second in all
        snapshot = Snapshot(sources, allowance_bytes=allowance)
        started_s = time.perf_counter()
        with running(snapshot, disk):
            snapshot.wait_for(tensors)
            stalls[allowance] = time.perf_counter() - started_s
        assert snapshot.stalled_s == pytest.approx(stalls[allowance], abs=0.05)
        assert snapshot.peak_bytes <= allowance
        assert disk.bytes_found() == {str(number): as_bytes(tensor) for number, tensor in enumerate(tensors)}
    assert stalls[1 << 20] < 0.1 < stalls[1 << 16]


def test_what_changes_next_is_read_next() -> None:
    tensors = [values((1 << 14,), torch.uint8, seed) for seed in range(32)]
    sources = [
        Source(file="model", name=str(number), tensor=tensor, parameter=tensor, is_announced=True)
        for number, tensor in enumerate(tensors)
    ]
    disk = Disk(seconds_per_byte=1e-6)
    snapshot = Snapshot(sources, allowance_bytes=1 << 15)
    with running(snapshot, disk, num_threads=1):
        snapshot.wait_for(tensors[-1:])
        assert snapshot.has_unread(tensors[10:11])
    names = [name for _, name in disk.found]
    assert names.index("31") < 10


def test_a_held_tensor_is_counted_as_before() -> None:
    from lowtide import compat

    tensor = torch.zeros(8, 8)
    before = compat.num_storage_owners(tensor)
    disk = Disk()
    snapshot = Snapshot(
        [Source(file="model", name="0", tensor=tensor, parameter=tensor, is_announced=True)],
        allowance_bytes=LEAST_BYTES,
    )
    assert compat.num_storage_owners(tensor) == before
    with running(snapshot, disk):
        assert compat.num_storage_owners(tensor) == before


class FullError(OSError):
    pass


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("error", [FullError("full"), KeyboardInterrupt()])
def test_an_error_of_a_thread_lets_everybody_go_on(at: int, error: BaseException) -> None:
    count = itertools.count()

    def fail() -> None:
        if next(count) == at:
            raise error

    tensors = [values((4096,), torch.uint8, seed) for seed in range(8)]
    sources = [
        Source(file="model", name=str(number), tensor=tensor, parameter=tensor, is_announced=True)
        for number, tensor in enumerate(tensors)
    ]
    told: list[bool] = []
    disk = Disk(delay=fail)
    snapshot = Snapshot(sources, allowance_bytes=LEAST_BYTES, on_read=lambda: told.append(True))
    reads = snapshot.reads_of(tensors)
    with running(snapshot, disk):
        reads.wait()
        snapshot.wait_for_all()
    assert snapshot.error is error
    assert reads.is_done()
    assert told == [True]


def test_nothing_to_read_is_over_at_once() -> None:
    told: list[bool] = []
    disk = Disk()
    empty = Source(file="model", name="empty", tensor=torch.empty(0, 3))
    snapshot = Snapshot([empty], allowance_bytes=LEAST_BYTES, on_read=lambda: told.append(True))
    with running(snapshot, disk):
        snapshot.wait_for_all()
    assert told == [True]
    assert disk.found == {}


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what it knows of a mapping")
def test_staging_is_memory_of_this_process_alone_in_huge_pages() -> None:
    """Shared memory has huge pages by another setting, and its pages are taken under a lock; a child would keep it alive."""
    flags: list[set[str]] = []

    class Asking(Disk):
        def write(self, file: str, name: str, value: Tensor, *, start: int) -> None:
            flags.append(flags_of_mapping(value.data_ptr()))

    tensor = values((4 << 20,), torch.uint8, 0)
    with running(Snapshot([Source(file="model", name="a", tensor=tensor)], allowance_bytes=4 << 20), Asking()):
        pass
    assert flags
    for found in flags:
        assert {"hg", "wf"} <= found, "advised to have huge pages, and wiped in a child"
        assert "sh" not in found, "shared"


def flags_of_mapping(address: int) -> set[str]:
    is_it = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, *others = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(number, 16) for number in first.split("-"))
            is_it = begin <= address < end
        elif is_it and first == "VmFlags:":
            return set(others)
    raise AssertionError("no mapping has the address")


@pytest.mark.parametrize(("processors", "readers", "writers"), [(1, 1, 2), (2, 1, 2), (16, 14, 4), (64, 16, 4)])
def test_threads_leave_processors_to_the_loop(
    processors: int, readers: int, writers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(processors)), raising=False)
    assert num_threads() == (readers, writers)
