"""The session's host memory: its budgets, and one locked buffer for weights, gradients and staging.

`HostNeed` says how many bytes of the host a plan takes for weights, gradients, staging and optimizer state.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowtide import compat
from lowtide.activations.policy import Offload
from lowtide.errors import BudgetError, GraphAliveError, UnsupportedOptimizerError
from lowtide.memory.chunk import LARGEST_CHUNK_BYTES, ChunkSpec, Layout, ParameterSpec
from lowtide.memory.mover import Mover
from lowtide.memory.parts import Part
from lowtide.memory.pools import AllocationCache, Arena, ArenaCounts, CacheCounts
from lowtide.memory.tier import HostMemory, Tier, host_capacity_bytes, pinned_capacity_bytes, resolve_budget
from lowtide.optim.rules import require_rule
from lowtide.optim.state import state_bytes
from lowtide.optim.update_types import Numerics
from lowtide.planning.placement import granted_staging_bytes, staging_for
from lowtide.planning.plan import Budgets, Plan, Schedule, Site, Weights
from lowtide.runtime.emulation.device import mark_of, set_mark
from lowtide.runtime.updates.proof import apart, prove, set_to_train
from lowtide.runtime.updates.worker import HostWorker


class HostPool:
    """Hands out parts of one buffer; staging goes through a cache, so that equal requests find it ready.

    Staging that is asked for while all of it is in use waits for the host's work, which gives some back: the
    computation is slowed down to the host's pace instead of taking memory without end.

    Args:
        num_bytes: Of the whole buffer, which is on the tiers' books already.
        tiers: Charged for what does not fit the buffer.
        on_move: Told where a part lies after a defragmentation.
        may_move: Whether parts may be moved now.
    """

    def __init__(
        self,
        mover: Mover,
        worker: HostWorker,
        num_bytes: int,
        tiers: Sequence[Tier],
        *,
        cached_buffers: int,
        defragment_every: int,
        on_move: Callable[[str, torch.Tensor], None],
        may_move: Callable[[], bool],
        poison: bool,
    ) -> None:
        self.buffer = mover.host_buffer(num_bytes)
        self._mover = mover
        self._worker = worker
        self._lock = threading.RLock()
        self._num_staged = 0
        self._staged: dict[int, str] = {}
        self._extras: set[int] = set()
        self._tiers = tuple(tiers)
        self._arena = Arena(
            self.buffer,
            on_move,
            may_move=lambda: may_move() and self._has_let_go(),
            defragment_every=defragment_every,
            name="host",
            poison=poison,
        )
        self.staging = AllocationCache(self._take_staging, cached_buffers, self._free_staging, poison=poison)

    def allocate(self, key: str, num_bytes: int) -> torch.Tensor:
        """A part that stays until `free`."""
        with self._lock:
            return self._arena.allocate(key, num_bytes)

    def free(self, key: str) -> None:
        """Give a part back."""
        with self._lock:
            self._arena.free(key)

    def tick(self) -> None:
        """A step is over: the arena may tidy up."""
        # Without the lock: whether parts may move is found out by waiting for the worker, which gives staging back
        # under the lock. When they may, the worker has nothing to do, so nobody else is in the arena.
        self._arena.tick()

    def counts(self) -> tuple[CacheCounts, ArenaCounts]:
        """What the cache and the arena did so far."""
        return self.staging.counts, self._arena.counts

    def close(self) -> None:
        """Unlock the buffer; views of it must be gone."""
        self.staging.clear()
        self._mover.free_host_buffer(self.buffer)

    def _take_staging(self, num_bytes: int) -> torch.Tensor:
        while True:
            try:
                with self._lock:
                    key = f"staging {self._num_staged}"
                    self._num_staged += (
                        1  # before it is taken: after an exception in between the key is not asked for again
                    )
                    buffer = self._arena.allocate(key, num_bytes)
                    self._staged[buffer.data_ptr()] = key
                    return buffer
            except (BudgetError, GraphAliveError):
                if self.staging.counts.held_bytes:
                    # Kept for requests of another size, which must not make this one take memory beside the buffer.
                    self.staging.clear()
                elif not self._worker.wait_for_one():
                    return self._extra(num_bytes)

    def _extra(self, num_bytes: int) -> torch.Tensor:
        """Memory beside the buffer: gradients of more chunks than foreseen are unfinished at once."""
        for tier in self._tiers:
            tier.charge(num_bytes, "staging beside the arena")
        # It is the host's like the buffer itself, also where the host plays the device.
        with compat.without_modes():
            buffer = self._mover.host_buffer(num_bytes)
        set_mark(buffer.untyped_storage(), mark_of(self.buffer.untyped_storage()))
        self._extras.add(buffer.data_ptr())
        return buffer

    def _has_let_go(self) -> bool:
        """Give kept staging back to the arena; whether none of it is in use."""
        self.staging.clear()
        return not self._staged

    def _free_staging(self, buffer: torch.Tensor) -> None:
        with self._lock:
            if buffer.data_ptr() in self._extras:
                self._extras.discard(buffer.data_ptr())
                for tier in self._tiers:
                    tier.credit(buffer.nbytes, "staging beside the arena")
                self._mover.free_host_buffer(buffer)
            else:
                key = self._staged.pop(buffer.data_ptr(), None)
                if key is not None:  # else an exception broke off where it was taken
                    self._arena.free(key)


_ENDLESS_BYTES = 1 << 62
"""The budget of a device that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """The budgets of a plan on this machine, charged with what the plan needs."""

    host: Tier
    pinned: Tier
    """What is locked of the host."""
    device: Tier
    """Counts chunks alone; an emulated device keeps books of its own."""
    need: HostNeed
    """What the host was charged with: all of the staging that there is room for."""


