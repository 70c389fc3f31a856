"""The simulator: how long a step takes under a placement, and which lane holds it up.

Four lanes work in order, each for itself: the device computes, one stream copies to it, one copies from it, and a worker on
the host updates. They wait for one another as they do in a session:

- A streamed group is fetched before its use, `prefetch_depth` uses ahead, into window memory; a group leaves it when its last
  use has ended, the one whose next use is farthest first.
- A gradient that the host updates is copied when its group's backward has ended. In backward it waits in staging memory, and
  the backward waits where that is full.
- A group is fetched, and a resident one used again, when its last update is done. Of the gradients that have come, the worker
  takes the one whose group the next forward needs first.
- The host launches operators one after the other, and the device waits for it where they are small. A window, a gradient
  that leaves for the host and an operator that a selective policy looks at take it longer; and everything does while the
  worker updates, because the two share the host's memory and cores.

The first steps begin with empty lanes, so that a step is timed when the one before it has been simulated too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.hardware import Hardware, UpdateKind, find_hardware
from lowtide.planning.lanes import (
    LanePass,
    LaneRates,
    NumberedPlacement,
    NumberedStep,
    Placement,
    StepTimes,
)
from lowtide.planning.plan import Site, Weights
from lowtide.planning.step_costs import StepCosts
from lowtide.planning.timeline import Lane, LaneSpan, Timeline

STAND_IN = "rtx-4090"
"""Whose rates are taken where those of the hardware are not known."""


def lane_rates(hardware: Hardware, update: UpdateKind) -> LaneRates:
    """The rates of a kind of device and its host, for one kind of update."""
    device, host = hardware.rates or find_hardware(STAND_IN).rates, hardware.host
    assert device is not None, "the stand-in's are known"
    return LaneRates(
        launch_s=host.launch_s,
        window_s=host.window_s,
        watched_s=host.watched_s,
        finished_s=host.finished_s,
        slowdown_beside_updates=host.slowdown_beside_updates,
        to_device_bytes_per_s=device.to_device_bytes_per_s,
        to_host_bytes_per_s=device.to_host_bytes_per_s,
        host_update_bytes_per_s=host.updates.of(update),
        host_update_beside_copies_bytes_per_s=host.updates_beside_copies.of(update),
        device_update_bytes_per_s=device.updates.of(update),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step in steady state, with what each lane does when."""

    times: StepTimes
    timeline: Timeline

    @property
    def step_s(self) -> float:
        """Seconds a step."""
        return self.times.step_s

    @property
    def busy_s(self) -> Mapping[Lane, float]:
        """In which each lane works."""
        return self.times.busy_s

    @property
    def seconds(self) -> dict[str, float]:
        """As `StepTimes.seconds`."""
        return self.times.seconds

    @property
    def bound_by(self) -> str:
        """As `StepTimes.bound_by`."""
        return self.times.bound_by


class Simulator:
    """Simulates one step under placements. Each is timed once: a search asks for the same ones again, with other bytes.

    Args:
        costs: The step's.
        rates: The hardware's.
    """

    def __init__(self, costs: StepCosts, rates: LaneRates) -> None:
        self.costs = costs
        self.rates = rates
        self._step = NumberedStep(costs, rates)
        self._known: dict[tuple[object, ...], StepTimes] = {}

    def times(self, placement: Placement) -> StepTimes:
        """How long a step takes in steady state."""
        key = placement.key
        if key not in self._known:
            self._known[key] = self._run(placement, None)
        return self._known[key]

    def step(self, placement: Placement) -> SimulatedStep:
        """The same, and what each lane does when."""
        spans: list[LaneSpan] = []
        times = self._run(placement, spans)
        return SimulatedStep(times=times, timeline=Timeline(spans=tuple(spans), residency=(), is_emulated=False))

    def _run(self, placement: Placement, spans: list[LaneSpan] | None) -> StepTimes:
        """The host's worker is slower while copies run. How much of its time they take is found in a first pass."""
        rates = self.rates
        placed = NumberedPlacement(self._step, placement)
        first = LanePass(placed, rates.host_update_bytes_per_s, spans).run()
        copying = max(first.busy_s[Lane.TO_DEVICE], first.busy_s[Lane.TO_HOST])
        share = min(1.0, copying / first.step_s) if first.step_s else 0.0
        if not first.busy_s[Lane.HOST_UPDATE] or not share:
            return first
        beside = rates.host_update_beside_copies_bytes_per_s
        slower = 1 / (share / beside + (1 - share) / rates.host_update_bytes_per_s)
        if spans is not None:
            spans.clear()
        return LanePass(placed, slower, spans).run()

    def least_s(self, placement: Placement) -> float:
        """What no simulation of the placement can be faster than: each lane's work alone."""
        step, rates = self._step, self.rates
        compute_s = to_device = to_host = updated = 0.0
        choices = placement.groups
        for window, least_s in step.least_s:
            choice = choices.get(window)
            compute_s += least_s["keep" if choice is None else choice.policy]
        for *again, _ in step.costs.segments({name: choice.policy for name, choice in choices.items()}):
            for forward, _ in again:
                compute_s += step.least_s[forward][1]["recompute"]
        for name, group, update in step.updates:
            choice = choices[name]
            if choice.site is Site.HOST:
                updated += update
                to_host += 0 if choice.weights is Weights.HOST else group.trained_bytes
                to_device += group.trained_bytes if choice.weights is Weights.RESIDENT else 0
            else:
                compute_s += update / rates.device_update_bytes_per_s
            if choice.weights is Weights.STREAMED:
                to_device += group.weight_bytes
        return max(
            compute_s,
            to_device / rates.to_device_bytes_per_s,
            to_host / rates.to_host_bytes_per_s,
            updated / rates.host_update_bytes_per_s,
        )


def simulate(costs: StepCosts, placement: Placement, rates: LaneRates) -> SimulatedStep:
    """The time of a step in steady state, and its timeline."""
    return Simulator(costs, rates).step(placement)
