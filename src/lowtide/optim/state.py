"""What an update keeps beside one parameter: flat, in the order of the weight's memory, and in torch's ordinary form.

Either form resumes the other. Torch's has one fp32 tensor of the parameter's shape for each state, and a count of steps.
Beside them stands `master`, the fp32 number that a weight of 16 bits is the rounding of: with it a run resumes exactly.
Where there is none, `moments` stands there, the bits that each was kept in: it tells states that were saved in fp32 from
those of a run in plain bf16. Torch's own optimizers pass over entries that they do not know. A matrix rule has vectors
instead of tensors of the parameter's shape, and its count of steps is a plain number, as `lowtide.optim.Adafactor` keeps them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import OptimizerStateError
from lowtide.optim.reference import join, read_moment, split, write_moment
from lowtide.optim.rules import (
    COLUMN,
    STATE_NAMES,
    STATISTICS,
    Adafactor,
    Adam,
    Rule,
    Sgd,
    names_of_states,
    statistic_sizes,
)
from lowtide.optim.update_types import (
    SCALE,
    Moments,
    Numerics,
    Rounding,
    kept_bytes,
    rounding_for,
    state_tensors,
    stored_as,
)

STEP = "step"
MASTER = "master"
MOMENTS = "moments"
_BITS = {Moments.FP32: 32, Moments.BF16: 16, Moments.INT8: 8}
_REVISIONS = itertools.count(1)


@dataclass(slots=True, kw_only=True)
class ParameterState:
    """The state of one parameter, on the device of its update."""

    step: int = 0
    """Updates so far."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """States by name, and the scales of 8-bit ones under `NAME_scale`."""
    remainder: torch.Tensor | None = None
    master: torch.Tensor | None = None
    lacks_momentum: bool = False
    """Whether steps were taken, and none with a momentum: as at the first step, SGD takes the next gradient itself for it."""
    revision: int = field(default_factory=_REVISIONS.__next__)
    """Another number, which no state has had, whenever tensors are added or exchanged: who knows it knows the tensors."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the states that are there, without their scales."""
        return tuple(name for name in self.tensors if not name.endswith(SCALE))

    def all_tensors(self) -> list[torch.Tensor]:
        """Every tensor of it, always in the same order."""
        kept = [tensor for tensor in (self.remainder, self.master) if tensor is not None]
        return [*self.tensors.values(), *kept]

    def replace_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put others in the place of `all_tensors`, in their order."""
        rest = iter(tensors)
        self.revision = next(_REVISIONS)
        self.tensors = {name: next(rest) for name in self.tensors}
        self.remainder = None if self.remainder is None else next(rest)
        self.master = None if self.master is None else next(rest)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> ParameterState:
        """The same state elsewhere, in these tensors."""
        other = replace(self)
        other.replace_tensors(tensors)
        return other

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.all_tensors())

    @property
    def device(self) -> torch.device:
        """Where it lies; the host where it has nothing."""
        return next((tensor.device for tensor in self.all_tensors()), torch.device("cpu"))

    def move_to(self, device: torch.device) -> None:
        """Bring all of it to another device."""
        self.replace_tensors([tensor.to(device) for tensor in self.all_tensors()])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTarget:
    """A parameter that state is loaded for."""

    name: str
    weight: Tensor
    """The parameter where it lies: its values tell whether a master is its own."""
    rule: Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The saved state of one parameter, checked: it fits, and nothing was written yet."""

    num_steps: int
    tensors: Mapping[str, Tensor]
    """By name, of the shape that `state_dict` has them in, in any dtype; empty before the first step."""
    master: Tensor | None = None


def new_state(weight: torch.Tensor, rule: Rule, numerics: Numerics) -> ParameterState:
    """Before the first update: all zero, and the master is the weight itself."""
    state = ParameterState()
    complete(state, weight, rule, numerics)
    rounding = rounding_for(weight, numerics)
    if rounding is Rounding.EXACT:
        state.remainder = torch.zeros(weight.numel(), dtype=torch.int16, device=weight.device)
    elif rounding is Rounding.MASTER:
        state.master = _flat(weight.detach()).float()
    return state


def state_bytes(shape: Sequence[int], dtype: torch.dtype, rule: Rule, numerics: Numerics) -> int:
    """Bytes of the state of a parameter: what its rule keeps, and what its rounding keeps.

    Example:
        >>> state_bytes((32, 64), torch.bfloat16, Adafactor(lr=1e-3), Numerics())  # 2 * 2048 + 4 * (32 + 64)
        4480
    """
    states = state_tensors(rule, shape, numerics.moments).values()
    return kept_bytes(math.prod(shape), dtype, numerics) + sum(count * kind.itemsize for kind, count in states)


