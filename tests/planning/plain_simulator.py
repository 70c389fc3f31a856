"""The simulator in the plainest words: groups by name, and every span of a step recorded. The reference for the fast one."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

from lowtide.planning.lanes import LaneRates, Placement, StepTimes, update_bytes
from lowtide.planning.plan import Schedule, Site, Weights
from lowtide.planning.simulator import SimulatedStep
from lowtide.planning.step_costs import GroupCosts, StepCosts, Use, UseCost
from lowtide.planning.timeline import WAIT_PREFIX, Lane, LaneSpan, Reason, Timeline
from lowtide.tracing.step_trace import Phase

_NUM_STEPS = 3
_NEVER = 1 << 60


def plainly_simulated(costs: StepCosts, placement: Placement, rates: LaneRates) -> SimulatedStep:
    first = _Pass(costs, placement, rates, rates.host_update_bytes_per_s).run()
    copying = max(first.busy_s[Lane.TO_DEVICE], first.busy_s[Lane.TO_HOST])
    share = min(1.0, copying / first.step_s) if first.step_s else 0.0
    if not first.busy_s[Lane.HOST_UPDATE] or not share:
        return first
    slower = 1 / (share / rates.host_update_beside_copies_bytes_per_s + (1 - share) / rates.host_update_bytes_per_s)
    return _Pass(costs, placement, rates, slower).run()


def plain_least_s(costs: StepCosts, placement: Placement, rates: LaneRates) -> float:
    compute_s = to_device = to_host = updated = 0.0
    for use in costs.uses:
        choice = placement.groups.get(use.window)
        cost = use.under("keep" if choice is None else choice.policy)
        compute_s += max(cost.device_s, _launching_s(cost, rates))
    for name, group in costs.groups.items():
        choice = placement.groups[name]
        if choice.site is Site.HOST:
            updated += update_bytes(group)
            to_host += group.trained_bytes
            to_device += 0 if choice.weights is Weights.STREAMED else group.trained_bytes
        else:
            compute_s += update_bytes(group) / rates.device_update_bytes_per_s
        if choice.weights is Weights.STREAMED:
            to_device += group.weight_bytes
    return max(
        compute_s,
        to_device / rates.to_device_bytes_per_s,
        to_host / rates.to_host_bytes_per_s,
        updated / rates.host_update_bytes_per_s,
    )


def _launching_s(cost: UseCost, rates: LaneRates) -> float:
    return cost.num_ops * rates.launch_s + cost.num_watched_ops * rates.watched_s


@dataclass(slots=True)
class _Pass:
    """One walk over the uses of several steps, with a clock for each lane."""

    costs: StepCosts
    placement: Placement
    rates: LaneRates
    host_update_bytes_per_s: float
    free_s: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(Lane, 0.0))
    """When each lane has done what it was given."""
    host_s: float = 0.0
    """How far the host's Python has come."""
    launching_s: float = 0.0
    updated_s: dict[str, float] = field(default_factory=dict)
    """When each group's weights are those of the last update, where they are fetched from or used."""
    arrived_s: dict[str, float] = field(default_factory=dict)
    """When each streamed group on the device is complete there."""
    used_until_s: dict[str, float] = field(default_factory=dict)
    jobs: dict[str, float] = field(default_factory=dict)
    """Updates that the worker has yet to do: by group, when the gradient is there."""
    staged_bytes: int = 0
    """Of gradients in staging."""
    gradients_s: dict[str, float] = field(default_factory=dict)
    """Deferred: when each group's gradient is where it will be used."""
    spans: list[LaneSpan] = field(default_factory=list)
    step: int = 0
    _positions: dict[str, list[int]] = field(default_factory=dict)
    _last_backward: dict[str, int] = field(default_factory=dict)

    def run(self) -> SimulatedStep:
        """Simulate, and give the last step."""
        for position, use in enumerate(self.costs.uses):
            for group in use.groups:
                self._positions.setdefault(group, []).append(position)
                if use.phase is Phase.BACKWARD:
                    self._last_backward[group] = position
        began_s = launched_s = 0.0
        for self.step in range(_NUM_STEPS):
            began_s, launched_s = self.free_s[Lane.COMPUTE], self.launching_s
            for position, use in enumerate(self.costs.uses):
                self._use(position, use)
            self._end_of_step()
        spans = tuple(self.spans)
        busy_s = dict.fromkeys(Lane, 0.0)
        for span in spans:
            if span.waits_for is None:
                busy_s[span.lane] += span.duration_s
        return SimulatedStep(
            times=StepTimes(
                step_s=self.free_s[Lane.COMPUTE] - began_s, busy_s=busy_s, launch_s=self.launching_s - launched_s
            ),
            timeline=Timeline(spans=spans, residency=(), is_emulated=False),
        )

    def _use(self, position: int, use: Use) -> None:
        cost = self._cost(use)
        managed = [group for group in use.groups if self._is_streamed(group)]
        has_window = any(self._has_window(group) for group in use.groups)
        launching_s = _launching_s(cost, self.rates) + (self.rates.window_s if has_window else 0.0)
        for group in use.groups:
            self._finish_update(group)
        for group in managed:
            # A pending update is waited for by the host itself, which must issue the copy after it.
            self.host_s = max(self.host_s, self.updated_s.get(group, 0.0))
            self._fetch(group, position, needed=True)
        began_host_s = self.host_s
        self._launch(launching_s)
        ready_s = max(
            (self.arrived_s[group] if group in managed else self.updated_s.get(group, 0.0) for group in use.groups),
            default=0.0,
        )
        ready_s = max(ready_s, self._bring_back(use))
        free_s = self.free_s[Lane.COMPUTE]
        start_s = max(free_s, began_host_s)
        if ready_s > start_s:
            self._span(Lane.COMPUTE, f"{WAIT_PREFIX}{use.window}", use.phase.value, start_s, ready_s)
            start_s = ready_s
        end_s = max(start_s + cost.device_s, self.host_s)
        self._span(Lane.COMPUTE, use.window, use.phase.value, start_s, start_s + cost.device_s)
        self.free_s[Lane.COMPUTE] = end_s
        for group in managed:
            self.used_until_s[group] = end_s
        self._prefetch(position)
        self._offload(use, end_s)
        if use.phase is Phase.BACKWARD:
            for group in use.groups:
                if self._last_backward[group] == position:
                    self._finish_gradient(self.costs.groups[group], end_s)

    def _finish_gradient(self, group: GroupCosts, end_s: float) -> None:
        """The group's gradient is complete on the device."""
        if not group.trained_bytes:
            return
        in_backward = self.placement.schedule is Schedule.IN_BACKWARD
        is_on_host = self.placement.groups[group.name].site is Site.HOST
        if is_on_host or in_backward:
            self._launch(group.num_trained * self.rates.finished_s)
        if is_on_host:
            if in_backward:
                self._make_room_in_staging(group.trained_bytes)
            end_s = max(end_s, self.host_s)
            arrived_s = self._copy(Lane.TO_HOST, group.name, "backward", end_s, group.trained_bytes, Reason.GRADIENTS)
            if in_backward:
                self.jobs[group.name] = arrived_s
                self.staged_bytes += group.trained_bytes
            else:
                self.gradients_s[group.name] = arrived_s
        elif in_backward:
            self._update_on_device(group)

    def _end_of_step(self) -> None:
        if self.placement.schedule is Schedule.DEFERRED:
            known_s = self.free_s[Lane.COMPUTE] if self.placement.is_clipped else self.host_s
            known_s = max(known_s, *self.gradients_s.values(), 0.0) if self.placement.is_clipped else known_s
            for name, group in self.costs.groups.items():
                if not group.trained_bytes:
                    continue
                if self.placement.groups[name].site is Site.HOST:
                    self.jobs[name] = max(known_s, self.gradients_s.get(name, 0.0))
                else:
                    if self._is_streamed(name) and name not in self.arrived_s:
                        self._fetch(name, len(self.costs.uses) - 1, needed=True)
                    self._update_on_device(group)
        # `step()` reads whether gradients were finite, and most loops read the loss.
        self.host_s = max(self.host_s, self.free_s[Lane.COMPUTE])

    def _finish_update(self, group: str) -> None:
        """Let the worker go on until it has updated a group."""
        while group in self.jobs:
            self._do_next_job()

    def _do_next_job(self) -> None:
        """The worker's next update: of those whose gradient is there, the one that the next forward needs first."""
        now_s = max(self.free_s[Lane.HOST_UPDATE], min(self.jobs.values()))
        there = [name for name, arrived_s in self.jobs.items() if arrived_s <= now_s]
        name = min(there, key=lambda name: self._positions.get(name, [-1])[0])
        start_s, group = max(now_s, self.jobs.pop(name)), self.costs.groups[name]
        end_s = start_s + update_bytes(group) / self.host_update_bytes_per_s
        self._span(Lane.HOST_UPDATE, name, "update", start_s, end_s, group.trained_bytes)
        self.free_s[Lane.HOST_UPDATE] = self.updated_s[name] = end_s
        self.staged_bytes = max(0, self.staged_bytes - group.trained_bytes)
        self.arrived_s.pop(name, None)  # what is on the device is out of date
        if not self._is_streamed(name):
            self.updated_s[name] = self._copy(Lane.TO_DEVICE, name, "update", end_s, group.trained_bytes, Reason.UPLOAD)

    def _update_on_device(self, group: GroupCosts) -> None:
        start_s = max(self.free_s[Lane.COMPUTE], self.arrived_s.get(group.name, 0.0))
        if self.placement.schedule is Schedule.IN_BACKWARD:
            start_s = max(start_s, self.host_s)
        end_s = start_s + update_bytes(group) / self.rates.device_update_bytes_per_s
        self._span(Lane.COMPUTE, group.name, "update", start_s, end_s, group.trained_bytes)
        self.free_s[Lane.COMPUTE] = end_s
        if self._is_streamed(group.name):
            self.used_until_s[group.name] = self.updated_s[group.name] = self._copy(
                Lane.TO_HOST, group.name, "update", end_s, group.trained_bytes, Reason.WRITE_BACK
            )

    def _make_room_in_staging(self, num_bytes: int) -> None:
        """Where there is none, the host waits for updates inside the backward, and later launches wait with it."""
        while self.jobs and self.staged_bytes + num_bytes > self.placement.staging_bytes:
            self._do_next_job()
            self.host_s = max(self.host_s, self.free_s[Lane.HOST_UPDATE])

    def _fetch(self, group: str, position: int, *, needed: bool) -> bool:
        """Have a streamed group on the device. A prefetch gives up where only groups that are needed sooner could leave."""
        if group in self.arrived_s:
            return True
        size = self.costs.groups[group].weight_bytes
        room_s = self._make_room(size, position, group, needed=needed)
        if room_s is None:
            return False
        ready_s = max(self.host_s, room_s, self.updated_s.get(group, 0.0))
        phase = self.costs.uses[position].phase.value
        self.arrived_s[group] = self._copy(Lane.TO_DEVICE, group, phase, ready_s, size, Reason.FETCH_WEIGHTS)
        return True

    def _make_room(self, size: int, position: int, group: str, *, needed: bool) -> float | None:
        """When the room is there."""
        taken = sum(self.costs.groups[other].weight_bytes for other in self.arrived_s)
        room_s = 0.0
        current = set(self.costs.uses[position].groups)
        own_next = self._next_use(group, position)
        while taken + size > self.placement.window_bytes:
            others = [other for other in self.arrived_s if other not in current]
            if not others:
                return room_s if needed else None
            farthest = max(others, key=lambda other: self._next_use(other, position))
            if not needed and self._next_use(farthest, position) <= own_next:
                return None
            room_s = max(room_s, self.used_until_s.get(farthest, 0.0))
            taken -= self.costs.groups[farthest].weight_bytes
            del self.arrived_s[farthest]
        return room_s

    def _prefetch(self, position: int) -> None:
        found = 0
        num_uses = len(self.costs.uses)
        for ahead in range(1, num_uses):
            if found == self.placement.prefetch_depth:
                return
            use = self.costs.uses[(position + ahead) % num_uses]
            streamed = [group for group in use.groups if self._is_streamed(group)]
            if not streamed:
                continue
            found += 1
            for group in streamed:
                if self._is_pending(group, position + ahead) or not self._fetch(group, position, needed=False):
                    return

    def _launch(self, seconds: float) -> None:
        """Let the host launch for so long, or longer where the worker updates meanwhile."""
        began_s = self.host_s
        while seconds > 0:
            self._do_jobs_begun()
            busy_s = self.free_s[Lane.HOST_UPDATE] - self.host_s
            if busy_s <= 0:
                next_s = min(self.jobs.values(), default=math.inf)
                alone_s = min(seconds, next_s - self.host_s)
                self.host_s += alone_s
                seconds -= alone_s
            else:
                slow_s = min(seconds * self.rates.slowdown_beside_updates, busy_s)
                self.host_s += slow_s
                seconds -= slow_s / self.rates.slowdown_beside_updates
        self.launching_s += self.host_s - began_s

    def _do_jobs_begun(self) -> None:
        """Let the worker begin what it can begin by now."""
        while self.jobs and max(self.free_s[Lane.HOST_UPDATE], min(self.jobs.values())) <= self.host_s:
            self._do_next_job()

    def _is_pending(self, group: str, position: int) -> bool:
        """Whether an update has yet to change the group before a use: what is fetched now would be out of date."""
        self._do_jobs_begun()
        is_next_step = position >= len(self.costs.uses) and self.costs.groups[group].trained_bytes > 0
        return group in self.jobs or (is_next_step and self.placement.schedule is Schedule.DEFERRED)

    def _next_use(self, group: str, position: int) -> int:
        places = self._positions.get(group)
        if not places:
            return _NEVER
        index = bisect_right(places, position)
        return places[index] if index < len(places) else places[0] + len(self.costs.uses)

    def _offload(self, use: Use, end_s: float) -> None:
        if use.phase is Phase.FORWARD:
            for group in use.groups:
                num_bytes = self._offloaded_bytes(group)
                if num_bytes:
                    self._copy(Lane.TO_HOST, group, "forward", end_s, num_bytes, Reason.OFFLOAD)

    def _bring_back(self, use: Use) -> float:
        """When what was offloaded is back for a backward: it was sent for while the one before computed."""
        if use.phase is not Phase.BACKWARD:
            return 0.0
        back_s = 0.0
        for group in use.groups:
            num_bytes = self._offloaded_bytes(group)
            if num_bytes:
                asked_s = max(self.used_until_s.get("", 0.0), self.host_s)
                back_s = self._copy(Lane.TO_DEVICE, group, "backward", asked_s, num_bytes, Reason.BRING_BACK)
        return back_s

    def _offloaded_bytes(self, group: str) -> int:
        sent = self.costs.groups[group].stashed_bytes.get(self.placement.groups[group].policy, 0)
        num_calls = sum(group in use.groups and use.phase is Phase.FORWARD for use in self.costs.uses)
        return sent // max(1, num_calls)

    def _copy(self, lane: Lane, name: str, phase: str, ready_s: float, num_bytes: int, reason: Reason) -> float:
        rate = self.rates.to_device_bytes_per_s if lane is Lane.TO_DEVICE else self.rates.to_host_bytes_per_s
        start_s = max(ready_s, self.free_s[lane])
        end_s = start_s + num_bytes / rate
        self._span(lane, name, phase, start_s, end_s, num_bytes, reason)
        self.free_s[lane] = end_s
        return end_s

    def _span(
        self,
        lane: Lane,
        name: str,
        phase: str,
        start_s: float,
        end_s: float,
        num_bytes: int = 0,
        reason: Reason | None = None,
    ) -> None:
        if self.step < _NUM_STEPS - 1:
            return  # filling the lanes
        self.spans.append(
            LaneSpan(
                step=self.step,
                lane=lane,
                name=name,
                phase=phase,
                start_s=start_s,
                end_s=end_s,
                num_bytes=num_bytes,
                reason=reason,
            )
        )

    def _cost(self, use: Use) -> UseCost:
        choice = self.placement.groups.get(use.window)
        return use.under("keep" if choice is None else choice.policy)

    def _has_window(self, group: str) -> bool:
        """Whether the session stands in the calls of the group's module."""
        choice = self.placement.groups[group]
        return choice.weights is Weights.STREAMED or choice.site is Site.HOST

    def _is_streamed(self, group: str) -> bool:
        return self.placement.groups[group].weights is Weights.STREAMED
