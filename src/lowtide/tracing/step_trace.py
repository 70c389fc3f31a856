"""StepTrace: everything one training step allocates, frees and runs, as frozen data.

The same value comes from a prediction on ghost tensors (`lowtide.trace`) and from a real step (`lowtide.observe`), so the two
can be compared, saved and drawn by the same code.

Time has two scales. An *event* is one allocation or one free; the memory curve is exact at event resolution. An *op* is one
operator call; `Allocation.uses` is in ops, because a tensor is used without anything being allocated.

A `StepTime` says how long the step takes, from the time of each operator and the rate at which the host launches them. The host
tells the device what to do, one operator after the other, and runs ahead of it. An operator begins when the one before it has
ended and the host has come to it: large operators hide the host's work, and a step of small ones takes as long as the host needs
for all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lowtide.hardware.rates import DeviceRates

SCHEMA_VERSION = 1

Bytes = npt.NDArray[np.int64]


class Category(enum.StrEnum):
    """What a byte is for."""

    def __repr__(self) -> str:
        return repr(self.value)  # in a printed dict the plain word says all

    WEIGHTS = "weights"
    """Parameters and buffers."""
    GRADIENTS = "gradients"
    """Storages that end up as some parameter's `.grad`."""
    OPTIMIZER = "optimizer"
    """Storages held by the optimizer's state."""
    ACTIVATIONS = "activations"
    """Made by the forward (or its recomputation) and still needed by the backward; the batch counts here too."""
    TEMPORARIES = "temporaries"
    """Everything else: dies in the phase that made it."""
    WORKSPACE = "workspace"
    """Scratch memory of cuBLAS, cuDNN and kernels that need room of their own."""


