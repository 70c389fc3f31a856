"""StepTime: how long a step takes, from the time of each operator and the rate at which the host launches them.

The host tells the device what to do, one operator after the other, and runs ahead of it. An operator begins when the one
before it has ended and the host has come to it: large operators hide the host's work, and a step of small ones takes as
long as the host needs for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lowtide.hardware.rates import DeviceRates
from lowtide.tracing.step_trace import Phase, StepTrace, Work


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
        >>> lowtide.tracing.step_time.step_time(trace).bound_by
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
