"""MemoryMonitor: what device and host memory really do while code runs.

Two modes. `MemoryMonitor()` samples in a thread, at an interval: it needs nothing from the code, and misses what rises
and falls between two ticks. `MemoryMonitor.at_modules(model)` samples whenever a module of the model is entered and
left: it knows where it is, and sees nothing in between. `lowtide.observe` gives the exact curve of one step; the
monitor watches whole runs.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from operator import attrgetter

import torch
from torch import nn

from lowtide.errors import ConfigError, ObserveError
from lowtide.memory.tier import HostMemory

SCHEMA = "lowtide.memory_monitor/1"
MAX_SAMPLES = 20_000
"""When so many are held, half of them go: every second one, and the interval doubles; at modules the older half, so
that entries and exits still pair. The peaks stay."""
MAX_OVERHEAD = 0.05
"""Share of the time that the thread may spend sampling: where a sample is slow, the ticks become rarer."""


class MemoryMonitor:
    """Samples memory from `with` to its end, in a thread of its own.

    An error in the thread is raised by the next call of the monitor's, at the latest at the end of the `with`. The
    thread is a daemon and is always joined. The monitor can be read during and after, and used once.

    Args:
        interval_s: Seconds between two ticks, at the least.
        device: The CUDA device to watch, `"cpu"` for the host alone. By default the process's own: the current device,
            or that of `LOCAL_RANK` while none has been chosen; the host alone where there is no GPU.

    Example:
        >>> with MemoryMonitor(interval_s=0.005) as monitor:
        ...     with monitor.phase("forward"):
        ...         block = torch.zeros(1000, 1000)
        >>> monitor.peak().host_rss_bytes > 4_000_000
        True
    """

    def __init__(self, *, interval_s: float = 0.01, device: torch.device | str | int | None = None) -> None:
        if not interval_s > 0:
            raise ConfigError(f"interval_s is {interval_s}; give a time above 0 seconds", key="interval_s")
        self._device = own_device(device)
        self._interval_s: float | None = interval_s
        self._model: weakref.ref[nn.Module] | None = None
        self._host = HostMemory()
        self._samples: list[MemorySample] = []
        self._lock = threading.Lock()
        self._started_s = 0.0
        self._phase = ""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    @classmethod
    def at_modules(cls, model: nn.Module, *, device: torch.device | str | int | None = None) -> MemoryMonitor:
        """A monitor that samples at each entry and exit of the model and of every module in it, without a thread.

        It holds the model weakly, its hooks hold the monitor weakly, and they are removed at the end of the `with`. A
        compiled model has no modules to enter: watch it before it is compiled. The backward enters none either; wrap it
        in `phase`.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            >>> with MemoryMonitor.at_modules(model) as monitor:
            ...     output = model(torch.ones(1, 4))
            >>> [f"{sample.event} {sample.label}" for sample in monitor.samples][1:4]
            ['enter Sequential', 'enter Sequential.0', 'exit Sequential.0']
        """
        monitor = cls(device=device)
        monitor._interval_s, monitor._model = None, weakref.ref(model)
        return monitor

    def __enter__(self) -> MemoryMonitor:
        if self._samples:
            raise ObserveError(f"this monitor has run already and holds {len(self._samples)} samples; make a new one")
        self._started_s = time.perf_counter()
        self._take("start", "")
        if self._model is not None:
            self._hook_modules()
        else:
            self._thread = threading.Thread(target=self._tick, name="lowtide memory monitor", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        if error is None:
            self._take("stop", "")
            self._raise_thread_error()
        elif self._error is not None:
            # Neither error may hide the other; the caller's own is the one to raise.
            error.add_note(f"The memory monitor had stopped before, with {self._error!r}.")
            self._error = None

    @property
    def device(self) -> torch.device | None:
        """The device that is watched; None for the host alone."""
        return self._device

    @property
    def samples(self) -> tuple[MemorySample, ...]:
        """What was read so far, oldest first."""
        self._raise_thread_error()
        with self._lock:
            return tuple(self._samples)

    def peak(self, field: str | None = None) -> MemorySample:
        """The first sample at which a field was highest.

        Args:
            field: A `*_bytes` field of `MemorySample`; by default `device_allocated_bytes`, or `host_rss_bytes` where
                no device is watched.
        """
        samples = self.samples
        name = field or ("host_rss_bytes" if self._device is None else "device_allocated_bytes")
        if name not in _peak_fields(self._device):
            raise ConfigError(
                f"there is no {name!r} to take the peak of; use one of {', '.join(_peak_fields(self._device))}"
            )
        if not samples:
            raise ObserveError("the monitor has no samples yet; enter it with `with` first")
        return max(samples, key=attrgetter(name))

    @contextmanager
    def phase(self, label: str) -> Iterator[None]:
        """Name what runs inside: a sample at its start and end, and its label on every tick between."""
        self._raise_thread_error()
        outer, self._phase = self._phase, label
        self._take("enter", label)
        try:
            yield
        finally:
            self._take("exit", label)
            self._phase = outer

    def to_dict(self) -> dict[str, object]:
        """Plain data, for JSON."""
        return {
            "schema": SCHEMA,
            "device": None if self._device is None else str(self._device),
            "interval_s": self._interval_s,
            "samples": [asdict(sample) for sample in self.samples],
        }

    def _take(self, event: str, label: str) -> None:
        sample = take_sample(self._device, self._host, started_s=self._started_s, event=event, label=label)
        with self._lock:
            self._samples.append(sample)
            if len(self._samples) > MAX_SAMPLES:
                self._drop_half()

    def _drop_half(self) -> None:
        peaks = {id(max(self._samples, key=attrgetter(field))) for field in _peak_fields(self._device)}
        half = len(self._samples) // 2
        self._samples = [
            sample
            for index, sample in enumerate(self._samples)
            if id(sample) in peaks or (index >= half if self._interval_s is None else index % 2 == 0)
        ]
        if self._interval_s is not None:
            self._interval_s *= 2

    def _tick(self) -> None:
        try:
            pause_s = self._interval_s or 0.0
            while not self._stopping.wait(pause_s):
                begun_s = time.perf_counter()
                self._take("tick", self._phase)
                spent_s = time.perf_counter() - begun_s
                pause_s = max(self._interval_s or 0.0, spent_s / MAX_OVERHEAD)
        except BaseException as error:  # it would be lost otherwise
            self._error = error

    def _raise_thread_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise ObserveError(
                f"the memory monitor stopped after {len(self._samples)} samples: {type(error).__name__}: {error}"
            ) from error

    def _hook_modules(self) -> None:
        model = self._model() if self._model is not None else None
        if model is None:
            raise ObserveError("the model to monitor is gone; keep it alive until the monitor is entered")
        monitor = weakref.ref(self)
        for path, module in model.named_modules():
            label = f"{type(model).__name__}.{path}" if path else type(model).__name__
            self._handles += [
                module.register_forward_pre_hook(_sampling_hook(monitor, "enter", label), prepend=True),
                # Also when the module raises, so that entries and exits stay nested.
                module.register_forward_hook(_sampling_hook(monitor, "exit", label), always_call=True),
            ]


def _sampling_hook(monitor: weakref.ref[MemoryMonitor], event: str, label: str) -> Callable[..., None]:
    def hook(*_: object) -> None:
        if (watching := monitor()) is not None:
            watching._take(event, label)

    return hook


def _peak_fields(device: torch.device | None) -> tuple[str, ...]:
    on_device = ("device_allocated_bytes", "device_reserved_bytes", "device_used_bytes")
    return ("host_rss_bytes", *(on_device if device is not None else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """One reading. The device fields are None where no device is watched."""

    time_s: float
    """Seconds since the monitor started."""
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
    """On the whole device: contexts, libraries and other processes included."""


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
        if str(chosen) != "cuda":  # torch's types deny it, but "cuda" alone has no index
            return chosen
    elif not torch.cuda.is_available():
        return None
    index = own_index(
        current=torch.cuda.current_device(), local_rank=os.environ.get("LOCAL_RANK"), count=torch.cuda.device_count()
    )
    return torch.device("cuda", index)


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
