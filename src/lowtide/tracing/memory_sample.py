"""MemorySample: what device and host hold at one instant, and how it is read."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from lowtide.errors import ConfigError
from lowtide.memory.capacity import HostMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """One reading. The device fields are None where no device is watched."""

    time_s: float
    """Since the monitor started."""
    event: str
    """`tick` (the thread's), `enter` or `exit` (of a module or a phase), `start` or `stop` (of the monitor)."""
    label: str
    """The module's path for a module, else the phase that was running; "" outside any."""
    host_rss_bytes: int
    host_available_bytes: int
    """What could still be taken: the machine's free memory, or less where a container is limited."""
    device_allocated_bytes: int | None
    """In live tensors, as `torch.cuda.memory_allocated` says."""
    device_reserved_bytes: int | None
    """Held by the caching allocator."""
    device_used_bytes: int | None
    """On the whole card: contexts, libraries and other processes included."""


def own_device(device: torch.device | str | int | None = None) -> torch.device | None:
    """The CUDA device whose memory is this process's to watch; None for the host alone.

    Must be called in the thread that trains: a new thread's current device is 0 on every rank.

    Args:
        device: The device, `"cpu"` for none; by default the current one, or the one of `LOCAL_RANK` while the process
            has not chosen any.
    """
    if device is not None:
        chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if chosen.type == "cpu":
            return None
        if chosen.type != "cuda":
            raise ConfigError(f"device is {chosen}, but only cuda and cpu can be watched", key="device")
        if not torch.cuda.is_available():
            raise ConfigError(f"device is {chosen}, but no CUDA device is available; use 'cpu'", key="device")
        # torch's types deny it, but "cuda" alone has no index.
        has_index = str(chosen) != "cuda"
        return chosen if has_index else torch.device("cuda", own_index_here())
    return torch.device("cuda", own_index_here()) if torch.cuda.is_available() else None


def own_index_here() -> int:
    """The index of this process's own device, from torch and the environment."""
    return own_index(
        current=torch.cuda.current_device(), local_rank=os.environ.get("LOCAL_RANK"), count=torch.cuda.device_count()
    )


def own_index(*, current: int, local_rank: str | None, count: int) -> int:
    """The index of a rank's own device.

    Device 0 is what every process has before it chooses, so there the rank decides, if it can: launchers that show each
    process one device only leave rank 3 with a count of 1.

    Example:
        >>> own_index(current=0, local_rank="3", count=8), own_index(current=2, local_rank="3", count=8)
        (3, 2)
        >>> own_index(current=0, local_rank="3", count=1)
        0
    """
    if current == 0 and local_rank is not None and local_rank.isdigit() and int(local_rank) < count:
        return int(local_rank)
    return current


def take_sample(
    device: torch.device | None, host: HostMemory, *, started_s: float, event: str, label: str
) -> MemorySample:
    """Read both tiers now. Takes a fraction of a millisecond; does not wait for the device."""
    allocated = reserved = used = None
    if device is not None:
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        used = total - free
    return MemorySample(
        time_s=time.perf_counter() - started_s,
        event=event,
        label=label,
        host_rss_bytes=host.rss_bytes(),
        host_available_bytes=host.available_bytes(),
        device_allocated_bytes=allocated,
        device_reserved_bytes=reserved,
        device_used_bytes=used,
    )
