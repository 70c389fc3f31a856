"""Improvement: single choices of a placement changed, as long as its simulated step becomes faster.

The search makes placements of few numbers. Here groups change alone or in sets (the first, the last or every so many of those
with one choice): their weights, update site or policy; or the placement as a whole: how far it prefetches, and window memory
above the least, in which groups stay after their use. A change that takes memory may come together with one that gives some.
Chance picks which, from a fixed seed: the same step has the same plan. A change is simulated only where it fits and no
lane alone makes it slower.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lowtide.planning.lanes import GroupChoice
from lowtide.planning.plan import Site, Weights

_DRAWN = 7
"""Sets of changes that are drawn in a round for each that may be simulated."""
_MOST_ROUNDS = 12
_LEAST_GAIN = 1e-3
"""The share of the step that a round must gain, or it was in vain."""
_MOST_IN_VAIN = 2
"""Rounds in a row; the next draws other changes."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A placement as it is changed: what a shape cannot say."""

    groups: tuple[GroupChoice, ...]
    """In the order of their first use."""
    prefetch_depth: int
    extra_window_bytes: int = 0
    """Above the least that the streamed groups need."""


Change = Callable[[Arrangement], Arrangement]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What each group may have."""

    weights: tuple[tuple[Weights, ...], ...]
    sites: tuple[tuple[Site, ...], ...]
    policies: tuple[tuple[str, ...], ...]
    largest_bytes: int
    """By which window memory grows."""


def improved(
    start: Arrangement,
    start_s: float,
    choices: Choices,
    *,
    most_simulated: int,
    least_s: Callable[[Arrangement], float],
    fits: Callable[[Arrangement], bool],
    simulated_s: Callable[[Arrangement], float],
) -> Arrangement:
    """The fastest arrangement that changes lead to.

    Args:
        start: Fits.
        start_s: Its seconds a step.
        choices: Of each group.
        most_simulated: Changes that are simulated in a round, those with the least bound.
        least_s: What no simulation is below; cheap.
        fits: Whether an arrangement is within every limit.
        simulated_s: Seconds a step; dear.
    """
    chance = random.Random(0)
    best, best_s = start, start_s
    seen = {start}
    num_in_vain = 0
    for _ in range(_MOST_ROUNDS):
        whole, parts = list(_changes_of_all(best, choices)), list(_changes_of_groups(best, choices))
        single = [*whole, *parts]
        several = [
            [*chance.choices(whole, k=chance.randrange(2)), *chance.choices(parts, k=chance.choice((1, 2, 2, 3)))]
            for _ in range(_DRAWN * most_simulated if parts else 0)
        ]
        promising: list[tuple[float, int, Arrangement]] = []
        for number, changes in enumerate([*([change] for change in single), *several]):
            candidate = best
            for change in changes:
                candidate = change(candidate)
            if candidate in seen:
                continue
            seen.add(candidate)
            bound_s = least_s(candidate)
            if bound_s < best_s * (1 - _LEAST_GAIN) and fits(candidate):
                promising.append((bound_s, number, candidate))
        before_s = best_s
        for bound_s, _, candidate in sorted(promising, key=lambda entry: entry[:2])[:most_simulated]:
            if bound_s >= best_s:
                break
            found_s = simulated_s(candidate)
            if found_s < best_s:
                best, best_s = candidate, found_s
        num_in_vain = num_in_vain + 1 if best_s > before_s * (1 - _LEAST_GAIN) else 0
        if num_in_vain == _MOST_IN_VAIN:
            break
    return best


def _changes_of_groups(of: Arrangement, choices: Choices) -> Iterator[Change]:
    for kind, allowed in (("weights", choices.weights), ("site", choices.sites), ("policy", choices.policies)):
        present = {getattr(choice, kind) for choice in of.groups}
        for before in sorted(present):
            for after in sorted({word for words in allowed for word in words} - {before}):
                places = [
                    index
                    for index, choice in enumerate(of.groups)
                    if getattr(choice, kind) == before and after in allowed[index]
                ]
                for chosen in _sets(places):
                    yield _assigned(after, chosen)


def _changes_of_all(of: Arrangement, choices: Choices) -> Iterator[Change]:
    for depth in {of.prefetch_depth + 1, max(0, of.prefetch_depth - 1)} - {of.prefetch_depth}:
        yield partial(replace, prefetch_depth=depth)
    for extra in (of.extra_window_bytes + choices.largest_bytes, of.extra_window_bytes - choices.largest_bytes):
        if extra >= 0:
            yield partial(replace, extra_window_bytes=extra)


def _assigned(word: Weights | Site | str, places: Sequence[int]) -> Change:
    def changed(choice: GroupChoice) -> GroupChoice:
        if isinstance(word, Weights):  # a table that stays on the host is updated there
            return replace(choice, weights=word, site=Site.HOST if word is Weights.HOST else choice.site)
        if isinstance(word, Site):
            comes = choice.weights is Weights.HOST and word is not Site.HOST
            return replace(choice, site=word, weights=Weights.STREAMED if comes else choice.weights)
        return replace(choice, policy=word)

    def change(arrangement: Arrangement) -> Arrangement:
        groups = list(arrangement.groups)
        for index in places:
            groups[index] = changed(groups[index])
        return replace(arrangement, groups=tuple(groups))

    return change


def _sets(places: Sequence[int]) -> Iterator[Sequence[int]]:
    """One, two, four and so on of them: the first, the last, and spread over all; each alone where there are few."""
    if len(places) <= 8:
        yield from ([place] for place in places)
    count = 1
    while count <= len(places):
        yield places[:count]
        yield places[-count:]
        yield [places[index * len(places) // count] for index in range(count)]
        count *= 2
