"""Lanes: how fast each works, what a placement gives them to do, and one pass of a step over them.

The simulator says how lanes wait for one another. A pass walks over the uses of several steps, with a clock for each lane.
Groups and uses have numbers there in place of names, and nothing is recorded that nobody asked for: a search takes hundreds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lowtide.memory.groups import REST
from lowtide.planning.plan import COMING, Schedule, Site, Weights
from lowtide.planning.rank_costs import GroupShare, RankCosts
from lowtide.planning.step_costs import GroupCosts, StepCosts, UseCost, priced_as
from lowtide.planning.timeline import WAIT_PREFIX, Lane, LaneSpan, Reason
from lowtide.tracing.step_trace import Phase

_NUM_STEPS = 3
"""The last is timed; the first fill the lanes."""
_NEVER = 1 << 60
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRates:
    """How fast each lane works on some hardware."""

    launch_s: float
    """What the host needs to launch an operator."""
    window_s: float
    """What the host needs besides to open and close a window."""
    watched_s: float
    """What the host needs besides for an operator that a selective policy looks at."""
    finished_s: float
    """What the host needs for one parameter whose gradient it sends to the host or to other ranks, or has updated on the device
    in backward."""
    slowdown_beside_updates: float
    """How many times longer the host's launches take while its worker updates."""
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    host_update_bytes_per_s: float
    """Weights, gradients and state that an update on the host reads and writes while nothing is copied."""
    host_update_beside_copies_bytes_per_s: float
    """The same while copies take their part of the host's memory bandwidth."""
    device_update_bytes_per_s: float
    """The same on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChoice:
    """What a placement says about one group."""

    weights: Weights
    site: Site
    policy: str = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A plan as the simulator sees it: whole groups, without chunks."""

    groups: Mapping[str, GroupChoice]
    schedule: Schedule
    prefetch_depth: int
    window_bytes: int
    staging_bytes: int
    """In which gradients wait in backward."""
    is_clipped: bool = False
    """Whether all updates wait for the norm of all gradients."""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for placements that are."""
        groups = tuple(self.groups.items())
        return groups, self.schedule, self.prefetch_depth, self.window_bytes, self.staging_bytes, self.is_clipped


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """How long one step takes in steady state, and each lane for its part."""

    step_s: float
    busy_s: Mapping[Lane, float]
    """In which each lane works."""
    launch_s: float
    """In which the host launches."""
    link_bytes: int = 0
    """What this rank puts on the links to others."""

    @property
    def seconds(self) -> dict[str, float]:
        """Those of the step, of each lane, and of launches, by name."""
        lanes = {str(lane): seconds for lane, seconds in self.busy_s.items()}
        return {"step": self.step_s, **lanes, "launches": self.launch_s}

    @property
    def bound_by(self) -> str:
        """The lane that works most of the time, or `launches`."""
        return max((name for name in self.seconds if name != "step"), key=lambda name: self.seconds[name])


def _launching_s(cost: UseCost, rates: LaneRates) -> float:
    return cost.num_ops * rates.launch_s + cost.num_watched_ops * rates.watched_s


def update_bytes(group: GroupCosts | GroupShare) -> int:
    """What an update reads and writes: weights twice, gradients once, state twice."""
    return 3 * group.trained_bytes + 2 * group.state_bytes


class _ByPolicy(dict[str, _T]):
    """What a use has under each policy, in a segment of one; where the module cannot have one, what it has."""

    def __missing__(self, policy: str) -> _T:
        self[policy] = found = self.get(priced_as(policy)) or next(iter(self.values()))
        return found


class NumberedStep:
    """A step with numbers in place of its groups' names, and what can be told of it before there is a placement."""

    def __init__(self, costs: StepCosts, rates: LaneRates, ranks: RankCosts | None = None) -> None:
        self.costs = costs
        self.rates = rates
        self.ranks = ranks
        self.names = tuple(costs.groups)
        self.groups = tuple(costs.groups.values())
        self.uses = costs.uses
        numbers = {name: number for number, name in enumerate(self.names)}
        self.rest = numbers.get(REST)
        self.users = [tuple(numbers[name] for name in use.groups) for use in costs.uses]
        self.is_backward = [use.phase is Phase.BACKWARD for use in costs.uses]
        self.seconds = [
            _ByPolicy({word: (cost.device_s, _launching_s(cost, rates)) for word, cost in use.costs.items()})
            for use in costs.uses
        ]
        self.least_s = [
            (use.window, _ByPolicy({word: max(seconds) for word, seconds in found.items()}))
            for use, found in zip(costs.uses, self.seconds, strict=True)
        ]
        positions = [[place for place, users in enumerate(self.users) if group in users] for group in numbers.values()]
        self.first_use = [places[0] if places else -1 for places in positions]
        self.next_use = [self._next_uses(places) for places in positions]
        self.num_calls = [max(1, sum(not self.is_backward[place] for place in places)) for places in positions]
        last_backward = {
            group: place for place, users in enumerate(self.users) if self.is_backward[place] for group in users
        }
        self.ends = [
            tuple(group for group in users if last_backward.get(group) == place)
            for place, users in enumerate(self.users)
        ]
        self.without_end = tuple(group for group in numbers.values() if group not in last_backward)
        """Groups that are open all the time: their gradients are complete at the end of the step."""

    def share_of(self, name: str, weights: Weights) -> GroupShare | GroupCosts:
        """What this rank has of a group: all of it, where it is alone."""
        return self.costs.groups[name] if self.ranks is None else self.ranks.of(name, weights)

    def _next_uses(self, places: list[int]) -> list[int]:
        """By position, the next use after it; those of the next step are counted on."""
        num_uses = len(self.uses)
        following = [*places, places[0] + num_uses] if places else [_NEVER]
        return [following[bisect_right(places, position)] for position in range(num_uses)]


