"""StepCosts: what each part of a step takes, in seconds and bytes, under each activation policy.

A step is a sequence of *uses*: a module call of one group, forward or backward, and the loss between them. Each use takes
time of the device, launches by the host, and memory beside the weights. Both depend on the group's activation policy. They
are read off traces in which blocks of one kind run under different policies side by side, so that one trace prices all
policies of a deep model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from lowtide.activations.policy import OTHERS
from lowtide.memory.chunk import GroupSpec, Layout
from lowtide.memory.groups import REST
from lowtide.planning.placement import group_sizes, is_one_module, is_trained
from lowtide.tracing.step_trace import Category, Phase, StepTrace

PRICED = ("keep", "selective", "recompute", "offload", "offload/all")
"""Words of the policies that are read off probes. Shallow models do without the last."""
POLICIES = ("keep", "selective", "offload/all", "recompute", "recompute/2", "recompute/4", "offload")
"""Words of the policies that a step can be told under, roughly from the fastest and largest to the smallest. What segments
take follows from `recompute` and from which blocks are neighbours."""
_RUN = 3
"""Blocks in a row that have one policy in a probe: the one in the middle is not disturbed by its neighbours' policies."""
_BESIDE_WEIGHTS = frozenset({Category.ACTIVATIONS, Category.TEMPORARIES, Category.WORKSPACE})