def charged_tiers(budgets: Budgets, need: HostNeed) -> Tiers:
    """The plan's tiers, with the host's need on their books.

    Raises:
        BudgetError: A tier has not the bytes.
    """
    host = Tier("host", resolve_budget(budgets.host_bytes, host_capacity_bytes(), what="host budget"))
    pinned_bytes = resolve_budget(
        budgets.pinned_bytes, pinned_capacity_bytes(), what="pinned budget", limit="what can be pinned"
    )
    pinned = Tier("pinned", pinned_bytes)
    # Memory that is free now: other processes, and what the loop keeps beside the model, go before what is merely of use.
    need = need.with_room(min(host.budget_bytes, HostMemory().available_bytes()), pinned.budget_bytes)
    for tier in (host, pinned):
        tier.charge(need.weight_bytes, "weights")
        tier.charge(need.gradient_bytes, "gradients")
        tier.charge(need.staging_bytes, "staging")
    host.charge(need.state_bytes, "optimizer state")
    for tier in (host, pinned):
        tier.charge(need.paged_bytes, "optimizer state that visits the device")
    host.charge(need.table_bytes, "tables that stay, and their gradients")
    device_bytes = budgets.device_bytes if budgets.device_bytes is not None else _ENDLESS_BYTES
    return Tiers(host=host, pinned=pinned, device=Tier("device", device_bytes), need=need)


_LARGEST_PROBE = 32
"""Elements of a probe along each dimension: many enough that the rows and columns of a factored state count little."""


def state_bytes_per_parameter_byte(optimizer: torch.optim.Optimizer | None, numerics: Numerics | None = None) -> float:
    """2 for Adam, 0 for SGD without momentum, and so on; the largest over all trained parameters, so that no chunk's
    state takes more than was foreseen.

    With `numerics`, by the formats of the own kernels: 5 for Adam on bf16 weights with exact rounding, whose moments take
    8 bytes and whose remainder takes 2. Without them the optimizer's own class takes one step on a small tensor for each
    kind of parameter that it has. State that is there already is not touched. The count of steps, one number, is not
    counted.

    Raises:
        UnsupportedOptimizerError: It cannot take a step on one tensor alone.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(8, 8))
        >>> state_bytes_per_parameter_byte(torch.optim.AdamW([weight]))
        2.0
        >>> state_bytes_per_parameter_byte(torch.optim.SGD([weight], lr=0.1))
        0.0
    """
    if optimizer is None:
        return 0.0
    if numerics is not None:
        return _ratio_of_formats(optimizer, numerics)
    return max((ratio for _, ratio in _ratios(optimizer)), default=0.0)


def state_bytes_by_parameter(optimizer: torch.optim.Optimizer, numerics: Numerics | None) -> dict[int, int]:
    """Bytes of state beside each trained parameter that the optimizer holds, by its `id`, each by its own param group.

    Raises:
        UnsupportedOptimizerError: It cannot take a step on one tensor alone.
    """
    if numerics is None:
        return {id(parameter): math.ceil(parameter.nbytes * ratio) for parameter, ratio in _ratios(optimizer)}
    found: dict[int, int] = {}
    for group in optimizer.param_groups:
        rule = require_rule(optimizer, group)
        for parameter in group["params"]:
            if parameter.requires_grad:
                found[id(parameter)] = state_bytes(parameter.shape, parameter.dtype, rule, numerics)
    return found


