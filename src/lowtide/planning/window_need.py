"""How many device bytes the windows of streamed groups need at once, and optimizer state that visits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from lowtide.activations.policy import Policy, Recompute
from lowtide.memory.groups import REST
from lowtide.memory.layout_types import GroupSpec, Layout
from lowtide.planning.plan import Plan, Weights


def window_bytes_needed(layout: Layout, plan: Plan) -> int:
    """What a streamed group and its `prefetch_depth` successors need at once, at worst.

    Successors are counted around the end: the last groups of a forward are followed by the first of the next. Groups
    that are open beside them (tied ones, and those of modules around them, and in a recomputed segment those that run again
    beside its last) are counted with them.
    """
    streamed = {group.name for group in plan.groups if group.weights is Weights.STREAMED}
    return window_bytes(layout, streamed, plan.prefetch_depth, plan.activations)


def window_bytes(
    layout: Layout, streamed: Collection[str], prefetch_depth: int, activations: Mapping[str, Policy] | None = None
) -> int:
    """`window_bytes_needed` for groups by name, before there is a plan."""
    sizes = group_sizes(layout)
    opened = _opened(layout, streamed)
    at_once = _windows_at_once(layout, streamed, prefetch_depth) + _run_again(layout, streamed, activations)
    return max((_total(sizes, [opened[window] for window in windows]) for windows in at_once), default=0)


def largest_window(
    layout: Layout, streamed: Collection[str], activations: Mapping[str, Policy] | None = None
) -> tuple[str, int]:
    """The window that needs most, and its bytes, with what runs again beside it: less than that cannot run at all.

    ("", 0) without any.
    """
    sizes = group_sizes(layout)
    opened = _opened(layout, streamed)
    at_once = [[window] for window in opened] + _run_again(layout, streamed, activations)
    needs = [(windows[0], _total(sizes, [opened[window] for window in windows])) for windows in at_once]
    return max(needs, key=lambda need: need[1], default=("", 0))


def most_visitors(layout: Layout, by_group: Mapping[str, int]) -> int:
    """Device bytes of what visits beside a backward, at once, from the bytes of each group's visitors.

    They are sent for when the backward reaches a window, and go when the group's gradients are complete: those of a tied
    group, and of one that is open all the time, stay beside all others.
    """
    staying = {group.name for group in layout.groups if _is_tied(group) or REST in group.windows}
    opened = _opened(layout, by_group.keys() - staying)
    passing = max((_total(by_group, [groups]) for groups in opened.values()), default=0)
    return sum(by_group[name] for name in staying & by_group.keys()) + passing


def group_sizes(layout: Layout) -> dict[str, int]:
    """Bytes of each group's chunks, padding included."""
    sizes = dict.fromkeys((group.name for group in layout.groups), 0)
    for chunk in layout.chunks:
        sizes[chunk.group] += chunk.nbytes
    return sizes


def _opened(layout: Layout, streamed: Collection[str]) -> dict[str, frozenset[str]]:
    """By window, the streamed groups that are open while it runs: its own, tied ones, and those of modules around it."""
    groups = [group for group in layout.groups if group.name in streamed]
    return {
        window: frozenset(other.name for other in groups if any(_is_inside(window, outer) for outer in other.windows))
        for group in groups
        for window in group.windows
    }


def _windows_at_once(layout: Layout, streamed: Collection[str], prefetch_depth: int) -> list[list[str]]:
    """Lists of windows that may be on the device together."""
    ordered = [group for group in layout.groups if group.name in streamed]
    own = [group.windows[0] for group in ordered if not _is_tied(group)]
    # Where a window stands that has tied parameters only (a tied head) a layout does not say: it may be next to any.
    floating = {window for group in ordered if _is_tied(group) for window in group.windows}.difference(own)
    found = _runs(own, prefetch_depth + 1)
    if prefetch_depth == 0:
        found += [[window] for window in floating]
    elif floating:
        found += [[*run, *floating] for run in _runs(own, prefetch_depth) or [[]]]
    return found


def _run_again(layout: Layout, streamed: Collection[str], activations: Mapping[str, Policy] | None) -> list[list[str]]:
    """Pairs of windows that segments open together: while the backward of one waits for its input, those before it in its
    segment run again, one after the other; see `lowtide.activations.segments`.
    """
    policies = activations or {}
    lengths = {
        group.name: policy.segment
        for group in layout.groups
        if isinstance(policy := policies.get(group.name), Recompute) and policy.segment > 1
    }
    names = list(lengths)
    return [
        [name, other]
        for number, name in enumerate(names)
        for other in names[max(0, number - lengths[name] + 1) : number]
        if name in streamed and other in streamed
    ]


def _runs(windows: list[str], length: int) -> list[list[str]]:
    """All runs of neighbours, around the end; the whole once where it is shorter."""
    if length == 0 or not windows:
        return []
    if length >= len(windows):
        return [windows]
    return [[windows[(start + index) % len(windows)] for index in range(length)] for start in range(len(windows))]


def _total(sizes: Mapping[str, int], opened: Iterable[frozenset[str]]) -> int:
    return sum(sizes[name] for name in frozenset[str]().union(*opened))


def _is_tied(group: GroupSpec) -> bool:
    return len(group.windows) > 1


def _is_inside(window: str, outer: str) -> bool:
    return not outer or window == outer or window.startswith(f"{outer}.")
