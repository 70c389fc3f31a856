"""Estimate: what placements of one step take of the device and of the host, told from the step's costs.

Weights, state and windows are counted. Activations, temporaries and gradients are those of the highest point of a walk over
the step's uses. A placement's parts are remembered: a search asks for the same ones again and again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lowtide.activations.policy import policy_of
from lowtide.memory.chunk import LARGEST_CHUNK_BYTES, Layout
from lowtide.planning.lanes import GroupChoice, Placement
from lowtide.planning.placement import Windows, granted_staging_bytes, staging_for
from lowtide.planning.plan import COMING, Schedule, Site, Weights
from lowtide.planning.rank_costs import GroupShare, RankCosts
from lowtide.planning.step_costs import GroupCosts, StepCosts
from lowtide.tracing.step_trace import Phase


@dataclass(slots=True)
class _Parts:
    """What a set of choices takes, whatever its windows and its staging memory are."""

    held_bytes: int = 0
    """Of the device: weights and state that stay there."""
    loose_bytes: int = 0
    """Of the host, not locked."""
    pinned_bytes: int = 0
    """Of the host, locked, without staging memory."""
    gradient_bytes: int = 0
    """That go to the host."""
    largest_gradient_bytes: int = 0
    """Of one group."""
    has_state: bool = False
    """Whether updates on the host have state."""
    has_offload: bool = False


class Estimate:
    """The bytes of one step's placements.

    Args:
        costs: The step's.
        layout: The model's.
        ranks: What ranks keep of the groups; None where there is one.
    """

    def __init__(self, costs: StepCosts, layout: Layout, ranks: RankCosts | None = None) -> None:
        self.costs = costs
        self._ranks = ranks
        self._windows = Windows(layout)
        self._window_bytes: dict[object, int] = {}
        self._parts: dict[object, _Parts] = {}
        self._highest: dict[object, int] = {}
        self._trained_bytes = sum(group.trained_bytes for group in costs.groups.values())
        self._largest_group_bytes = max((group.weight_bytes for group in costs.groups.values()), default=0)

    def window_bytes(self, groups: Mapping[str, GroupChoice], prefetch_depth: int) -> int:
        """The least window memory of a placement."""
        streamed = frozenset(name for name, choice in groups.items() if choice.weights in COMING)
        segments = {name: choice.policy for name, choice in groups.items() if "recompute/" in choice.policy}
        key = streamed, prefetch_depth, tuple(segments.items())
        if key not in self._window_bytes:
            activations = {name: policy_of(word) for name, word in segments.items()}
            self._window_bytes[key] = self._windows.needed_bytes(streamed, prefetch_depth, activations)
        return self._window_bytes[key]

    def held_bytes(self, placement: Placement) -> int:
        """Device bytes from the beginning of a step to its end: weights, state, windows."""
        return self._parts_of(placement).held_bytes + placement.window_bytes

    def stashed_bytes(self, placement: Placement) -> int:
        """What activations take of the host."""
        groups = self.costs.groups
        return sum(groups[name].stashed_bytes.get(choice.policy, 0) for name, choice in placement.groups.items())

    def highest_bytes(self, placement: Placement) -> int:
        """Device bytes besides, at their highest: activations, temporaries, gradients."""
        key = _key(placement)
        if key not in self._highest:
            shares = {name: self._share_of(name, choice) for name, choice in placement.groups.items()}
            self._highest[key] = _Walk(self.costs, placement, shares, self._largest_group_bytes).highest_bytes()
        return self._highest[key] + (0 if self._ranks is None else self._ranks.under_way_bytes)

    def _share_of(self, name: str, choice: GroupChoice) -> GroupShare | GroupCosts:
        """What one rank keeps of a group."""
        return self.costs.groups[name] if self._ranks is None else self._ranks.of(name, choice.weights)

    def host_bytes(self, placement: Placement) -> tuple[int, int]:
        """Bytes of the host in all, and the part of them that is locked."""
        parts = self._parts_of(placement)
        pinned = placement.staging_bytes + parts.pinned_bytes
        return pinned + parts.loose_bytes, pinned

    def staging_bytes(self, placement: Placement, *, host_bytes: int, pinned_bytes: int) -> int:
        """Staging memory as a session takes it, where the host has so much in all, and to be locked."""
        parts = self._parts_of(placement)
        needed, useful = staging_for(
            None,
            least=min(parts.gradient_bytes, 2 * min(parts.largest_gradient_bytes, LARGEST_CHUNK_BYTES)),
            on_host=parts.gradient_bytes,
            on_device=self._trained_bytes - parts.gradient_bytes,
            waits=placement.schedule is Schedule.IN_BACKWARD and parts.has_state,
        )
        if parts.has_offload:
            return needed
        pinned = needed + parts.pinned_bytes
        rest = min(host_bytes - pinned - parts.loose_bytes, pinned_bytes - pinned)
        return granted_staging_bytes(needed, useful=useful, rest_bytes=rest)

    def _parts_of(self, placement: Placement) -> _Parts:
        key = _key(placement)
        if key not in self._parts:
            parts = self._parts[key] = _Parts()
            for name, choice in placement.groups.items():
                _add(parts, self.costs.groups[name], self._share_of(name, choice), choice, placement.schedule)
        return self._parts[key]


def _key(placement: Placement) -> object:
    return tuple(placement.groups.items()), placement.schedule


def _add(
    parts: _Parts, group: GroupCosts, share: GroupShare | GroupCosts, choice: GroupChoice, schedule: Schedule
) -> None:
    is_updated_on_host = choice.site is Site.HOST and share.trained_bytes > 0
    if choice.weights is Weights.HOST:  # none of it is locked, and its gradient is made where it lies
        parts.loose_bytes += share.weight_bytes + share.trained_bytes + (share.state_bytes if is_updated_on_host else 0)
        return
    if choice.weights in (Weights.RESIDENT, Weights.SHARDED):
        parts.held_bytes += share.weight_bytes
    if choice.site is Site.DEVICE:
        parts.held_bytes += share.state_bytes
    if choice.weights is Weights.STREAMED or is_updated_on_host:
        parts.pinned_bytes += share.weight_bytes
    if is_updated_on_host:
        parts.loose_bytes += share.state_bytes
        parts.pinned_bytes += share.trained_bytes if schedule is Schedule.DEFERRED else 0
        parts.gradient_bytes += share.trained_bytes
        parts.largest_gradient_bytes = max(parts.largest_gradient_bytes, share.trained_bytes)
        parts.has_state = parts.has_state or share.state_bytes > 0
    parts.has_offload = parts.has_offload or choice.policy.startswith("offload")
    parts.pinned_bytes += group.stashed_bytes.get(choice.policy, 0)


class _Walk:
    """One walk over the uses of a step, in which activations, temporaries and gradients come and go."""

    def __init__(
        self,
        costs: StepCosts,
        placement: Placement,
        shares: Mapping[str, GroupShare | GroupCosts],
        largest_group_bytes: int,
    ) -> None:
        self._costs = costs
        self._placement = placement
        self._shares = shares
        self._is_deferred = placement.schedule is Schedule.DEFERRED
        self._leaving = _Leaving(largest_group_bytes)
        self._finished_bytes = 0
        """Gradients that the device will update."""

    def highest_bytes(self) -> int:
        """Bytes at the highest point."""
        costs, choices = self._costs, self._placement.groups
        level = highest = costs.start_bytes
        self._begin()
        for use, cost in zip(
            costs.uses, costs.under({name: choice.policy for name, choice in choices.items()}), strict=True
        ):
            is_backward = use.phase is Phase.BACKWARD
            current = sum(map(self._gradient_bytes, use.groups)) if is_backward else 0
            beside = self._finished_bytes + self._leaving.gradient_bytes + current
            highest = max(highest, level + cost.peak_bytes + beside)
            level += cost.grown_bytes
            if is_backward:
                self._finish(use.groups)
        return highest

    def _gradient_bytes(self, name: str) -> int:
        """Of a group, on the device; a table's is made on the host."""
        is_table = self._placement.groups[name].weights is Weights.HOST
        return 0 if is_table else self._costs.groups[name].trained_bytes

    def _kept_bytes(self, name: str) -> int:
        """The part of a finished gradient that this rank updates."""
        is_table = self._placement.groups[name].weights is Weights.HOST
        return 0 if is_table else self._shares[name].trained_bytes

    def _begin(self) -> None:
        """What the step before left behind."""
        for use in self._costs.uses:
            if use.phase is Phase.BACKWARD:
                self._finish(use.groups)
        self._finished_bytes = 0
        if self._is_deferred:
            for name, choice in self._placement.groups.items():
                if choice.site is Site.DEVICE and choice.weights is Weights.STREAMED:
                    self._leaving.send(self._costs.groups[name].trained_bytes, is_gradient=False)

    def _finish(self, groups: Sequence[str]) -> None:
        """A backward's gradients go to the host or wait for the update; weights that it has updated go home."""
        for name in groups:
            choice, trained_bytes = self._placement.groups[name], self._kept_bytes(name)
            if choice.site is Site.HOST:
                self._leaving.send(trained_bytes, is_gradient=True)
            elif self._is_deferred:
                self._finished_bytes += trained_bytes
            elif choice.weights is Weights.STREAMED:
                self._leaving.send(trained_bytes, is_gradient=False)


@dataclass(slots=True)
class _Leaving:
    """What waits on the device for its copy to the host: no more than the largest group, the oldest goes first."""

    most_bytes: int
    gradient_bytes: int = 0
    """The part of it that is gradients; weights wait in their windows."""
    _total_bytes: int = 0
    _waiting: deque[tuple[int, bool]] = field(default_factory=deque)

    def send(self, num_bytes: int, *, is_gradient: bool) -> None:
        """One more comes; of a group the parameters go one by one."""
        self._waiting.append((num_bytes, is_gradient))
        self._total_bytes += num_bytes
        self.gradient_bytes += num_bytes if is_gradient else 0
        while self._total_bytes > self.most_bytes:
            oldest, was_gradient = self._waiting.popleft()
            gone = min(oldest, self._total_bytes - self.most_bytes)
            self._total_bytes -= gone
            self.gradient_bytes -= gone if was_gradient else 0
            if gone < oldest:
                self._waiting.appendleft((oldest - gone, was_gradient))