def _ratios(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, float]]:
    """Each trained parameter, and the ratio of its kind: one probe for all of a kind."""
    ratios: dict[tuple[int, torch.dtype, int], float] = {}
    with apart(optimizer) as copied:
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                kind = (index, parameter.dtype, parameter.dim())
                if parameter.requires_grad and kind not in ratios:
                    try:
                        ratios[kind] = _ratio(copied, index, group, parameter)
                    except UnsupportedOptimizerError:
                        held = optimizer.state.get(parameter)
                        if not held:
                            prove(optimizer, [torch.device("cpu")])  # says more, where no chunk could be updated either
                            raise
                        # Its constructor made what its step cannot do without.
                        ratios[kind] = _bytes_in(held) / max(1, parameter.nbytes)
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad:
                yield parameter, ratios[index, parameter.dtype, parameter.dim()]


def _ratio_of_formats(optimizer: torch.optim.Optimizer, numerics: Numerics) -> float:
    """The largest ratio of a kind of parameters, taken together: one small tensor must not stand for the whole model."""
    held: dict[tuple[int, torch.dtype, int], tuple[int, int]] = {}
    for index, group in enumerate(optimizer.param_groups):
        rule = require_rule(optimizer, group)
        for parameter in group["params"]:
            if parameter.requires_grad:
                kind = (index, parameter.dtype, parameter.dim())
                state, weights = held.get(kind, (0, 0))
                state += state_bytes(parameter.shape, parameter.dtype, rule, numerics)
                held[kind] = (state, weights + parameter.nbytes)
    return max((state / max(1, weights) for state, weights in held.values()), default=0.0)


def _ratio(optimizer: torch.optim.Optimizer, index: int, group: dict[str, Any], parameter: torch.Tensor) -> float:
    shape = tuple(min(size, _LARGEST_PROBE) for size in parameter.shape)
    probe = torch.zeros(shape, dtype=parameter.dtype)
    probe.grad = torch.zeros_like(probe)
    settings = {
        # Not the user's own tensors: a learning rate may lie on the device.
        key: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
    state: dict[torch.Tensor, dict[str, Any]] = {probe: {}}
    try:
        shadow = compat.shallow_optimizer(optimizer, [{**settings, "params": [probe]}], state)
        set_to_train(shadow)
        compat.step_without_hooks(shadow)
    except Exception as error:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} could not take a step on one {probe.dtype} tensor of shape {shape} alone (param "
            f"group {index}), so the size of its state is unknown: {type(error).__name__}: {error}; give a plan made by "
            "make_plan, which does not need it"
        ) from error
    return _bytes_in(state[probe]) / max(1, probe.nbytes)


def _bytes_in(state: Mapping[str, Any]) -> int:
    """Bytes of one parameter's state, without the count of its steps."""
    return sum(value.nbytes for key, value in state.items() if isinstance(value, torch.Tensor) and key != "step")