def complete(state: ParameterState, weight: torch.Tensor, rule: Rule, numerics: Numerics) -> None:
    """Add what a setting that was changed since asks for: a momentum, amsgrad's maximum."""
    for name, (dtype, count) in state_tensors(rule, weight.shape, numerics.moments).items():
        if name not in state.tensors:
            state.lacks_momentum = state.lacks_momentum or (isinstance(rule, Sgd) and state.step > 0)
            # In pages as they come: large ones, which begin at the same offset for every tensor of an update, made it 12%
            # slower (`benchmarks.optim.host_kernel`).
            state.tensors[name] = torch.zeros(count, dtype=dtype, device=weight.device)
            state.revision = next(_REVISIONS)


def to_torch_state(weight: Tensor, state: ParameterState, numerics: Numerics) -> dict[str, Any]:
    """The entries of one parameter for a state dict: on the state's device, in memory of their own."""
    is_matrix_rule = not STATISTICS.isdisjoint(state.names)
    entries: dict[str, Any] = {STEP: state.step if is_matrix_rule else torch.tensor(float(state.step))}
    for name in state.names:
        flat = read_moment(name, state.tensors, stored_as(name, numerics.moments))
        entries[name] = flat.clone() if COLUMN in state.names else _shaped(flat, weight)
    master = state.master
    if state.remainder is not None:
        master = join(_flat(weight.detach()), state.remainder)
    if master is not None:
        entries[MASTER] = _shaped(master, weight)
    elif weight.dtype is not torch.float32 and any(
        # It has digits that bf16 has not.
        stored_as(name, numerics.moments) is not Moments.BF16
        for name in state.names
    ):
        entries[MOMENTS] = _BITS[numerics.moments]  # a number: torch's loading takes a text apart
    return entries


def from_torch_state(target: LoadTarget, saved: SavedState, numerics: Numerics) -> ParameterState:
    """The flat state of one parameter, new, on the weight's device. Without a master it starts from the weight.

    With one, the weight is written: it becomes the master's rounding, from which it differs in ties at most.
    """
    weight = target.weight.detach()
    state = new_state(weight, target.rule, numerics)
    state.step = saved.num_steps
    state.lacks_momentum = (
        isinstance(target.rule, Sgd) and state.step > 0 and not saved.tensors.keys() >= set(state.names)
    )
    for name, tensor in saved.tensors.items():
        flat = tensor if COLUMN in saved.tensors else _flat_like(tensor, weight)
        write_moment(name, flat, state.tensors, stored_as(name, numerics.moments))
    if saved.master is not None:
        _write_master(_flat(weight), _flat_like(saved.master, weight), state)
    return state


def read_state_dict(state_dict: Mapping[str, Any], groups: Sequence[Sequence[LoadTarget]]) -> list[list[SavedState]]:
    """Check what `optimizer.state_dict()` gave against the parameters of each group; nothing is written.

    Only what all of it fits comes back, so that loading it afterwards cannot stop half way.

    Raises:
        OptimizerStateError: It is of another model or optimizer: the message names the first parameter that differs.
    """
    check_form(state_dict, [len(group) for group in groups])
    saved_groups = state_dict["param_groups"]
    return [
        [
            _read_entries(state_dict["state"].get(key, {}), target)
            for key, target in zip(saved["params"], group, strict=True)
        ]
        for saved, group in zip(saved_groups, groups, strict=True)
    ]


