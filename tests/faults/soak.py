"""What a process holds over a long run, and over many sessions: nothing may grow.

Each figure is of a window of the run: `device_bytes` and `host_bytes` are the most on the books, the others what the process
had at its end.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from lowtide.units import MiB
from tests.faults.small_runs import RUNS, SmallRun, Training

RUN = RUNS["updates on the host"]
MOST_RSS_GROWTH_BYTES = 8 * MiB
"""Between the first window that counts and the last: pages of the allocator and of Python's, but nothing for each step."""
MOST_OBJECTS_GROWTH = 1_000
"""Less than one for each step of a long run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What was held in a part of the run."""

    num_done: int
    """Steps, or sessions, at its end."""
    device_bytes: int
    host_bytes: int
    pinned_bytes: int
    host_bytes_after: int
    """On the books at its end: with staging that was never given back, it grows."""
    rss_bytes: int
    num_objects: int
    """That the collector knows: one more for each save, which stands in the session's statistics."""
    num_threads: int
    num_descriptors: int
    median_s: float
    """Of a step, or of a session."""


def long_run(folder: Path, *, num_steps: int, num_windows: int = 10, save_every: int = 50) -> Iterator[Window]:
    """One session that takes many steps, with a save beside training now and then."""
    run = replace(RUN, steps=num_steps)
    training = Training(run, folder)
    for number in range(num_windows):
        yield _window_of(training, num_steps // num_windows, number, save_every)
    training.close()


def _window_of(training: Training, num_steps: int, number: int, save_every: int) -> Window:
    seconds = []
    training.session.take_device_peak()
    for step in range(num_steps):
        began_s = time.perf_counter()
        training.step()
        seconds.append(time.perf_counter() - began_s)
        if step % save_every == save_every - 1:
            training.save()
    training.session.wait_for_save()
    tiers = training.session._management.opened().host_tiers
    return _measured(
        (number + 1) * num_steps,
        device_bytes=training.session.take_device_peak(),
        host_bytes=tiers.host.peak_bytes,
        pinned_bytes=tiers.pinned.peak_bytes,
        host_bytes_after=tiers.host.used_bytes,
        median_s=statistics.median(seconds),
    )


def many_sessions(root: Path, *, num_sessions: int, num_windows: int = 10, save_every: int = 5) -> Iterator[Window]:
    """Sessions that are opened, trained in for two steps and closed; some of them save."""
    for number in range(num_windows):
        seconds, device_bytes, host_bytes, pinned_bytes, left_bytes = [], 0, 0, 0, 0
        for place in range(num_sessions // num_windows):
            began_s = time.perf_counter()
            training = Training(_turn(place), root / "run")
            training.step()
            training.step()
            if place % save_every == save_every - 1:
                training.save()
            tiers = training.session._management.opened().host_tiers
            device_bytes = max(device_bytes, training.session.take_device_peak())
            training.close()
            host_bytes = max(host_bytes, tiers.host.peak_bytes)
            pinned_bytes = max(pinned_bytes, tiers.pinned.peak_bytes)
            left_bytes = max(left_bytes, tiers.host.used_bytes)
            seconds.append(time.perf_counter() - began_s)
        shutil.rmtree(root / "run", ignore_errors=True)
        yield _measured(
            (number + 1) * (num_sessions // num_windows),
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            pinned_bytes=pinned_bytes,
            host_bytes_after=left_bytes,
            median_s=statistics.median(seconds),
        )


def _turn(place: int) -> SmallRun:
    """Each kind of run in turn."""
    return list(RUNS.values())[place % len(RUNS)]


def _measured(
    num_done: int, *, device_bytes: int, host_bytes: int, pinned_bytes: int, host_bytes_after: int, median_s: float
) -> Window:
    gc.collect()
    return Window(
        num_done=num_done,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        pinned_bytes=pinned_bytes,
        host_bytes_after=host_bytes_after,
        rss_bytes=psutil.Process().memory_info().rss,
        num_objects=len(gc.get_objects()),
        num_threads=max(len(list(Path("/proc/self/task").iterdir())), threading.active_count()),
        num_descriptors=len(list(Path("/proc/self/fd").iterdir())),
        median_s=median_s,
    )


def growths(windows: Sequence[Window], *, slower: float | None = 1.5) -> list[str]:
    """What is more at the end than after the first window, in words; nothing where all is flat.

    Args:
        windows: Of one run. The first is the warm-up: caches fill in it.
        slower: A step may take so many times as long at the end; None: times are not looked at.
    """
    first, last = windows[1], windows[-1]
    found = []
    for name in ("device_bytes", "host_bytes", "pinned_bytes", "host_bytes_after", "num_threads", "num_descriptors"):
        before, after = getattr(first, name), getattr(last, name)
        if after > before:
            found.append(f"{name} rose from {before:,} to {after:,}")
    if last.rss_bytes > first.rss_bytes + MOST_RSS_GROWTH_BYTES:
        found.append(f"rss_bytes rose from {first.rss_bytes:,} to {last.rss_bytes:,}")
    if last.num_objects > first.num_objects + MOST_OBJECTS_GROWTH:
        found.append(f"num_objects rose from {first.num_objects:,} to {last.num_objects:,}")
    if slower is not None and last.median_s > slower * windows[0].median_s:
        found.append(f"median_s rose from {windows[0].median_s:.4f} to {last.median_s:.4f}")
    return found
