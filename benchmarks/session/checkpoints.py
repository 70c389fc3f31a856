"""Checkpoints on one machine: how long training is held up, how much host memory a save takes, and how fast a run goes on.

python -m benchmarks.session.checkpoints saves --out FOLDER --commit 0123abc [--match TEXT]

A row trains a model, and saves it while it trains on. The stall is what the steps until the checkpoint is whole, and the call
of `save` itself, take beyond as many undisturbed steps, of which some come before and some after. The disk's rate is measured
in the same folder right before, by as many writers, past the page cache as they do it, and with a sync at the end. The second
save with the allowance of the first finds memory that the process has touched before. Rows on the CPU run the same with the
tiny model: `--match tiny`.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.session.row import SIZES, build, host_rss_bytes, load
from benchmarks.suite import Row, answer, main
from lowtide.runtime.checkpoints.blocks import WRITE_BYTES, write_all
from lowtide.runtime.checkpoints.disk import Disk

MODULE = "benchmarks.session.checkpoints"
SCHEMA = "lowtide.checkpoint_benchmark/1"
_STATE = {"model": "3.14b", "batch": "8x2048", "steps": 6, "warm_up": 3, "disk_bytes": 8 << 30}
SUITES: dict[str, list[Row]] = {
    "saves": [
        {"name": "3.14B, 36 GiB twice", **_STATE, "allowances": ["36GiB", "36GiB"]},
        {"name": "3.14B, 4 GiB, then load", **_STATE, "allowances": ["4GiB"], "loads": True},
        {"name": "1B, one stays", **_STATE, "model": "1b", "allowances": ["4GiB"] * 3, "keep": 1},
        {
            "name": "tiny",
            **_STATE,
            "model": "tiny",
            "batch": "2x16",
            "disk_bytes": 1 << 20,
            "allowances": ["64KiB", "64KiB"],
            "keep": 1,
            "loads": True,
        },
    ]
}
"""A row has one save for each allowance. With `keep` they replace one another in one run; without, each has the disk to itself,
which has no room for two of 36 GiB."""


class PeakMemory:
    """The most that this process occupied while the block ran."""

    def __init__(self) -> None:
        self.peak_bytes = self.before_bytes = host_rss_bytes()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(timeout=0.01):
            self.peak_bytes = max(self.peak_bytes, host_rss_bytes())


def disk_bytes_per_s(folder: Path, num_bytes: int, num_writers: int) -> float:
    """The rate at which as many threads write files there as a save writes them, and sync them, beside nothing else."""
    disk = Disk()
    # Mapped memory begins at a page, without which nothing goes past the page cache.
    block = memoryview(mmap.mmap(-1, WRITE_BYTES))
    block[:] = torch.randint(0, 256, (WRITE_BYTES,), dtype=torch.uint8).numpy().tobytes()
    share = num_bytes // num_writers

    def write(number: int) -> None:
        path = folder / f"rate-{number}"
        descriptor = disk.create(path, share)
        direct = disk.open_direct(path)
        for begin in range(0, share, WRITE_BYTES):
            data = block[: share - begin]
            is_direct = direct is not None and len(data) == WRITE_BYTES
            write_all(disk, direct if is_direct else descriptor, data, begin)
        disk.sync(descriptor)
        for each in {descriptor, direct} - {None}:
            disk.close(each)

    began_s = time.perf_counter()
    with ThreadPoolExecutor(num_writers) as pool:
        list(pool.map(write, range(num_writers)))
    seconds = time.perf_counter() - began_s
    for path in folder.glob("rate-*"):
        path.unlink()
    return share * num_writers / seconds


def forget_pages(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


class Loop:
    """A managed model whose state is on the host: bf16 weights with exact updates and fp32 moments, 12 bytes a parameter."""

    def __init__(self, row: Row) -> None:
        import lowtide

        self._is_on_cuda = torch.cuda.is_available()
        device = "cuda" if self._is_on_cuda else "cpu"
        model = build(row["model"], on=device)
        self.model: Any = model.to("cpu")
        if self._is_on_cuda:
            torch.cuda.empty_cache()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        plan = lowtide.make_plan(self.model, weights="streamed", update="host")
        self.session = lowtide.manage(self.model, self.optimizer, plan, device=device, precision="bf16 exact")
        rows, length = (int(part) for part in row["batch"].split("x"))
        generator = torch.Generator().manual_seed(1)
        self._ids = torch.randint(0, SIZES[row["model"]]["v"], (rows, length), generator=generator).to(device)

    def step(self) -> float:
        """Seconds of one step, from its beginning until its loss is read."""
        began_s = time.perf_counter()
        loss = self.model(input_ids=self._ids, labels=self._ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()
        return time.perf_counter() - began_s

    def num_bytes(self) -> int:
        """What a checkpoint has of the model and its optimizer."""
        return 12 * sum(parameter.numel() for parameter in self.model.parameters())


def measure_saves(loop: Loop, row: Row, folder: Path, before_s: list[float]) -> list[dict[str, Any]]:
    """A save for each allowance; the last checkpoint stays. `before_s`: of undisturbed steps before the first."""
    saves: list[dict[str, Any]] = []
    for allowance in row["allowances"]:
        if saves and "keep" not in row:
            shutil.rmtree(folder / saves[-1]["checkpoint"])
        save = measure_save(loop, allowance, row.get("keep", 1), folder)
        after_s = [loop.step() for _ in range(row["steps"])]
        usual_s = statistics.median([*before_s, *after_s])
        stall_s = max(0.0, save["call_s"] + sum(save["step_s"]) - len(save["step_s"]) * usual_s)
        saves.append({**save, "usual_s": usual_s, "stall_s": stall_s})
        before_s = after_s
        print(saves[-1], file=sys.stderr, flush=True)  # what was measured, should the rest take too long
    return saves


def measure_save(loop: Loop, allowance: str, keep: int, folder: Path) -> dict[str, Any]:
    """One save while the loop goes on."""
    with PeakMemory() as memory:
        began_s = time.perf_counter()
        path = loop.session.save(folder, allowance=allowance, keep=keep)
        called_s = time.perf_counter() - began_s
        times = []
        while loop.session.is_saving:
            times.append(loop.step())
        loop.session.wait_for_save()
    saved = loop.session.stats().saves[-1]
    return {
        "allowance": allowance,
        "checkpoint": path.name,
        "num_bytes": saved.num_bytes,
        "write_s": saved.seconds,
        "call_s": called_s,
        "step_s": times,
        "waited_s": saved.stalled_s,
        "staging_bytes": saved.peak_staging_bytes,
        "host_before_bytes": memory.before_bytes,
        "host_peak_bytes": memory.peak_bytes,
        "checkpoints_left": sorted(each.name for each in folder.glob("step-*")),
    }


def measure_load(row: Row, folder: Path) -> dict[str, Any]:
    """From nothing in memory, and nothing of the files in the page cache, to the end of the first step."""
    import lowtide

    forget_pages(folder)
    began_s = time.perf_counter()
    loop = Loop(row)
    built_s = time.perf_counter() - began_s
    lowtide.load(folder, loop.session)
    loaded_s = time.perf_counter() - began_s - built_s
    step_s = loop.step()
    loop.session.close()
    return {
        "build_s": built_s,
        "load_s": loaded_s,
        "first_step_s": step_s,
        "to_first_step_s": time.perf_counter() - began_s,
    }


@contextmanager
def _folder(where: str | None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=where))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def run(row: Row) -> Row:
    """Measure one row."""
    from lowtide.runtime.checkpoints.snapshot import num_threads

    if not torch.cuda.is_available():
        torch.backends.mkldnn.enabled = False  # some processors lack what its bf16 kernels use
    with _folder(row.get("disk")) as folder:
        loop = Loop(row)
        for _ in range(row["warm_up"]):
            loop.step()
        times = [loop.step() for _ in range(row["steps"])]
        rate = disk_bytes_per_s(folder, row["disk_bytes"], num_threads()[1])
        saves = measure_saves(loop, row, folder, times)
        result = {
            **row,
            "state_bytes": loop.num_bytes(),
            "step_s": times,
            "median_s": statistics.median(times),
            "disk_bytes_per_s": rate,
            "saves": saves,
            "stall_share_of_write": [save["stall_s"] / save["write_s"] for save in saves],
            "stall_share_of_disk": [save["stall_s"] / (save["num_bytes"] / rate) for save in saves],
        }
        if row.get("loads"):
            _close(loop)
            result["load"] = measure_load(row, folder)
    return result


def _close(loop: Loop) -> None:
    """Let go of the model's memory before another one is built."""
    loop.session.close()
    loop.model = loop.optimizer = loop.session = None  # type: ignore[assignment]  # nothing is called any more
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _is_row(arguments: list[str]) -> bool:
    return bool(arguments) and arguments[0][:1] in "{["


_COMMANDS: dict[bool, Callable[[], None]] = {
    True: lambda: answer(run, load),
    False: lambda: main(MODULE, SCHEMA, SUITES),
}

if __name__ == "__main__":
    _COMMANDS[_is_row(sys.argv[1:])]()
