"""Placement: which groups are resident, which chunks the device updates, the device bytes that this takes, and whether a
plan fits a layout, before anything is moved.

Counted are weights, gradients and optimizer state, and what the windows of streamed groups need at once.

Note [Gradients that wait]
In backward, gradients may come faster than the host updates: 8 billion parameters have 16 GB of them in bf16, which come
within 0.6 s, and the host gets through 8 GB/s. What finds no room holds up the backward. Where the host updates all, 2 GiB
are enough: it is busy from the first gradient to the last in any case. Where the device updates a part, which comes last,
the host could catch up meanwhile, and in the next forward; but if the backward had to go at its pace before, not much is
left to do then, and it idles. So more room is of use there, as much as all of the host's gradients, and no more than the
device's part beside the 2 GiB: a host that is slower than the backward does not catch up with more while that part is made.
It comes out of what the plan leaves of the host, see `SHARE_OF_REST`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from lowtide.activations.policy import KEEP, Policy, Recompute
from lowtide.errors import ConfigError, PlanError
from lowtide.memory.chunk import ChunkSpec, GroupSpec, Layout
from lowtide.memory.groups import REST
from lowtide.memory.parts import Part, equal_parts, owned_parts, owners
from lowtide.planning.plan import COMING, Budgets, Collective, GroupPlan, Plan, Schedule, Sharding, Site, Weights
from lowtide.units import format_bytes


def visitor_bytes_on_device(layout: Layout, plan: Plan, *, state_bytes_per_parameter_byte: float) -> int:
    """What optimizer state that lies on the host takes of the device while it visits, at most at once.

    Where it visits for one update after the other, that is the largest chunk's. In backward that of a whole group is sent
    for when its window opens; groups whose chunks all stay on the device have none. What is on its way home is kept
    within the mover's bytes, as gradients are, and not counted.
    """
    by_window: dict[str, int] = {}
    largest = 0
    for group in plan.groups:
        chunks = [
            chunk for chunk in zip(layout.chunks_of(group.name), group.sites, strict=True) if is_trained(chunk[0])
        ]
        needed = [
            state_bytes(chunk.nbytes, state_bytes_per_parameter_byte) for chunk, site in chunks if site is Site.PAGED
        ]
        has_window = group.weights is Weights.STREAMED or any(site is Site.HOST for _, site in chunks)
        if plan.schedule is Schedule.IN_BACKWARD and has_window and needed:
            by_window[group.name] = sum(needed)
        else:
            largest = max(largest, *needed, 0)
    return largest + _most_visitors(layout, by_window)


def gradient_bytes(updated: dict[str, int], schedule: Schedule) -> int:
    """Device bytes of finished gradients, from the bytes of each group that the device updates."""
    return max(updated.values(), default=0) if schedule is Schedule.IN_BACKWARD else sum(updated.values())


def state_bytes(updated_bytes: int, state_bytes_per_parameter_byte: float) -> int:
    """Bytes of optimizer state beside so many bytes of parameters."""
    if not 0 <= state_bytes_per_parameter_byte < math.inf:
        raise ConfigError(
            f"state_bytes_per_parameter_byte is {state_bytes_per_parameter_byte}; give 0 or more, such as 2 for Adam in "
            "the parameters' own dtype",
            key="state_bytes_per_parameter_byte",
        )
    return math.ceil(updated_bytes * state_bytes_per_parameter_byte)


def assemble(
    layout: Layout,
    *,
    weights: Mapping[str, Weights],
    sites: Mapping[str, Site],
    schedule: Schedule,
    budgets: Budgets,
    prefetch_depth: int = 1,
    cached_buffers: int = 2,
    defragment_every: int = 0,
    activations: Mapping[str, Policy] | None = None,
    sharding: Sharding | None = None,
) -> Plan:
    """The plan with these weights by group and these update sites by chunk; what is not named is streamed, and the host's."""
    policies = activations or {}
    return Plan(
        groups=tuple(
            GroupPlan(
                name=group.name,
                weights=weights.get(group.name, Weights.STREAMED),
                sites=tuple(sites.get(chunk.name, Site.HOST) for chunk in layout.chunks_of(group.name)),
                activation=policies.get(group.name, KEEP),
                weight_bytes=group.nbytes,
            )
            for group in layout.groups
        ),
        fingerprint=layout.fingerprint,
        chunk_bytes=layout.chunk_bytes,
        schedule=schedule,
        prefetch_depth=prefetch_depth,
        cached_buffers=cached_buffers,
        defragment_every=defragment_every,
        budgets=budgets,
        sharding=sharding,
    )