def _as_chunk(chunk: ChunkSpec, part: Part) -> ChunkSpec:
    """What one rank keeps of the chunk."""
    return replace(chunk, spans=tuple(piece.span for piece in part.pieces), nbytes=part.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeed:
    """Host bytes that a plan needs for one model, by what they are for."""

    weight_bytes: int
    gradient_bytes: int
    staging_bytes: int
    useful_staging_bytes: int
    """As much staging as makes a difference; see Note [Gradients that wait] in `planning.placement`."""
    state_bytes: int
    """Optimizer state beside the parameters that the host updates: in memory of its own that is not locked."""
    paged_bytes: int
    """Optimizer state that visits the device: locked, and not in the buffer."""
    table_bytes: int
    """Weights that never leave the host, and their gradients: not locked, and not in the buffer."""

    @property
    def total_bytes(self) -> int:
        """The size of the locked buffer for weights, gradients and staging."""
        return self.weight_bytes + self.gradient_bytes + self.staging_bytes

    @property
    def everything_bytes(self) -> int:
        """What the host holds, locked or not."""
        return self.total_bytes + self.state_bytes + self.paged_bytes + self.table_bytes

    def with_room(self, host_bytes: int, pinned_bytes: int) -> HostNeed:
        """The same with more staging, where that is of use and the host's memory, and what can be locked of it, allow it."""
        rest = min(host_bytes - self.everything_bytes, pinned_bytes - self.total_bytes - self.paged_bytes)
        return replace(
            self,
            staging_bytes=granted_staging_bytes(self.staging_bytes, useful=self.useful_staging_bytes, rest_bytes=rest),
        )

    def without_room(self) -> HostNeed:
        """The same, of which `with_room` makes no more."""
        return replace(self, useful_staging_bytes=self.staging_bytes)


def host_need(
    layout: Layout,
    plan: Plan,
    optimizer: torch.optim.Optimizer | None,
    numerics: Numerics | None,
    parameters: Mapping[str, torch.Tensor],
    mine: Mapping[str, Part] | None = None,
) -> HostNeed:
    """What the host must hold: streamed weights, copies of resident ones that it updates, deferred gradients, staging, state.

    Args:
        layout: Of the model.
        plan: For it.
        optimizer: Each parameter's state is counted by its own param group; those that it does not hold have none.
        numerics: Of updates through our own kernels.
        parameters: The model's, by name.
        mine: What this rank keeps of each chunk that is spread over ranks, by its name.

    Raises:
        PlanError: The plan's staging is too small for its largest chunk.
    """
    weights = gradients = largest = largest_parameter = tables = on_host = on_device = 0
    held = set() if optimizer is None else {id(each) for group in optimizer.param_groups for each in group["params"]}
    updated: list[ParameterSpec] = []
    paged: list[ParameterSpec] = []
    kept = mine or {}
    for group in plan.groups:
        for whole, site in zip(layout.chunks_of(group.name), group.sites, strict=True):
            chunk = whole if whole.name not in kept else _as_chunk(whole, kept[whole.name])
            is_trained = optimizer is not None and whole.spans[0].parameter.requires_grad
            is_updated = is_trained and site is Site.HOST
            if is_trained and not is_updated:
                on_device += chunk.nbytes
                paged += [span.parameter for span in chunk.spans if site is Site.PAGED]
            if group.weights is Weights.HOST:
                tables += (1 + is_updated) * chunk.nbytes
                updated += [span.parameter for span in chunk.spans if is_updated]
                continue
            if group.weights is Weights.STREAMED or is_updated:
                weights += chunk.nbytes
            if is_updated:
                updated += [span.parameter for span in chunk.spans]
                if any(id(parameters[span.parameter.name]) in held for span in chunk.spans):
                    on_host += chunk.nbytes  # and not tables: their gradients are made where they lie
                largest = max(largest, chunk.nbytes)
                largest_parameter = max(largest_parameter, *(span.parameter.nbytes for span in chunk.spans), 0)
                if plan.schedule is Schedule.DEFERRED:
                    gradients += chunk.nbytes
    # Not asked where there is nothing: an optimizer that cannot say may still step on the device.
    sizes = state_bytes_by_parameter(optimizer, numerics) if optimizer is not None and updated + paged else {}

    def state_of(specs: Sequence[ParameterSpec]) -> int:
        # A piece has its share of the parameter's.
        return sum(
            math.ceil(sizes.get(id(parameters[spec.name]), 0) * spec.nbytes / max(1, parameters[spec.name].nbytes))
            for spec in specs
        )

    state = state_of(updated)
    # One to be filled while another is used; beside a huge one a small one, so that it does not double the need.
    largest = largest if plan.schedule is Schedule.IN_BACKWARD else largest_parameter
    least = largest + min(largest, LARGEST_CHUNK_BYTES)
    staging_bytes, useful_bytes = staging_for(
        plan.budgets.staging_bytes,
        least=least,
        on_host=on_host,
        on_device=on_device,
        waits=state > 0 and plan.schedule is Schedule.IN_BACKWARD,
    )
    if any(isinstance(group.activation, Offload) for group in plan.groups):
        useful_bytes = (
            staging_bytes  # what activations take of the host is known when they come: nothing of it is given away
        )
    return HostNeed(
        weight_bytes=weights,
        gradient_bytes=gradients,
        staging_bytes=staging_bytes,
        useful_staging_bytes=useful_bytes,
        state_bytes=state,
        paged_bytes=state_of(paged) + 4096 * len(paged),
        table_bytes=tables,
    )