@dataclass(frozen=True, slots=True, kw_only=True)
class UseCost:
    """What one use takes under one policy."""

    device_s: float = 0.0
    """In which the device computes."""
    num_ops: int = 0
    """Operators that the host launches."""
    num_watched_ops: int = 0
    """Those of them that a selective policy looks at in Python, one by one."""
    grown_bytes: int = 0
    """Device bytes beside weights, gradients and state: after the use less before it. Negative in a backward."""
    peak_bytes: int = 0
    """The same at the highest point of the use, less before it."""

    def then(self, other: UseCost) -> UseCost:
        """The cost of this and then the other."""
        return UseCost(
            device_s=self.device_s + other.device_s,
            num_ops=self.num_ops + other.num_ops,
            num_watched_ops=self.num_watched_ops + other.num_watched_ops,
            grown_bytes=self.grown_bytes + other.grown_bytes,
            peak_bytes=max(self.peak_bytes, self.grown_bytes + other.peak_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One call of a group's module, or its backward; or what runs outside of all groups."""

    window: str
    """Path of the module; "" for what belongs to no group's module: the loss, and the rest of the model."""
    groups: tuple[str, ...]
    """The groups that its call needs: its own, and tied ones."""
    phase: Phase
    costs: Mapping[str, UseCost]
    """By the policy's word. One entry, `keep`, where the group cannot have another."""

    def under(self, policy: str) -> UseCost:
        """The cost under a policy, in a segment of one; where the module cannot have it, the one that it has."""
        return self.costs.get(priced_as(policy)) or next(iter(self.costs.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCosts:
    """What one group's weights are, beside its uses."""

    name: str
    kind: int
    """Groups of one kind have parameters of the same shapes and types, and so the same costs."""
    weight_bytes: int
    """As they lie in chunks."""
    trained_bytes: int
    """The part of them that has gradients."""
    state_bytes: int
    """Optimizer state beside them."""
    num_trained: int
    """Parameters that have gradients."""
    policies: tuple[str, ...]
    """Those that it can have."""
    is_table: bool = False
    """Whether it is an embedding that could be looked up and updated on the host, and never come to the device."""
    stashed_bytes: Mapping[str, int] = field(default_factory=dict)
    """What a policy sends to the host in the forwards of a step, and brings back."""


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """A step's uses in their order, and its groups."""

    uses: tuple[Use, ...]
    groups: Mapping[str, GroupCosts]
    start_bytes: int
    """Device bytes beside weights, gradients and state when the step begins: the batch, workspaces."""

    def under(self, policies: Mapping[str, str]) -> list[UseCost]:
        """What each use takes where groups have these policies."""
        costs = [use.under(policies.get(use.window, "keep")) for use in self.uses]
        for segment in self.segments(policies):
            self._share_an_input(segment, costs)
        for first, last, num_bytes in self._stashes(policies):
            # Each backward brings back what the next one needs: the first needs its own as well, the last brings nothing.
            own = costs[first]
            costs[first] = replace(own, grown_bytes=own.grown_bytes + num_bytes, peak_bytes=own.peak_bytes + num_bytes)
            costs[last] = replace(costs[last], grown_bytes=costs[last].grown_bytes - num_bytes)
        return costs

    def _share_an_input(self, segment: Sequence[tuple[int, int]], costs: list[UseCost]) -> None:
        """Inside a segment no input is kept but the first. The backward of the last block runs the others again, and holds
        their outputs until their own backward has taken them.
        """
        (*again, (_, last)) = segment
        grown = peak = 0
        for (forward, _), (later, _) in zip(again, segment[1:], strict=True):
            kept = max(0, costs[later].grown_bytes)
            peak = max(peak, grown + costs[forward].peak_bytes)
            grown += kept
            costs[later] = replace(costs[later], grown_bytes=costs[later].grown_bytes - kept)
        own, runs = costs[last], [costs[forward] for forward, _ in again]
        costs[last] = replace(
            own,
            device_s=own.device_s + sum(run.device_s for run in runs),
            num_ops=own.num_ops + sum(run.num_ops for run in runs),
            grown_bytes=own.grown_bytes + grown,
            peak_bytes=max(peak, grown + own.peak_bytes),
        )

    def _stashes(self, policies: Mapping[str, str]) -> list[tuple[int, int, int]]:
        """Blocks in a row that bring activations back: the first and the last of their backwards, and the bytes of one."""
        found: list[tuple[int, int, int]] = []
        for window, (_, backward) in reversed(self._once.items()):
            group = self.groups.get(window)
            num_bytes = 0 if group is None else group.stashed_bytes.get(policies.get(window, "keep"), 0)
            if num_bytes and found and found[-1][1:] == (backward - 1, num_bytes):
                found[-1] = found[-1][0], backward, num_bytes
            elif num_bytes:
                found.append((backward, backward, num_bytes))
        return found

    def segments(self, policies: Mapping[str, str]) -> list[list[tuple[int, int]]]:
        """Blocks in a row that share a kept input: the positions of each one's forward and backward, two blocks or more."""
        if not any(word.startswith(_SEGMENT) for word in policies.values()):
            return []
        found: list[list[tuple[int, int]]] = []
        before = -2
        for window, (forward, backward) in self._once.items():
            word = policies.get(window, "keep")
            if not word.startswith(_SEGMENT):
                continue
            if forward == before + 1 and len(found[-1]) < int(word.removeprefix(_SEGMENT)):
                found[-1].append((forward, backward))
            else:
                found.append([(forward, backward)])
            before = forward
        return [segment for segment in found if len(segment) > 1]

    @cached_property
    def _once(self) -> dict[str, tuple[int, int]]:
        """The positions of windows with one forward and one backward, in the order of the forward."""
        places: dict[str, list[int]] = {}
        for position, use in enumerate(self.uses):
            places.setdefault(use.window, []).append(position)
        return {
            window: (found[0], found[1])
            for window, found in places.items()
            if [self.uses[position].phase for position in found] == [Phase.FORWARD, Phase.BACKWARD]
        }


_SEGMENT = "recompute/"


def priced_as(policy: str) -> str:
    """The policy whose price a block has alone."""
    return "recompute" if policy.startswith(_SEGMENT) else policy


def probe_policies(layout: Layout) -> list[dict[str, str]]:
    """Policies by group for the traces from which `read_costs` prices all policies.

    One trace where each kind of block has enough members; else one for each policy.
    """
    kinds: dict[object, list[str]] = {}
    for group in layout.groups:
        if _can_have_policies(group):
            kinds.setdefault(_kind(group), []).append(group.name)
    if not kinds:
        return [{}]
    fewest = min(map(len, kinds.values()))
    for num_policies in (len(PRICED), len(PRICED) - 1):
        if fewest >= _RUN * num_policies:
            mixed = {OTHERS: "recompute"}
            for names in kinds.values():
                chosen = names[: _RUN * num_policies]
                mixed |= {name: PRICED[number // _RUN] for number, name in enumerate(chosen)}
            return [mixed]
    return [{OTHERS: policy} for policy in PRICED]


def read_costs(
    layout: Layout,
    probes: Sequence[tuple[Mapping[str, str], StepTrace]],
    state_bytes: Mapping[str, int],
    tables: Collection[str] = (),
) -> StepCosts:
    """The costs of a step from its probes.

    Args:
        layout: The model's.
        probes: What `probe_policies` asked for, each with the trace of a step in which all groups are streamed.
        state_bytes: Optimizer state of each group.
        tables: Groups that are embeddings and could stay on the host.
    """
    windows = _windows(layout)
    first_policies, first = probes[0]
    sequence = [(use.window, use.phase) for use in _uses_in(first, windows, first_policies)]
    priced: dict[tuple[int, int], dict[str, UseCost]] = {}
    kinds = _kinds(layout)
    own: list[UseCost] = []
    for number, (policies, trace) in enumerate(probes):
        uses = _uses_in(trace, windows, policies)
        if [(use.window, use.phase) for use in uses] != sequence:
            # A policy that changes which modules run when: the order of the first probe stands, its costs by position do not.
            uses = _aligned(uses, sequence)
        samples = _samples(layout, policies)
        counted: dict[str, int] = {}
        for use in uses:
            position = counted[use.window] = counted.get(use.window, -1) + 1
            (policy, cost), *_ = use.costs.items()
            if use.window in samples:
                priced.setdefault((kinds[use.window], position), {})[policy] = cost
            if number == 0:
                own.append(cost)
    found = _assemble(layout, sequence, own, priced, state_bytes, first)
    groups = {name: replace(group, is_table=name in tables) for name, group in found.groups.items()}
    return replace(found, groups=groups)


def _assemble(
    layout: Layout,
    sequence: Sequence[tuple[str, Phase]],
    own: Sequence[UseCost],
    priced: Mapping[tuple[int, int], Mapping[str, UseCost]],
    state_bytes: Mapping[str, int],
    trace: StepTrace,
) -> StepCosts:
    uses: list[Use] = []
    counted: dict[str, int] = {}
    stashed: dict[str, dict[str, int]] = {}
    windows, kinds = _windows(layout), _kinds(layout)
    for (window, phase), cost in zip(sequence, own, strict=True):
        position = counted[window] = counted.get(window, -1) + 1
        costs = _with_watched(phase, priced.get((kinds[window], position), {})) if window in kinds else {}
        uses.append(Use(window=window, groups=windows.get(window, ()), phase=phase, costs=costs or {"keep": cost}))
        if phase is Phase.FORWARD:
            for policy, instead_of in (("offload", "recompute"), ("offload/all", "keep")):
                if {policy, instead_of} <= costs.keys():
                    sent = stashed.setdefault(window, {})
                    sent[policy] = sent.get(policy, 0) + max(
                        0, costs[instead_of].grown_bytes - costs[policy].grown_bytes
                    )
    by_window = {use.window: tuple(use.costs) for use in uses}
    sizes = group_sizes(layout)
    groups = {}
    for group_spec in layout.groups:
        trained = [chunk for chunk in layout.chunks_of(group_spec.name) if is_trained(chunk)]
        groups[group_spec.name] = GroupCosts(
            name=group_spec.name,
            kind=kinds[group_spec.name],
            weight_bytes=sizes[group_spec.name],
            trained_bytes=sum(chunk.nbytes for chunk in trained),
            state_bytes=state_bytes.get(group_spec.name, 0),
            num_trained=sum(each.requires_grad for each in group_spec.parameters),
            policies=tuple(
                policy for policy in POLICIES if priced_as(policy) in by_window.get(group_spec.name, ("keep",))
            ),
            stashed_bytes=stashed.get(group_spec.name, {}),
        )
    start = sum(
        allocation.bytes
        for allocation in trace.allocations
        if allocation.born is None and allocation.category in _BESIDE_WEIGHTS
    )
    return StepCosts(uses=tuple(uses), groups=groups, start_bytes=start)


def _with_watched(phase: Phase, costs: Mapping[str, UseCost]) -> dict[str, UseCost]:
    """A selective policy looks at every operator of the forward, and again at those that the backward repeats."""
    if not {"keep", "selective"} <= costs.keys():
        return dict(costs)
    keep, selective = costs["keep"], costs["selective"]
    repeated = 0 if phase is Phase.FORWARD else keep.num_ops
    num_watched = max(0, selective.num_ops - repeated)
    return {**costs, "selective": replace(selective, num_watched_ops=num_watched)}


def _can_have_policies(group: GroupSpec) -> bool:
    return group.is_block and is_one_module(group)


def _kind(group: GroupSpec) -> object:
    shapes = tuple((each.shape, each.dtype, each.requires_grad) for each in group.parameters)
    return shapes if _can_have_policies(group) else group.name


def _kinds(layout: Layout) -> dict[str, int]:
    numbers: dict[object, int] = {}
    return {group.name: numbers.setdefault(_kind(group), len(numbers)) for group in layout.groups}


def _samples(layout: Layout, policies: Mapping[str, str]) -> frozenset[str]:
    """Groups whose cost in a probe stands for their kind: the middle one of each run of a policy, or of all."""
    by_kind: dict[tuple[object, str], list[str]] = {}
    for group in layout.groups:
        if _can_have_policies(group):
            policy = policies.get(group.name)
            if policy is None and len(policies) == 1:
                policy = policies[OTHERS]
            if policy is not None:
                by_kind.setdefault((_kind(group), policy), []).append(group.name)
    return frozenset(names[len(names) // 2] for names in by_kind.values())


def _windows(layout: Layout) -> dict[str, tuple[str, ...]]:
    """By the path of each module with a window, the groups that its call needs."""
    windows: dict[str, tuple[str, ...]] = {}
    for group in layout.groups:
        for module in group.modules:
            if module != REST:
                windows[module] = (*windows.get(module, ()), group.name)
    return windows


def _uses_in(trace: StepTrace, windows: Mapping[str, tuple[str, ...]], policies: Mapping[str, str]) -> list[Use]:
    """The uses of a traced step, each with its cost under its own policy.

    What runs outside of groups belongs to the next use in the forward, as its inputs are made ready, and to the one before
    in the backward, whose gradients it sums. The loss stands alone. Updates are left out: they are the plan's.
    """
    before, after, highest = _levels(trace)
    found: list[tuple[str, Phase, UseCost]] = []
    waiting: UseCost | None = None
    level = before
    owners: dict[str, str] = {}
    for index, op in enumerate(trace.ops):
        if op.phase is Phase.UPDATE:
            continue
        end, top = after.get(index, level), highest.get(index, level)
        cost = UseCost(device_s=op.seconds, num_ops=1, grown_bytes=end - level, peak_bytes=max(0, top - level))
        level = end
        group = owners.get(op.module)
        if group is None:
            group = owners[op.module] = _owner(op.module, windows)
        phase = Phase.FORWARD if op.phase is Phase.LOSS else op.phase
        is_loose = group == REST and op.phase is not Phase.LOSS
        if is_loose and phase is Phase.FORWARD:
            waiting = cost if waiting is None else waiting.then(cost)
            continue
        if waiting is not None:
            cost, waiting = waiting.then(cost), None
        same = bool(found) and found[-1][1] is phase and (found[-1][0] == group or (is_loose and found[-1][0] != REST))
        if same:
            found[-1] = (found[-1][0], phase, found[-1][2].then(cost))
        else:
            found.append((group, phase, cost))
    if waiting is not None:
        found.append((REST, Phase.FORWARD, waiting))
    return [
        Use(
            window=window,
            groups=windows.get(window, ()),
            phase=phase,
            costs={policies.get(window, policies.get(OTHERS, "keep")): cost},
        )
        for window, phase, cost in _joined(found)
    ]


def _joined(found: Iterable[tuple[str, Phase, UseCost]]) -> list[tuple[str, Phase, UseCost]]:
    """Neighbours of one group and phase as one."""
    joined: list[tuple[str, Phase, UseCost]] = []
    for group, phase, cost in found:
        if joined and joined[-1][:2] == (group, phase):
            joined[-1] = (group, phase, joined[-1][2].then(cost))
        else:
            joined.append((group, phase, cost))
    return joined


def _aligned(uses: Sequence[Use], sequence: Sequence[tuple[str, Phase]]) -> list[Use]:
    """The uses in the order of another probe: the first of each group and phase, and nothing where there is none."""
    left: dict[tuple[str, Phase], list[Use]] = {}
    for use in uses:
        left.setdefault((use.window, use.phase), []).append(use)
    result = []
    for window, phase in sequence:
        same = left.get((window, phase), [])
        result.append(same.pop(0) if same else Use(window=window, groups=(), phase=phase, costs={"keep": UseCost()}))
    return result


def _levels(trace: StepTrace) -> tuple[int, dict[int, int], dict[int, int]]:
    """Bytes beside weights, gradients and state: before the step, and by operator after it and at its highest."""
    level = before = sum(
        allocation.bytes
        for allocation in trace.allocations
        if allocation.born is None and allocation.category in _BESIDE_WEIGHTS
    )
    after: dict[int, int] = {}
    highest: dict[int, int] = {}
    for event in trace.events:
        allocation = trace.allocations[event.allocation]
        if allocation.category in _BESIDE_WEIGHTS:
            highest.setdefault(event.op, level)
            level += -allocation.bytes if event.is_free else allocation.bytes
            after[event.op] = level
            highest[event.op] = max(highest[event.op], level)
    return before, after, highest


def _owner(module: str, windows: Mapping[str, tuple[str, ...]]) -> str:
    """The innermost module around a module that has a window; "" where there is none."""
    path = module
    while path:
        if path in windows:
            return path
        path = path.rpartition(".")[0]
    return REST