def check_form(state_dict: object, sizes: Sequence[int]) -> None:
    """Refuse what no `optimizer.state_dict()` gave, or one with other numbers of parameters in its groups.

    Raises:
        OptimizerStateError: It is not one.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        entries = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else None
        found = f"is a {type(state_dict).__name__}" if entries is None else f"has the entries {entries}"
        raise OptimizerStateError(
            f"the state {found}, not 'state' and 'param_groups'; give what optimizer.state_dict() returned"
        )
    saved_sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    if saved_sizes != list(sizes):
        raise OptimizerStateError(
            f"the state has param groups of {saved_sizes} parameters, and the optimizer of {list(sizes)}; it was saved for "
            "another model or with other groups: load it into the optimizer it was saved from"
        )


def _read_entries(entries: Mapping[str, Any], target: LoadTarget) -> SavedState:
    """Check the entries of one parameter; nothing is written.

    Raises:
        OptimizerStateError: They are another optimizer's, of another shape, or the master of another weight.
    """
    present = {name: value for name, value in entries.items() if value is not None}
    if not present:
        return SavedState(num_steps=0, tensors={})
    names = names_of_states(target.rule, target.weight.shape)
    _check_names(present, names, target)
    for name in (*names, MASTER):
        if name in present:
            _check_shape(name, present[name], target)
    if MASTER in present:
        _check_master(present[MASTER], target)
    if MOMENTS in present:
        _check_rounded([(name, present[name]) for name in names if name in present], present[MOMENTS], target)
    # SGD counts no steps; with a momentum at least one was taken, and it is not the first gradient again.
    num_steps = int(present.get(STEP, 1))
    return SavedState(
        num_steps=num_steps,
        tensors={name: present[name] for name in names if name in present},
        master=present.get(MASTER),
    )


def _check_names(present: Mapping[str, Any], names: tuple[str, ...], target: LoadTarget) -> None:
    kind = type(target.rule)
    # What an option that is off now has left behind is passed over, as torch does it.
    own = names if kind is Adafactor else STATE_NAMES[kind]
    known = {STEP, MASTER, MOMENTS, *own, *(("max_exp_avg_sq",) if kind is Adam else ())}
    # SGD's momentum comes with the first step that has one.
    missing = [] if names == ("momentum_buffer",) else [name for name in names if name not in present]
    if missing or not known.issuperset(present):
        raise OptimizerStateError(
            f"the state of {target.name!r} has {', '.join(sorted(present))}; {kind.__name__} with these settings keeps "
            f"{', '.join((STEP, *names))}: it was saved by another optimizer or with other options (amsgrad); load it into "
            "that one, or start without it",
            parameter=target.name,
        )


def _check_shape(name: str, value: object, target: LoadTarget) -> None:
    shape = tuple(target.weight.shape)
    is_vector = name in STATISTICS and len(shape) > 1
    expected = (statistic_sizes(shape)[name],) if is_vector else shape
    if not isinstance(value, Tensor) or tuple(value.shape) != expected:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
        wanted = f", for which it is {expected}" if is_vector else ""
        raise OptimizerStateError(
            f"{name} of {target.name!r} has {found} in the state, and the parameter has shape {shape}{wanted}; the state is "
            "of another model: load it into that one, or start without it",
            parameter=target.name,
        )


def _check_rounded(states: Sequence[tuple[str, Tensor]], num_bits: int, target: LoadTarget) -> None:
    """States that were saved in fp32 must still be: only a plain optimizer's loading has rounded them."""
    for name, value in states:
        if value.dtype is not torch.float32:
            raise OptimizerStateError(
                f"{name} of {target.name!r} in the state is in {value.dtype}, and was saved in fp32, from {num_bits} "
                "bits: a plain torch optimizer turns all that it loads into its weights' type. Load the state after "
                f"manage(), which keeps it; or drop the {MOMENTS!r} entries to go on with the rounded moments",
                parameter=target.name,
            )


def _check_master(master: Tensor, target: LoadTarget) -> None:
    """A master must be in fp32 and round to the weight; a weight in fp32 may have come out of a checkpoint in 16 bits."""
    if master.dtype is not torch.float32 and target.weight.dtype is not torch.float32:
        raise OptimizerStateError(
            f"the master of {target.name!r} in the state is in {master.dtype}, and the digits that it is kept for are gone: a "
            "plain torch optimizer turns all that it loads into its weights' type. Load the state after manage(), which "
            f"keeps it in fp32; or drop the {MASTER!r} entries to start from the weights as they are",
            parameter=target.name,
        )
    # On the host: what a device is filled with leaves no room for copies in fp32.
    on_host = target.weight.detach().cpu()
    weight, flat = _flat(on_host), _flat_like(master, on_host)
    choices = [flat, split(flat)[0]] if weight.dtype is torch.bfloat16 else [flat]
    if weight.dtype is torch.float32:
        choices += [split(flat)[0], flat.bfloat16(), flat.half()]
    agrees = torch.zeros_like(weight, dtype=torch.bool)
    for choice in choices:
        rounded = choice.to(weight.dtype)
        agrees |= (rounded == weight) | (rounded.isnan() & weight.isnan())
    if not bool(agrees.all()):
        raise OptimizerStateError(
            f"the master of {target.name!r} in the state is not that of its weight: {int((~agrees).sum())} of "
            f"{weight.numel()} elements differ; load the model's weights from the same checkpoint first, or drop the "
            f"{MASTER!r} entries to start from the weights as they are",
            parameter=target.name,
        )


def _write_master(weight: Tensor, master: Tensor, state: ParameterState) -> None:
    if state.remainder is not None:
        nearest, remainder = split(master)
        weight.copy_(nearest)
        state.remainder.copy_(remainder)
        return
    weight.copy_(master)
    if state.master is not None:
        state.master.copy_(master)


def _shaped(flat: Tensor, weight: Tensor) -> Tensor:
    """A copy of flat state with the weight's shape and order of memory."""
    return flat.clone().as_strided(weight.shape, weight.stride())


def _flat_like(tensor: Tensor, weight: Tensor) -> Tensor:
    """An fp32 copy of a tensor of the weight's shape, flat in the weight's order of memory and on its device."""
    copy = torch.empty_strided(weight.shape, weight.stride(), dtype=torch.float32, device=weight.device)
    return _flat(copy.copy_(tensor))


def _flat(tensor: Tensor) -> Tensor:
    """All elements in the order of their memory; weights are dense."""
    return tensor.as_strided((tensor.numel(),), (1,))