class NumberedPlacement:
    """A placement with numbers in place of names."""

    def __init__(self, step: NumberedStep, placement: Placement) -> None:
        self.step = step
        self.placement = placement
        choices = [placement.groups[name] for name in step.names]
        ranks = step.ranks
        self.shares = [step.share_of(name, choice.weights) for name, choice in zip(step.names, choices, strict=True)]
        self.update_bytes = [update_bytes(share) for share in self.shares]
        self.is_streamed = [choice.weights in COMING for choice in choices]
        self.weights = [choice.weights for choice in choices]
        self.is_sharded = [choice.weights is Weights.SHARDED for choice in choices]
        self.is_spread = [ranks is not None and ranks.is_spread(choice.weights) for choice in choices]
        self.always_gathered = tuple(
            group for group in step.without_end if self.is_spread[group] and step.first_use[group] < 0
        )
        self.is_on_host = [choice.site is Site.HOST for choice in choices]
        self.is_table = [choice.weights is Weights.HOST for choice in choices]
        self.offloaded = [
            group.stashed_bytes.get(choice.policy, 0) // num_calls
            for group, choice, num_calls in zip(step.groups, choices, step.num_calls, strict=True)
        ]
        """What one call of each group sends to the host."""
        has_window = [either[0] or either[1] for either in zip(self.is_streamed, self.is_on_host, strict=True)]
        self.device_s: list[float] = []
        self.launch_s: list[float] = []
        for use, users, seconds in zip(step.uses, step.users, step.seconds, strict=True):
            choice = placement.groups.get(use.window)
            device_s, launch_s = seconds["keep" if choice is None else choice.policy]
            self.device_s.append(device_s)
            self.launch_s.append(launch_s + (step.rates.window_s if any(has_window[group] for group in users) else 0.0))
        self.streamed = [tuple(group for group in users if self.is_streamed[group]) for users in step.users]
        self.again: list[tuple[int, ...]] = [()] * len(step.users)
        """Streamed groups that a backward needs besides: those that its segment runs again."""
        for *again, (_, last) in step.costs.segments({name: placement.groups[name].policy for name in step.names}):
            for forward, _ in again:
                self.device_s[last] += self.device_s[forward]
                self.launch_s[last] += self.launch_s[forward]
            self.again[last] = tuple(group for forward, _ in again for group in self.streamed[forward])
        self.stashed = [tuple(group for group in users if self.offloaded[group]) for users in step.users]
        self.next_streamed = self._next_streamed()

    def _next_streamed(self) -> list[int]:
        """By position, how many uses later the next one with streamed groups comes."""
        num_uses = len(self.streamed)
        found, ahead = [num_uses] * num_uses, num_uses
        for position in reversed(range(2 * num_uses)):
            found[position % num_uses] = ahead
            ahead = 1 if self.streamed[position % num_uses] else ahead + 1
        return found