class Phase(enum.StrEnum):
    """The part of the step an event belongs to, in the order they run."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Work:
    """What a device does in one operator, whatever its rates are."""

    num_bytes: int
    """Bytes of its arguments and outputs."""
    flops: float
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator call."""

    name: str
    """For example `aten.mm`."""
    module: str
    """Dotted path of the innermost module, the forward's for a backward op; "" outside the model."""
    source: str
    """`file.py:line` of the innermost frame outside torch; "" when there is none."""
    phase: Phase
    seconds: float
    """On the target device, without waiting for the host (predicted); 0.0 for a view, and where nothing was timed."""
    work: Work | None = field(default=None, compare=False)
    """By which other hardware's seconds are told. None for a view, and in traces that were observed or loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One life of one storage."""

    requested_bytes: int
    bytes: int
    """The allocator's block: rounded up, plus a remainder too small to split off."""
    category: Category
    module: str
    op: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    phase: Phase | None
    """Phase of its birth; None when it was alive before the step."""
    born: int | None
    """Index of the event that allocated it; None when it was alive before the step."""
    died: int | None
    """Index of the event that freed it; None when it outlives the step."""
    uses: tuple[int, ...] = ()
    """Indices of the ops that touched it, the one that made it first."""

    @property
    def label(self) -> str:
        """A short name for people: `layers.3.mlp.up aten.mm`."""
        return f"{self.module or '(outside the model)'} {self.op}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One allocation or one free, and the state right after it."""

    allocation: int
    """Index into `StepTrace.allocations`."""
    is_free: bool
    op: int
    """Index of the op that was running, or that ran last."""
    phase: Phase
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the trace is for."""

    card: str
    """Name of the hardware profile, `cpu` for an observation on the host."""
    torch_version: str
    context_bytes: int
    """CUDA context and loaded kernels: outside the allocator, reported apart from the peak. 0 where unknown."""
    capacity_bytes: int
    """Memory of the device. 0 where unknown."""
    launch_s: float = 0.0
    """What the host needs for each operator, in seconds. 0 where unknown, and in traces of older versions."""
    is_context_assumed: bool = False
    """Whether `context_bytes` was measured on other hardware than this."""


@dataclass(frozen=True, kw_only=True, repr=False)
class StepTrace:
    """One steady-state step: the second or later, when optimizer state and workspaces exist already."""

    model: str
    origin: str
    """`predicted` or `observed`."""
    target: Target
    settings: Mapping[str, object]
    """The resolved `StepSettings` the step ran under."""
    num_parameters: int
    start_allocated_bytes: int
    start_reserved_bytes: int
    ops: tuple[Op, ...]
    allocations: tuple[Allocation, ...]
    """Allocations that are alive before the step come first, the others in order of birth."""
    events: tuple[Event, ...]
    notes: tuple[str, ...] = ()
    """What the reader must know: assumptions made, values invented, warnings."""
    about: Mapping[str, str] = field(default_factory=dict)
    """What was traced and what traced it, in words: `batch`, `optimizer`, `dtype`, `torch`, `lowtide`, `python`, `commit`. Empty
    for traces of older versions."""
    host_bytes: int | None = None
    """What a session under the plan holds of the host: weights, gradients, staging and optimizer state, without activations
    that are offloaded. None for a step without a plan."""
    pinned_bytes: int | None = None
    """The part of `host_bytes` that is locked for copies. None for a step without a plan."""
    offloaded_bytes: Mapping[str, int] = field(default_factory=dict)
    """What each module that offloads activations sends to the host in a step under a plan, by its path."""
    simulated_s: Mapping[str, float] | None = None
    """Seconds of a step under a plan, by the simulator: `step`, and by lane those in which it works. None where the rates of the
    hardware are not known, and for a step without a plan."""
    schema_version: int = field(default=SCHEMA_VERSION)

    def __repr__(self) -> str:
        peak = f"peak {self.peak_bytes / 2**30:.3f} GiB in the {self.peak_phase}"
        return f"StepTrace({self.model!r}, {self.origin} for {self.target.card}, {peak}, {len(self.events)} events)"

    @cached_property
    def curve(self) -> Bytes:
        """Allocated bytes before the step and after each event: `len(events) + 1` values."""
        after = [event.allocated_bytes for event in self.events]
        return np.array([self.start_allocated_bytes, *after], dtype=np.int64)

    @cached_property
    def peak_event(self) -> int:
        """Index of the event after which memory is highest for the first time; -1 for a step that never exceeds its start."""
        return int(np.argmax(self.curve)) - 1

    @property
    def peak_bytes(self) -> int:
        """What `torch.cuda.max_memory_allocated()` says after the step."""
        return int(self.curve[self.peak_event + 1])

    @cached_property
    def peak_reserved_bytes(self) -> int:
        """What `torch.cuda.max_memory_reserved()` says after the step."""
        return max([self.start_reserved_bytes, *(event.reserved_bytes for event in self.events)])

    @property
    def peak_phase(self) -> Phase:
        """The phase the peak falls in."""
        return self.events[self.peak_event].phase if self.peak_event >= 0 else Phase.FORWARD

    @property
    def at_peak(self) -> dict[Category, int]:
        """Bytes by category at the peak; the values sum to `peak_bytes` exactly."""
        return self.by_category_at(self.peak_event)

    def alive_at(self, event: int) -> Iterator[Allocation]:
        """The allocations alive right after an event (-1: before the step)."""
        for allocation in self.allocations:
            born = -1 if allocation.born is None else allocation.born
            if born <= event and (allocation.died is None or allocation.died > event):
                yield allocation

    def by_category_at(self, event: int) -> dict[Category, int]:
        """Bytes by category right after an event (-1: before the step)."""
        totals = dict.fromkeys(Category, 0)
        for allocation in self.alive_at(event):
            totals[allocation.category] += allocation.bytes
        return totals

    def phase_peaks(self) -> dict[Phase, int]:
        """Highest allocated bytes seen in each phase that has an event."""
        peaks: dict[Phase, int] = {}
        for event in self.events:
            peaks[event.phase] = max(peaks.get(event.phase, 0), event.allocated_bytes)
        return peaks

    @cached_property
    def stacked(self) -> dict[Category, Bytes]:
        """The curve split by category: for each an array of `len(events) + 1` values; their sum is `curve`."""
        deltas = {category: np.zeros(len(self.events) + 1, dtype=np.int64) for category in Category}
        for allocation in self.allocations:
            if allocation.born is None:
                deltas[allocation.category][0] += allocation.bytes
        for index, event in enumerate(self.events):
            allocation = self.allocations[event.allocation]
            deltas[allocation.category][index + 1] += -allocation.bytes if event.is_free else allocation.bytes
        return {category: np.cumsum(delta) for category, delta in deltas.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of one step on the trace's hardware, as far as it can be told before the step runs."""

    step_s: float
    """From the first operator to the end of the last."""
    device_s: float
    """In which the device computes."""
    phases: dict[Phase, float]
    """By the phase in which the device's time passes; they sum to `step_s`. Empty for a step under a plan."""
    lanes: Mapping[str, float] = field(default_factory=dict)
    """Under a plan: in which each lane works, and the host launches."""

    @property
    def waits_for_launches_s(self) -> float:
        """In which the device has nothing to do, because the host has not come to its next operator."""
        return self.step_s - self.device_s

    @property
    def bound_by(self) -> str:
        """What would have to be faster: `device`, or `launches`, the host's Python and torch's own work; under a plan a lane."""
        if self.lanes:
            return max(self.lanes, key=lambda lane: self.lanes[lane])
        return "launches" if self.waits_for_launches_s > self.device_s else "device"


def step_time(trace: StepTrace) -> StepTime | None:
    """How long the step takes, under a plan by the simulator; None where the hardware's rates are not known, as on the host.

    Example:
        >>> import torch, lowtide
        >>> trace = lowtide.trace(torch.nn.Linear(8, 8), torch.ones(4, 8), loss=lambda m, x: m(x).sum(), hardware="h200")
        >>> lowtide.tracing.step_trace.step_time(trace).bound_by
        'launches'
    """
    if trace.simulated_s is not None:
        lanes = {lane: seconds for lane, seconds in trace.simulated_s.items() if lane != "step"}
        return StepTime(step_s=trace.simulated_s["step"], device_s=lanes.get("compute", 0.0), phases={}, lanes=lanes)
    if trace.host_bytes is not None or not any(op.seconds for op in trace.ops):
        return None
    launch_s = trace.target.launch_s
    told_s = ended_s = device_s = 0.0
    phases = dict.fromkeys(Phase, 0.0)
    for op in trace.ops:
        told_s += launch_s
        if op.seconds:
            before_s, ended_s = ended_s, max(ended_s, told_s) + op.seconds
            phases[op.phase] += ended_s - before_s
            device_s += op.seconds
    return StepTime(step_s=ended_s, device_s=device_s, phases=phases)


def seconds_of(operator: str, work: Work, rates: DeviceRates | None) -> float:
    """How long an operator's work takes at these rates; 0 where they are not known."""
    if rates is None:
        return 0.0
    return rates.seconds(num_bytes=work.num_bytes, flops=work.flops, dtype=work.dtype, operator=operator)