def by_first_use(layout: Layout) -> list[str]:
    """Names of the groups in the order in which a step first needs them: the rest of the model from its beginning."""
    return [group.name for group in sorted(layout.groups, key=lambda group: not is_always_open(group))]


def most_that_fit(names: list[str], needed: Callable[[frozenset[str]], int], room_bytes: int) -> frozenset[str] | None:
    """The longest beginning of `names` whose need is within the room; None where not even the empty one is.

    The need must not fall when a name is added: the search is a bisection.
    """
    if needed(frozenset()) > room_bytes:
        return None
    fitting = bisect_right(range(1, len(names) + 1), room_bytes, key=lambda count: needed(frozenset(names[:count])))
    return frozenset(names[:fitting])


def is_always_open(group: GroupSpec) -> bool:
    """Whether the group is needed for as long as the model runs, so that streaming it saves nothing in a step."""
    return REST in group.modules


def is_one_module(group: GroupSpec) -> bool:
    """Whether the group is what one call of its module needs, so that the call can have a policy."""
    return group.name != REST and group.modules == (group.name,)


def is_trained(chunk: ChunkSpec) -> bool:
    """Whether the chunk's parameters have gradients; trained and frozen ones do not share a chunk."""
    return chunk.spans[0].parameter.requires_grad


def window_bytes_needed(layout: Layout, plan: Plan) -> int:
    """What a streamed group and its `prefetch_depth` successors need at once, at worst.

    Successors are counted around the end: the last groups of a forward are followed by the first of the next. Groups
    that are open beside them (tied ones, and those of modules around them, and in a recomputed segment those that run again
    beside its last) are counted with them.
    """
    streamed = {group.name for group in plan.groups if group.weights in COMING}
    return window_bytes(layout, streamed, plan.prefetch_depth, plan.activations)


def window_bytes(
    layout: Layout, streamed: Collection[str], prefetch_depth: int, activations: Mapping[str, Policy] | None = None
) -> int:
    """`window_bytes_needed` for groups by name, before there is a plan."""
    return Windows(layout).needed_bytes(streamed, prefetch_depth, activations)