class LanePass:
    """One walk over the uses of several steps, with a clock for each lane."""

    def __init__(self, placed: NumberedPlacement, host_update_bytes_per_s: float, spans: list[LaneSpan] | None) -> None:
        self.placed = placed
        self.step = placed.step
        self.rates = placed.step.rates
        self.placement = placed.placement
        self.in_backward = placed.placement.schedule is Schedule.IN_BACKWARD
        self.host_update_bytes_per_s = host_update_bytes_per_s
        self.spans = spans
        num_groups = len(placed.step.groups)
        # When each lane has done what it was given.
        self.compute_s = self.to_device_s = self.to_host_s = self.worker_s = self.between_ranks_s = 0.0
        # How far the host's Python has come.
        self.host_s = self.launching_s = 0.0
        # When each group's weights are those of the last update, where they are fetched from or used.
        self.updated_s = [0.0] * num_groups
        # When each streamed group on the device is complete there, and what they take.
        self.arrived_s: dict[int, float] = {}
        self.window_bytes = 0
        self.used_until_s = [0.0] * num_groups
        # Updates that the worker has yet to do: by group, when the gradient is there.
        self.jobs: dict[int, float] = {}
        self.staged_bytes = 0
        # Deferred: when each group's gradient is where it will be used.
        self.gradients_s = [0.0] * num_groups
        # Groups whose gradients are on their way between ranks, and when their sums are there.
        self.sums: deque[tuple[int, float]] = deque()
        self.link_bytes = 0
        self.is_timed = False
        self.busy_s = dict.fromkeys(Lane, 0.0)

    def run(self) -> StepTimes:
        """Simulate, and give the times of the last step."""
        began_s = launched_s = 0.0
        for number in range(_NUM_STEPS):
            began_s, launched_s = self.compute_s, self.launching_s
            self.is_timed = number == _NUM_STEPS - 1
            self._gather_what_stays_open()
            for position in range(len(self.step.uses)):
                self._use(position)
            self._end_of_step()
        return StepTimes(
            step_s=self.compute_s - began_s,
            busy_s=self.busy_s,
            launch_s=self.launching_s - launched_s,
            link_bytes=self.link_bytes,
        )

    def _use(self, position: int) -> None:
        placed, arrived_s = self.placed, self.arrived_s
        users, streamed = self.step.users[position], placed.streamed[position]
        if self.jobs:
            for group in users:
                self._finish_update(group)
        for group in streamed:
            # A pending update is waited for by the host itself, which must issue the copy after it.
            if not placed.is_sharded[group]:
                self.host_s = max(self.host_s, self.updated_s[group])
            if group not in arrived_s:
                self._fetch(group, position, needed=True)
        start_s = max(self.compute_s, self.host_s)
        self._launch(placed.launch_s[position])
        ready_s = 0.0
        for group in users:
            ready_s = max(ready_s, arrived_s[group] if placed.is_streamed[group] else self.updated_s[group])
        for group in placed.again[position]:
            if group not in arrived_s:
                self._fetch(group, position, needed=True)
            ready_s = max(ready_s, arrived_s[group])
        stashed = placed.stashed[position]
        if stashed and self.step.is_backward[position]:
            ready_s = max(ready_s, self._bring_back(stashed))
        if ready_s > start_s:
            if self.spans is not None and self.is_timed:
                self._record_use(position, start_s, ready_s, is_wait=True)
            start_s = ready_s
        computed_s = start_s + placed.device_s[position]
        if self.is_timed:
            self.busy_s[Lane.COMPUTE] += computed_s - start_s
            if self.spans is not None:
                self._record_use(position, start_s, computed_s, is_wait=False)
        self.compute_s = end_s = max(computed_s, self.host_s)
        for group in (*streamed, *placed.again[position]):
            self.used_until_s[group] = end_s
        if self.placement.prefetch_depth:
            self._prefetch(position)
        if stashed and not self.step.is_backward[position]:
            for group in stashed:
                self._to_host(group, Phase.FORWARD, end_s, placed.offloaded[group], Reason.OFFLOAD)
        for group in self.step.ends[position]:
            self._finish_gradient(group, end_s)

    def _finish_gradient(self, group: int, end_s: float) -> None:
        """The group's gradient is complete on the device."""
        costs = self.step.groups[group]
        if not costs.trained_bytes:
            return
        ranks = self.step.ranks
        if ranks is not None or self.placed.is_on_host[group] or self.in_backward:
            self._launch(costs.num_trained * self.rates.finished_s)
        if ranks is None:
            self._place_gradient(group, end_s)
            return
        share = ranks.of(self.step.names[group], self.placed.weights[group])
        sent = share.reduce_s, share.reduce_bytes, share.reduce_link_bytes
        summed_s = self._between_ranks(group, Phase.BACKWARD, max(end_s, self.host_s), sent, Reason.SUM)
        self.sums.append((group, summed_s))
        while len(self.sums) > 1:
            self._take_sum()

    def _take_sum(self) -> None:
        """The oldest gradient that is on its way between ranks: there is room for those of one group beside it."""
        group, summed_s = self.sums.popleft()
        if summed_s > self.compute_s:
            if self.spans is not None and self.is_timed:
                name = f"{WAIT_PREFIX}{self.step.names[group]}"
                self.spans.append(_span(Lane.COMPUTE, name, Phase.BACKWARD, self.compute_s, summed_s))
            self.compute_s = summed_s
        self._place_gradient(group, summed_s)

    def _place_gradient(self, group: int, end_s: float) -> None:
        """The group's gradient goes where it is updated."""
        if self.placed.is_on_host[group]:
            # A table's gradient is made on the host, from rows.
            num_bytes = 0 if self.placed.is_table[group] else self.placed.shares[group].trained_bytes
            if self.in_backward and num_bytes:
                self._make_room_in_staging(num_bytes)
            arrived_s = end_s = max(end_s, self.host_s)
            if num_bytes:
                arrived_s = self._to_host(group, Phase.BACKWARD, end_s, num_bytes, Reason.GRADIENTS)
            if self.in_backward:
                self.jobs[group] = arrived_s
                self.staged_bytes += num_bytes
            else:
                self.gradients_s[group] = arrived_s
        elif self.in_backward:
            self._update_on_device(group)

    def _gather_what_stays_open(self) -> None:
        """Groups that are open all the time come together when the step begins."""
        for group in self.placed.always_gathered:
            if group in self.jobs:
                self._finish_update(group)
            ready_s = self._gather(group, Phase.FORWARD, max(self.compute_s, self.host_s, self.updated_s[group]))
            self.compute_s = max(self.compute_s, ready_s)

    def _end_of_step(self) -> None:
        if self.step.ranks is not None:
            for group in self.step.without_end:
                self._finish_gradient(group, self.compute_s)
            while self.sums:
                self._take_sum()
        if not self.in_backward:
            is_clipped = self.placement.is_clipped
            known_s = max(self.compute_s, *self.gradients_s, 0.0) if is_clipped else self.host_s
            for group, costs in enumerate(self.step.groups):
                if not costs.trained_bytes:
                    continue
                if self.placed.is_on_host[group]:
                    self.jobs[group] = max(known_s, self.gradients_s[group])
                else:
                    is_away = self.placed.is_streamed[group] and not self.placed.is_sharded[group]
                    if is_away and group not in self.arrived_s:
                        self._fetch(group, len(self.step.uses) - 1, needed=True)
                    self._update_on_device(group)
        # `step()` reads whether gradients were finite, and most loops read the loss.
        self.host_s = max(self.host_s, self.compute_s)

    def _finish_update(self, group: int) -> None:
        """Let the worker go on until it has updated a group."""
        while group in self.jobs:
            self._do_next_job()

    def _do_next_job(self) -> None:
        """The worker's next update: of those whose gradient is there, the one that the next forward needs first."""
        now_s = max(self.worker_s, min(self.jobs.values()))
        there = [group for group, arrived_s in self.jobs.items() if arrived_s <= now_s]
        group = there[0] if len(there) == 1 else min(there, key=self.step.first_use.__getitem__)
        start_s, trained_bytes = max(now_s, self.jobs.pop(group)), self.placed.shares[group].trained_bytes
        end_s = start_s + self.placed.update_bytes[group] / self.host_update_bytes_per_s
        if self.is_timed:
            self._record(Lane.HOST_UPDATE, group, Phase.UPDATE, start_s, end_s, trained_bytes, None)
        self.worker_s = self.updated_s[group] = end_s
        is_table = self.placed.is_table[group]
        self.staged_bytes = max(0, self.staged_bytes - (0 if is_table else trained_bytes))
        if group in self.arrived_s:  # what is on the device is out of date
            self._leave(group)
        if not self.placed.is_streamed[group] and not is_table:
            self.updated_s[group] = self._to_device(group, Phase.UPDATE, end_s, trained_bytes, Reason.UPLOAD)

    def _update_on_device(self, group: int) -> None:
        start_s = max(self.compute_s, self.arrived_s.get(group, 0.0))
        if self.in_backward:
            start_s = max(start_s, self.host_s)
        end_s = start_s + self.placed.update_bytes[group] / self.rates.device_update_bytes_per_s
        trained_bytes = self.placed.shares[group].trained_bytes
        if self.is_timed:
            self._record(Lane.COMPUTE, group, Phase.UPDATE, start_s, end_s, trained_bytes, None)
        self.compute_s = end_s
        if self.placed.is_sharded[group]:
            self.updated_s[group] = end_s
            if group in self.arrived_s:  # what is in the window is out of date
                self._leave(group)
        elif self.placed.is_streamed[group]:
            written_s = self._to_host(group, Phase.UPDATE, end_s, trained_bytes, Reason.WRITE_BACK)
            self.used_until_s[group] = self.updated_s[group] = written_s

    def _make_room_in_staging(self, num_bytes: int) -> None:
        """Where there is none, the host waits for updates inside the backward, and later launches wait with it."""
        while self.jobs and self.staged_bytes + num_bytes > self.placement.staging_bytes:
            self._do_next_job()
            self.host_s = max(self.host_s, self.worker_s)

    def _fetch(self, group: int, position: int, *, needed: bool) -> bool:
        """Have a streamed group on the device. A prefetch gives up where only groups that are needed sooner could leave."""
        size = self.step.groups[group].weight_bytes
        room_s = self._make_room(size, position, group, needed=needed)
        if room_s is None:
            return False
        ready_s = max(self.host_s, room_s, self.updated_s[group])
        phase = self.step.uses[position].phase
        if self.placed.is_spread[group]:
            self.arrived_s[group] = self._gather(group, phase, ready_s)
        else:
            self.arrived_s[group] = self._to_device(group, phase, ready_s, size, Reason.FETCH_WEIGHTS)
        self.window_bytes += size
        return True

    def _gather(self, group: int, phase: Phase, ready_s: float) -> float:
        """When a group that is spread over ranks is whole: this rank's part comes to the device, then those of the others."""
        ranks = self.step.ranks
        assert ranks is not None, "one rank has all of it"
        share = ranks.of(self.step.names[group], self.placed.weights[group])
        if not self.placed.is_sharded[group]:
            ready_s = self._to_device(group, phase, ready_s, share.weight_bytes, Reason.FETCH_WEIGHTS)
        return self._between_ranks(
            group, phase, ready_s, (share.gather_s, share.gather_bytes, share.gather_link_bytes), Reason.GATHER
        )

    def _between_ranks(
        self, group: int, phase: Phase, ready_s: float, sent: tuple[float, int, int], reason: Reason
    ) -> float:
        """When a group's collectives have ended, of which so many seconds, bytes and bytes on the links are given."""
        seconds, num_bytes, link_bytes = sent
        assert self.step.ranks is not None, "they are between ranks"
        if not num_bytes:
            return ready_s
        start_s = max(ready_s, self.between_ranks_s)
        if self.step.ranks.takes_host_link:
            start_s = max(start_s, self.to_device_s, self.to_host_s)
        self.between_ranks_s = end_s = start_s + seconds
        if self.step.ranks.takes_host_link:
            self.to_device_s = self.to_host_s = end_s
        if self.is_timed:
            self.link_bytes += link_bytes
            self._record(Lane.BETWEEN_RANKS, group, phase, start_s, end_s, num_bytes, reason)
        return end_s

    def _leave(self, group: int) -> None:
        del self.arrived_s[group]
        self.window_bytes -= self.step.groups[group].weight_bytes

    def _make_room(self, size: int, position: int, group: int, *, needed: bool) -> float | None:
        """When the room is there."""
        room_s = 0.0
        next_use = self.step.next_use
        current = self.step.users[position]
        while self.window_bytes + size > self.placement.window_bytes:
            farthest, farthest_use = -1, -1
            for other in self.arrived_s:
                if next_use[other][position] > farthest_use and other not in current:
                    farthest, farthest_use = other, next_use[other][position]
            if farthest < 0:
                return room_s if needed else None
            if not needed and farthest_use <= next_use[group][position]:
                return None
            room_s = max(room_s, self.used_until_s[farthest])
            self._leave(farthest)
        return room_s

    def _prefetch(self, position: int) -> None:
        num_uses = len(self.step.uses)
        ahead = 0
        for _ in range(self.placement.prefetch_depth):
            ahead += self.placed.next_streamed[(position + ahead) % num_uses]
            if ahead >= num_uses:
                return
            for group in self.placed.streamed[(position + ahead) % num_uses]:
                if self._is_pending(group, position + ahead):
                    return
                if group not in self.arrived_s and not self._fetch(group, position, needed=False):
                    return

    def _launch(self, seconds: float) -> None:
        """Let the host launch for so long, or longer where the worker updates meanwhile."""
        began_s = self.host_s
        while seconds > 0:
            self._do_jobs_begun()
            busy_s = self.worker_s - self.host_s
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
        while self.jobs and self.worker_s <= self.host_s and min(self.jobs.values()) <= self.host_s:
            self._do_next_job()

    def _is_pending(self, group: int, position: int) -> bool:
        """Whether an update has yet to change the group before a use: what is fetched now would be out of date."""
        self._do_jobs_begun()
        is_next_step = position >= len(self.step.uses) and self.step.groups[group].trained_bytes > 0
        return group in self.jobs or (is_next_step and not self.in_backward)

    def _bring_back(self, stashed: Sequence[int]) -> float:
        """When what was offloaded is back for a backward: it was sent for while the one before computed."""
        back_s = 0.0
        for group in stashed:
            before_s = 0.0 if self.step.rest is None else self.used_until_s[self.step.rest]
            asked_s = max(before_s, self.host_s)
            back_s = self._to_device(group, Phase.BACKWARD, asked_s, self.placed.offloaded[group], Reason.BRING_BACK)
        return back_s

    def _to_device(self, group: int, phase: Phase, ready_s: float, num_bytes: int, reason: Reason) -> float:
        start_s = max(ready_s, self.to_device_s)
        self.to_device_s = end_s = start_s + num_bytes / self.rates.to_device_bytes_per_s
        if self.is_timed:
            self._record(Lane.TO_DEVICE, group, phase, start_s, end_s, num_bytes, reason)
        return end_s

    def _to_host(self, group: int, phase: Phase, ready_s: float, num_bytes: int, reason: Reason) -> float:
        start_s = max(ready_s, self.to_host_s)
        self.to_host_s = end_s = start_s + num_bytes / self.rates.to_host_bytes_per_s
        if self.is_timed:
            self._record(Lane.TO_HOST, group, phase, start_s, end_s, num_bytes, reason)
        return end_s

    def _record(
        self, lane: Lane, group: int, phase: Phase, start_s: float, end_s: float, num_bytes: int, reason: Reason | None
    ) -> None:
        """Work on a lane in the timed step."""
        self.busy_s[lane] += end_s - start_s
        if self.spans is not None:
            name = self.step.names[group]
            self.spans.append(_span(lane, name, phase, start_s, end_s, num_bytes, reason))

    def _record_use(self, position: int, start_s: float, end_s: float, *, is_wait: bool) -> None:
        assert self.spans is not None, "who wants none does not ask"
        use = self.step.uses[position]
        name = f"{WAIT_PREFIX}{use.window}" if is_wait else use.window
        self.spans.append(_span(Lane.COMPUTE, name, use.phase, start_s, end_s))


def _span(
    lane: Lane,
    name: str,
    phase: Phase,
    start_s: float,
    end_s: float,
    num_bytes: int = 0,
    reason: Reason | None = None,
) -> LaneSpan:
    return LaneSpan(
        step=_NUM_STEPS - 1,
        lane=lane,
        name=name,
        phase=phase.value,
        start_s=start_s,
        end_s=end_s,
        num_bytes=num_bytes,
        reason=reason,
    )
