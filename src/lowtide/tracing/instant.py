"""An instant of the step in names: what was running, and which tensor brought memory up to there."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.tracing.step_trace import Phase, StepTrace

_DECISIVE_SHARE = 1e-3
"""Of the peak: an allocation below it is not what a person would call the cause of the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """One moment of the step, in names."""

    phase: Phase | None
    """None before the step."""
    module: str
    op: str
    source: str

    @property
    def place(self) -> str:
        """Module and op on one line: `layers.3.mlp aten.mm`."""
        if self.phase is None:
            return "before the step begins"
        return " ".join(part for part in (self.module or "(outside the model)", self.op) if part)


def instant_of(trace: StepTrace, event: int) -> Instant:
    """What was running at an event (-1: before the step)."""
    if event < 0:
        return Instant(phase=None, module="", op="", source="")
    happened = trace.events[event]
    allocation = trace.allocations[happened.allocation]
    # An op without a name of its own (a workspace made before the first op) is known by what it allocated.
    running = trace.ops[happened.op] if happened.op >= 0 else None
    return Instant(
        phase=happened.phase,
        module=running.module if running else allocation.module,
        op=running.name if running else allocation.op,
        source=running.source if running else allocation.source,
    )


def decisive_event(trace: StepTrace) -> int:
    """The last event up to the peak that allocated a tensor of some size which is still alive there; -1 if none did.

    The peak's own event may be the 512 bytes of a scalar loss on top of tensors of gigabytes: true, but no answer to
    the question of what made the peak.
    """
    least = _DECISIVE_SHARE * trace.peak_bytes
    for index in range(trace.peak_event, -1, -1):
        allocation = trace.allocations[trace.events[index].allocation]
        is_alive = allocation.died is None or allocation.died > trace.peak_event
        if not trace.events[index].is_free and is_alive and allocation.bytes >= least:
            return index
    return trace.peak_event