class Windows:
    """The windows of one layout. A search asks for their bytes under thousands of placements.

    Args:
        layout: The model's.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sizes = group_sizes(layout)
        self._inside = _opened(layout, self._sizes.keys())

    def needed_bytes(
        self, streamed: Collection[str], prefetch_depth: int, activations: Mapping[str, Policy] | None = None
    ) -> int:
        """`window_bytes`."""
        layout, among = self._layout, frozenset(streamed)
        at_once = _windows_at_once(layout, among, prefetch_depth) + _run_again(layout, among, activations)
        return max(
            (_total(self._sizes, [self._inside[window] & among for window in windows]) for windows in at_once),
            default=0,
        )


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


def _most_visitors(layout: Layout, by_group: Mapping[str, int]) -> int:
    """Device bytes of what visits beside a backward, at once, from the bytes of each group's visitors.

    They are sent for when the backward reaches a window, and go when the group's gradients are complete: those of a tied
    group, and of one that is open all the time, stay beside all others.
    """
    staying = {group.name for group in layout.groups if _is_tied(group) or REST in group.modules}
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
        window: frozenset(other.name for other in groups if any(_is_inside(window, outer) for outer in other.modules))
        for group in groups
        for window in group.modules
    }


def _windows_at_once(layout: Layout, streamed: Collection[str], prefetch_depth: int) -> list[list[str]]:
    """Lists of windows that may be on the device together."""
    ordered = [group for group in layout.groups if group.name in streamed]
    own = [group.modules[0] for group in ordered if not _is_tied(group)]
    # Where a window stands that has tied parameters only (a tied head) a layout does not say: it may be next to any.
    floating = {window for group in ordered if _is_tied(group) for window in group.modules}.difference(own)
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
    return len(group.modules) > 1


def _is_inside(window: str, outer: str) -> bool:
    return not outer or window == outer or window.startswith(f"{outer}.")


def check_plan(plan: Plan, layout: Layout, *, state_bytes_per_parameter_byte: float = 0.0) -> None:
    """Refuse a plan that was made for another model, or whose budgets cannot hold the weights.

    Only the weights on the device are known here: those of resident groups, and the windows of streamed ones; and, where the
    optimizer is known, the state that visits the device. Gradients, other optimizer state and activations come on top.

    Args:
        plan: To be checked.
        layout: The model's.
        state_bytes_per_parameter_byte: Optimizer state beside each byte of trained parameters; 0 where it is not known
            yet.

    Raises:
        PlanError: The message says which groups differ, or how many bytes are needed, for which group, and what to
            change.
    """
    _check_groups(plan, layout)
    if plan.fingerprint != layout.fingerprint:
        raise PlanError(
            f"the plan was made for another model: its fingerprint is {plan.fingerprint}, this model's is "
            f"{layout.fingerprint}. The groups have the same names and sizes, so a parameter's name, shape, dtype or "
            "requires_grad has changed, or what is tied; make the plan again"
        )
    _check_activations(plan, layout)
    _check_kept_on_host(plan, layout)
    visiting = visitor_bytes_on_device(layout, plan, state_bytes_per_parameter_byte=state_bytes_per_parameter_byte)
    _check_device(plan, layout, visiting)
    _check_host(plan, layout)


def _check_groups(plan: Plan, layout: Layout) -> None:
    planned = Counter(group.name for group in plan.groups)
    found = {group.name: group.nbytes for group in layout.groups}
    differences = [f"{name!r} is planned {count} times" for name, count in planned.items() if count > 1]
    if missing := [name for name in found if name not in planned]:
        differences.append(f"{_names(missing)} of the model {'is' if len(missing) == 1 else 'are'} not in the plan")
    if unknown := [name for name in planned if name not in found]:
        differences.append(f"{_names(unknown)} of the plan {'is' if len(unknown) == 1 else 'are'} not in the model")
    for group in plan.groups:
        if group.name not in found:
            continue
        if group.weight_bytes is not None and group.weight_bytes != found[group.name]:
            differences.append(
                f"{group.name!r} was planned with {format_bytes(group.weight_bytes)} of weights "
                f"({group.weight_bytes:,} bytes) and has {format_bytes(found[group.name])} ({found[group.name]:,} bytes)"
            )
        elif len(group.sites) != (num_chunks := len(layout.chunks_of(group.name))):
            differences.append(
                f"{group.name!r} has {num_chunks} chunks of at most {format_bytes(layout.chunk_bytes)}, and update "
                f"sites for {len(group.sites)} of {format_bytes(plan.chunk_bytes)}"
            )
    if differences:
        shown = differences[:5] + ([f"and {len(differences) - 5} more"] if len(differences) > 5 else [])
        raise PlanError(
            f"the plan does not fit this model: {'; '.join(shown)}. Make the plan again for this model, or lay the "
            f"model out with the plan's chunk size of {plan.chunk_bytes} bytes"
        )


def _names(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    kind = "the group" if len(names) == 1 else "the groups"
    return f"{kind} {shown}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _weight_bytes(plan: Plan, layout: Layout, weights: Weights) -> int:
    names = {group.name for group in plan.groups if group.weights is weights}
    return sum(chunk.nbytes for chunk in layout.chunks if chunk.group in names)


def _check_activations(plan: Plan, layout: Layout) -> None:
    specs = {group.name: group for group in layout.groups}
    for group in plan.groups:
        if group.activation != KEEP and not is_one_module(specs[group.name]):
            raise PlanError(
                f"group {group.name or '(rest of the model)'!r} is not one module's call, and the plan has "
                f"{group.activation!r} for it; give it Keep()",
                group=group.name,
            )


def can_stay_on_host(group: GroupSpec) -> bool:
    """Whether the group is one table in one call, as an embedding is."""
    return len(group.parameters) == 1 and len(group.parameters[0].shape) == 2 and group.modules == (group.name,)


def _check_kept_on_host(plan: Plan, layout: Layout) -> None:
    specs = {group.name: group for group in layout.groups}
    for group in plan.groups:
        if group.weights is not Weights.HOST:
            continue
        spec = specs[group.name]
        if spec.name != REST and len(spec.modules) > 1:
            users = " and ".join(repr(window) if window else "the model itself" for window in spec.modules)
            raise PlanError(
                f"group {group.name!r} is tied: {users} use the same parameter, and only an embedding that nothing else uses "
                "can stay on the host; stream it instead, or untie it (give the other its own Parameter)",
                group=group.name,
            )
        if not can_stay_on_host(spec):
            raise PlanError(
                f"group {group.name or '(rest of the model)'!r} has {len(spec.parameters)} parameters in "
                f"{len(spec.modules)} module calls, and only an embedding, one table in one call, can stay on the host; "
                "stream it instead",
                group=group.name,
            )
        if any(site is not Site.HOST for site in group.sites):
            raise PlanError(
                f"group {group.name!r} stays on the host, and its update is on the device; update it on the host",
                group=group.name,
            )


def parts_by_chunk(plan: Plan, layout: Layout) -> dict[str, tuple[Part, ...]]:
    """By the name of each chunk that is spread over ranks, what each of them keeps of it."""
    if plan.sharding is None:
        return {}
    shards = plan.sharding.shards
    spread = {group.name for group in plan.groups if group.weights in COMING}
    chunks = [chunk for chunk in layout.chunks if chunk.group in spread]
    if plan.sharding.collective is Collective.GATHER:
        return {chunk.name: equal_parts(chunk, shards) for chunk in chunks}
    owner = owners(chunks, shards)
    return {chunk.name: owned_parts(chunk, owner[chunk.name], shards) for chunk in chunks}


def _part_bytes(plan: Plan, layout: Layout, weights: Weights) -> int:
    """Bytes of such groups on one rank, at most."""
    if plan.sharding is None:
        return _weight_bytes(plan, layout, weights)
    names = {group.name for group in plan.groups if group.weights is weights}
    parts = parts_by_chunk(plan, layout)
    held = [parts[chunk.name] for chunk in layout.chunks if chunk.group in names]
    return max(sum(each[rank].nbytes for each in held) for rank in range(plan.sharding.shards))


def _check_device(plan: Plan, layout: Layout, visiting: int) -> None:
    streamed = {group.name for group in plan.groups if group.weights in COMING}
    window, alone = largest_window(layout, streamed, plan.activations)
    shorter = ["recompute in segments of 1"] if largest_window(layout, streamed)[1] < alone else []
    budgets = plan.budgets
    if budgets.window_bytes is not None and budgets.window_bytes < alone:
        raise PlanError(
            f"window_memory is {format_bytes(budgets.window_bytes)} ({budgets.window_bytes:,} bytes), and the streamed "
            f"weights that {window or 'the model'!r} needs at once are {format_bytes(alone)} ({alone:,} bytes); "
            + ", or ".join(
                [
                    "raise window_memory",
                    *shorter,
                    "tile that module's layers into groups of their own (lowtide.activations.tile)",
                ]
            ),
            needed_bytes=alone,
            group=window,
        )
    if budgets.device_bytes is None:
        return
    resident = _weight_bytes(plan, layout, Weights.RESIDENT)
    if plan.sharding is not None:
        resident += _part_bytes(plan, layout, Weights.SHARDED)
    windows = window_bytes_needed(layout, plan) if budgets.window_bytes is None else budgets.window_bytes
    needed = resident + windows + visiting
    if needed <= budgets.device_bytes:
        return
    advice = [f"raise the device budget to more than {format_bytes(needed)}"]
    if resident:
        advice.append("stream more groups")
    if plan.prefetch_depth and windows > alone:
        advice.append(f"lower prefetch_depth from {plan.prefetch_depth}")
    advice += shorter
    if visiting:
        advice.append("update on the host")
    advice.append("tile the layers of that module (lowtide.activations.tile)" if alone else "use a smaller model")
    visitors = (
        f", and optimizer state that visits the device ('paged') takes {format_bytes(visiting)} ({visiting:,} bytes)"
    )
    raise PlanError(
        f"the device budget of {format_bytes(budgets.device_bytes)} cannot hold the weights: "
        f"{format_bytes(resident)} are resident, and the windows of streamed groups need {format_bytes(windows)} "
        f"({format_bytes(alone)} of it for {window or 'the model'!r} alone){visitors if visiting else ''}, {needed:,} bytes "
        f"together; {', or '.join(advice)}",
        needed_bytes=needed,
        group=window if alone else None,
    )


def _check_host(plan: Plan, layout: Layout) -> None:
    streamed = _part_bytes(plan, layout, Weights.STREAMED) + _weight_bytes(plan, layout, Weights.HOST)
    limit = plan.budgets.host_bytes
    if limit is not None and streamed > limit:
        raise PlanError(
            f"the host budget of {format_bytes(limit)} cannot hold the {format_bytes(streamed)} ({streamed:,} bytes) of "
            "streamed weights; raise it, or keep more groups resident",
            needed_bytes=streamed,
        )


ENOUGH_BYTES = 1 << 31
"""Where the host updates all."""
SHARE_OF_REST = 0.25
"""The share of what the plan leaves of the host that may be taken for more than is needed."""


def staging_for(wanted: int | None, *, least: int, on_host: int, on_device: int, waits: bool) -> tuple[int, int]:
    """Bytes that a plan takes in any case, and as many as it could make use of.

    Args:
        wanted: What the plan says; None leaves it to us.
        least: What the largest gradient needs to go on its way.
        on_host: Bytes of gradients that go to the host for updates there.
        on_device: Bytes of what the device updates.
        waits: Whether gradients wait there for updates that take their time, which more room would hide.

    Raises:
        PlanError: The plan has less than the least.

    Example:
        >>> needed, useful = staging_for(None, least=100, on_host=6 << 30, on_device=1 << 30, waits=True)
        >>> needed >> 30, useful >> 30
        (2, 3)
    """
    if not least:
        return 0, 0
    if wanted is not None and wanted < least:
        raise PlanError(
            f"staging_memory is {format_bytes(wanted)} ({wanted:,} bytes), and gradients on their way to the host need at least "
            f"{format_bytes(least)} ({least:,} bytes); give that much, or smaller chunks",
            needed_bytes=least,
        )
    if wanted is not None or not waits:
        taken = _rounded(least if wanted is None else wanted)
        return taken, taken
    needed, useful = min(ENOUGH_BYTES, on_host), min(ENOUGH_BYTES + on_device, on_host)
    return _rounded(max(least, needed)), _rounded(max(least, useful))


def granted_staging_bytes(needed: int, *, useful: int, rest_bytes: int) -> int:
    """Staging bytes that a plan takes: what it needs, and as much of what it could use as a share of the host's rest allows.

    Args:
        needed: Staging bytes that the plan takes in any case.
        useful: Staging bytes that it could make use of.
        rest_bytes: What the plan, with what it needs, leaves of the host.

    Example:
        >>> granted_staging_bytes(1024, useful=9216, rest_bytes=8192)
        3072
    """
    return min(useful, needed + max(0, int(SHARE_OF_REST * rest_bytes)) // 512 * 512)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // 512) * 512 + 4096
