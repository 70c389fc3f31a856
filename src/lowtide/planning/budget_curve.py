"""The budget curve: the fastest step at each device budget, from the least that holds the step to where more gains nothing.

It comes from the costs that a plan was made with. Only its ends are traced once more, since a search's bytes are an estimate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from lowtide.errors import PlanError
from lowtide.planning.lanes import GroupChoice, Placement
from lowtide.planning.plan import Site, Weights
from lowtide.planning.search import WORTH_IT, Candidate, Limits, Search
from lowtide.tracing.step_trace import StepTrace

NUM_BUDGETS = 8
"""Budgets that are searched between the ends, each larger than the one before by the same factor."""
_ESTIMATED_WITHIN = 0.01
"""How exact an estimate of bytes is, as a share."""
_NUM_HALVINGS = 6
"""How often the range is halved in which the least budget lies, where it is the host that runs short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPoint:
    """The fastest step inside one device budget."""

    budget_bytes: int
    """What its step reserves, and so the least budget that holds it."""
    candidate: Candidate
    is_replayed: bool
    """Whether its step was traced with the allocator; otherwise the bytes are estimated."""

    @property
    def step_s(self) -> float:
        """Predicted seconds a step."""
        return self.candidate.step_s

    @property
    def num_resident(self) -> int:
        """Groups whose weights stay on the device."""
        return sum(choice.weights is Weights.RESIDENT for choice in self.candidate.placement.groups.values())

    @property
    def num_updated_there(self) -> int:
        """Groups that the device updates."""
        return sum(choice.site is Site.DEVICE for choice in self.candidate.placement.groups.values())

    @property
    def activations(self) -> str:
        """How many groups have which policy other than keep."""
        counted = Counter(choice.policy for choice in self.candidate.placement.groups.values())
        return ", ".join(f"{counted[policy]} {policy}" for policy in counted if policy != "keep") or "all keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveSource:
    """What a plan was found with."""

    search: Search
    """Corrected by the tensors' bytes beyond the estimate."""
    gaps: float
    """The share of a budget that the allocator is taken to hold beyond tensors."""
    limits: Limits
    best: Candidate
    best_bytes: int
    """What the step of the plan reserves by its replay."""
    device_bytes: int | None
    """What could be reserved of the device at most; None where that is not known."""
    replay: Callable[[Candidate, Limits], StepTrace]
    """The step of a candidate, traced inside the limits if they hold it."""

    @property
    def search_with_gaps(self) -> Search:
        """The search, its bytes corrected for what the allocator holds beyond tensors too."""
        return _with_gaps_of(self, self.limits.device_bytes)


def budget_curve(source: CurveSource, *, num_budgets: int = NUM_BUDGETS) -> tuple[BudgetPoint, ...]:
    """The budgets at which more memory makes the step faster, the smallest first; each point is faster than the one before.

    Takes a search for each budget and two traces.
    """
    most_bytes = _most_bytes(source)
    highest = _fastest(source, most_bytes) or source.best
    lowest, least_bytes = _least(source, highest, most_bytes)
    replayed = {id(source.best): BudgetPoint(budget_bytes=source.best_bytes, candidate=source.best, is_replayed=True)}
    for candidate, budget_bytes in ((lowest, least_bytes), (highest, most_bytes)):
        if id(candidate) not in replayed and (point := _replayed(source, candidate, budget_bytes)) is not None:
            replayed[id(candidate)] = point
    tops = np.geomspace(least_bytes, most_bytes, num_budgets + 2)[1:-1]
    between = [found for top in tops if (found := _fastest(source, int(top))) is not None]
    points = [*replayed.values(), *_estimated(source, between, replayed.values())]
    return worthwhile(
        point for point in points if source.device_bytes is None or point.budget_bytes <= source.device_bytes
    )


def _estimated(
    source: CurveSource, candidates: Iterable[Candidate], replayed: Iterable[BudgetPoint]
) -> Iterator[BudgetPoint]:
    """What the allocator holds beyond tensors lies between what it held in the replayed steps."""

    def tensor_bytes(candidate: Candidate) -> int:
        return source.search.device_bytes(candidate.placement)

    known = sorted((tensor_bytes(point.candidate), point.budget_bytes) for point in replayed)
    sizes = [size for size, _ in known]
    beyond = [reserved - size for size, reserved in known]
    for candidate in candidates:
        size = tensor_bytes(candidate)
        yield BudgetPoint(
            budget_bytes=size + round(float(np.interp(size, sizes, beyond))), candidate=candidate, is_replayed=False
        )


def worthwhile(points: Iterable[BudgetPoint]) -> tuple[BudgetPoint, ...]:
    """Those that are faster than all that take less, by enough to be told."""
    kept: list[BudgetPoint] = []
    for point in sorted(points, key=lambda point: (point.budget_bytes, point.step_s)):
        if not kept or point.step_s < kept[-1].step_s * (1 - WORTH_IT):
            kept.append(point)
    # An estimate is not that exact: where hardly more memory is faster, that one stands for both.
    pairs = pairwise([*kept, None])
    return tuple(
        point
        for point, after in pairs
        if point is not None
        and (point.is_replayed or after is None or after.budget_bytes > point.budget_bytes * (1 + _ESTIMATED_WITHIN))
    )


def _most_bytes(source: CurveSource) -> int:
    """What nothing can need more than: all on the device, and every activation kept; or what the device has."""
    search = source.search
    everything = Placement(
        groups={name: GroupChoice(weights=Weights.RESIDENT, site=Site.DEVICE) for name in search.costs.groups},
        schedule=source.limits.schedule,
        prefetch_depth=0,
        window_bytes=0,
        staging_bytes=0,
    )
    needed = _with_gaps(search.device_bytes(everything), source.gaps)
    return max(source.best_bytes, needed if source.device_bytes is None else min(needed, source.device_bytes))


def _least(source: CurveSource, highest: Candidate, most_bytes: int) -> tuple[Candidate, int]:
    """The fastest within the least budget for which the search finds something, and that budget."""
    search, limits = source.search, source.limits
    low = _with_gaps(search.device_bytes(search.placement(search.smallest(limits), limits)), source.gaps)
    best, high = _fastest(source, low), low
    if best is not None:
        return best, low
    best, high = highest, most_bytes
    for _ in range(_NUM_HALVINGS):  # it is the host that runs short
        middle = (low + high) // 2
        found = _fastest(source, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best, high


def _fastest(source: CurveSource, budget_bytes: int) -> Candidate | None:
    """The fastest within a budget; None where nothing fits."""
    try:
        return _with_gaps_of(source, budget_bytes).fastest(replace(source.limits, device_bytes=budget_bytes)).best
    except PlanError:
        return None


def _with_gaps_of(source: CurveSource, budget_bytes: int) -> Search:
    search = source.search
    return search.corrected(search.correction_bytes + int(source.gaps * budget_bytes))


def _with_gaps(tensor_bytes: int, gaps: float) -> int:
    """The budget in which so many bytes of tensors leave room for the allocator's gaps."""
    return math.ceil(tensor_bytes / (1 - gaps)) + 1


def _replayed(source: CurveSource, candidate: Candidate, budget_bytes: int) -> BudgetPoint | None:
    """The candidate at what its step really reserves; None where it takes more of the host than it may."""
    limits = source.limits
    traced = source.replay(candidate, replace(limits, device_bytes=budget_bytes))
    if (traced.host_bytes or 0) > limits.host_bytes or (traced.pinned_bytes or 0) > limits.pinned_bytes:
        return None
    return BudgetPoint(budget_bytes=traced.peak_reserved_bytes, candidate=candidate, is_replayed=True)
