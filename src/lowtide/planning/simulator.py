"""The simulator: how long a step takes under a placement, and which lane holds it up.

Five lanes work in order, each for itself: the device computes, one stream copies to it, one copies from it, a worker on the
host updates, and, where there are several ranks, collectives run between them. They wait for one another as they do in a session:

- A streamed group is fetched before its use, `prefetch_depth` uses ahead, into window memory; a group leaves it when its last
  use has ended, the one whose next use is farthest first.
- A gradient that the host updates is copied when its group's backward has ended. In backward it waits in staging memory, and
  the backward waits where that is full.
- A group is fetched, and a resident one used again, when its last update is done. Of the gradients that have come, the worker
  takes the one whose group the next forward needs first.
- The host launches operators one after the other, and the device waits for it where they are small. A window, a gradient
  that leaves for the host and an operator that a selective policy looks at take it longer; and everything does while the
  worker updates, because the two share the host's memory and cores.

- Several ranks do the same at the same time, so one of them is simulated. A group that is spread over them is gathered after this
  rank's part has come to the device. Gradients are summed before they go anywhere; those of one group may be on their way while
  the next group's backward runs, and the computation waits where that is over before the sum is there.

The first steps begin with empty lanes, so that a step is timed when the one before it has been simulated too.
"""

from __future__ import annotations

import math
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
    update_bytes,
)
from lowtide.planning.plan import COMING, Site, Weights
from lowtide.planning.rank_costs import GroupShare, RankCosts
from lowtide.planning.step_costs import StepCosts
from lowtide.planning.timeline import Lane, LaneSpan, Timeline

STAND_IN = "rtx-4090"
"""Whose rates are taken where those of the hardware are not known."""


def lane_rates(hardware: Hardware, update: UpdateKind, *, ranks_on_host: int = 1) -> LaneRates:
    """The rates of a kind of device and its host, for one kind of update.

    Ranks of one host share its cores and memory, so each has its part of the rate of updates; and of the rate of copies, if all of
    them together would copy faster than the host's memory, where that was measured. Each has a core of its own to launch from.
    """
    device, host = hardware.rates or find_hardware(STAND_IN).rates, hardware.host
    assert device is not None, "the stand-in's are known"
    # Both ways at a time; a copy by the cores reads and writes.
    most = math.inf if host.memory_bytes_per_s is None else host.memory_bytes_per_s / ranks_on_host / 2
    return LaneRates(
        launch_s=host.launch_s,
        window_s=host.window_s,
        watched_s=host.watched_s,
        finished_s=host.finished_s,
        slowdown_beside_updates=host.slowdown_beside_updates,
        to_device_bytes_per_s=device.to_device_bytes_per_s
        if ranks_on_host == 1
        else min(device.to_device_bytes_per_s, most),
        to_host_bytes_per_s=device.to_host_bytes_per_s if ranks_on_host == 1 else min(device.to_host_bytes_per_s, most),
        host_update_bytes_per_s=host.updates.of(update) / ranks_on_host,
        host_update_beside_copies_bytes_per_s=host.updates_beside_copies.of(update) / ranks_on_host,
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
        ranks: What ranks keep and tell each other; None where there is one.
    """

    def __init__(self, costs: StepCosts, rates: LaneRates, ranks: RankCosts | None = None) -> None:
        self.costs = costs
        self.rates = rates
        self._step = NumberedStep(costs, rates, ranks)
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
        between_ranks = 0.0
        for name, choice in choices.items():
            share, is_streamed = step.share_of(name, choice.weights), choice.weights in COMING
            if choice.site is Site.HOST:
                updated += update_bytes(share)
                to_host += 0 if choice.weights is Weights.HOST else share.trained_bytes
                to_device += share.trained_bytes if choice.weights is Weights.RESIDENT else 0
            else:
                compute_s += update_bytes(share) / rates.device_update_bytes_per_s
            if choice.weights is Weights.STREAMED:
                to_device += share.weight_bytes
            if isinstance(share, GroupShare) and share.trained_bytes:
                between_ranks += share.reduce_s + (share.gather_s if is_streamed else 0.0)
        return max(
            compute_s,
            to_device / rates.to_device_bytes_per_s,
            to_host / rates.to_host_bytes_per_s,
            updated / rates.host_update_bytes_per_s,
            between_ranks,
        )


def simulate(costs: StepCosts, placement: Placement, rates: LaneRates, ranks: RankCosts | None = None) -> SimulatedStep:
    """The time of a step in steady state, and its timeline."""
    return Simulator(costs, rates, ranks).step(placement)
