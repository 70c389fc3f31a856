"""Whether an optimizer can be run chunk by chunk: tried out at `manage`, on small tensors.

A step by chunks is right where the update of a parameter depends on that parameter, its gradient, its state and its group's
settings alone. No signature says so: an optimizer may take a norm over all of its parameters, count on itself, or draw random
numbers. So two copies of it, over small stand-ins for its parameters, take the same steps: one as a whole, as in plain torch,
and one parameter by parameter in changing order, by the very code that updates chunks. What either leaves behind must be
the same: parameters, state, settings and attributes. The user's own object, its state and the random numbers are not touched.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import nn

from lowtide import compat
from lowtide.errors import UnsupportedOptimizerError
from lowtide.runtime.updates.chunk_optimizer import ChunkOptimizer, Update, on_host

_SCALES = (1.0, 100.0, 0.01)
"""Scales of the gradients in each step: what is clipped, or left alone, by its size shows in one of them."""
_CAPS = ((6, 4, 3, 2), (4, 5, 2, 3))
"""Sizes of the two stand-ins for each kind of parameter, which must not be of one shape."""
_LARGE_MATRIX = (136, 130)
"""Size of a third stand-in, for matrices: rules that factor or project them do so from 32 or 128 rows on."""
_MOST_MODES = 8
"""A setting with more values than this among the groups is a name or a number, and no mode of the update."""
_FAILED = "could not take a step"
_REMEDY = (
    "Lowtide updates chunk by chunk. Keep all weights resident and updated on the device, with the schedule 'deferred' and "
    "without max_grad_norm, where the optimizer's own step runs, or use one that updates each parameter by itself, such as "
    "AdamW"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was found out about an optimizer whose step can be taken by chunks."""

    advances_groups: bool = False
    """Whether it counts in its param groups: once a step, whatever their parameters are."""
    num_closure_calls: int = 1
    """How often its step calls the closure that it is given; a step by chunks has called it once, before."""


def prove(optimizer: torch.optim.Optimizer, devices: Sequence[torch.device]) -> Proof:
    """Try the optimizer out where its steps will run.

    Takes some 30 steps on small tensors, for each kind of param group and not for each group: hundredths of a second.

    Raises:
        UnsupportedOptimizerError: A step by chunks is not the whole step. The message says in what they differ.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedOptimizerError(
            "LBFGS takes its step over all parameters at once and calls a closure several times, so no chunk can be updated "
            f"by itself; {_REMEDY}"
        )
    kinds = _kinds_of_groups(optimizer)
    if not kinds:
        return Proof()
    foreign = _foreign_keys(optimizer)
    if foreign:
        raise UnsupportedOptimizerError(f"{type(optimizer).__name__} {_keeps(foreign)}; {_REMEDY}")
    proofs: list[Proof] = []
    for device in dict.fromkeys(devices):
        with compat.without_modes(), compat.without_compilation(), _same_random_numbers(device) as has_drawn:
            proof = _tried(optimizer, kinds, device, has_drawn, starts_empty=True)
            if isinstance(proof, str) and proof.startswith(_FAILED) and optimizer.state:
                # There are classes that make their state in the constructor, and cannot do without it.
                with_state = _tried(optimizer, kinds, device, has_drawn, starts_empty=False)
                proof = with_state if isinstance(with_state, Proof) else proof
        if isinstance(proof, str):
            raise UnsupportedOptimizerError(f"{type(optimizer).__name__} {proof}; {_REMEDY}")
        proofs.append(proof)
    return next((proof for proof in proofs if proof != Proof()), Proof())


def _tried(
    optimizer: torch.optim.Optimizer,
    kinds: Sequence[_GroupKind],
    device: torch.device,
    has_drawn: Callable[[], bool],
    *,
    starts_empty: bool,
) -> Proof | str:
    """The proof, or in what a step by chunks differs from the whole."""

    def difference(kinds: Sequence[_GroupKind], *, advances: bool) -> str | None:
        whole, pieces = (_Trial(optimizer, kinds, device, starts_empty=starts_empty) for _ in range(2))
        return _difference(whole, pieces, has_drawn, advances=advances)

    advances, found = False, difference(kinds, advances=False)
    if found is not None:
        advances, rest = True, difference(kinds, advances=True)
        found = found if rest is not None and rest.startswith(_FAILED) else rest
    large = [replace(kind, stand_ins=kind.large) for kind in kinds if kind.large]
    if found is None and large:  # not before: there are rules that take minutes for them
        found = difference(large, advances=advances)
    if found is not None:
        return found
    num_calls = _num_closure_calls(_Trial(optimizer, kinds, device, starts_empty=starts_empty))
    return Proof(advances_groups=advances, num_closure_calls=num_calls)


def prove_slices(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Try out whether an update of halves of a parameter, as ranks make it, is that of the whole.

    Raises:
        UnsupportedOptimizerError: It looks at a parameter as a whole, such as at its norm, its rows or its shape.
    """
    kinds = [replace(kind, stand_ins=kind.stand_ins + kind.large[:1]) for kind in _kinds_of_groups(optimizer)]
    if not kinds:
        return
    with compat.without_modes(), compat.without_compilation(), _same_random_numbers(device):
        whole = _Trial(optimizer, kinds, device, starts_empty=True)
        before = [parameter.detach().clone() for parameter in whole.parameters]
        halves = [[nn.Parameter(half.clone()) for half in _halves(value)] for value in before]
        members = iter(halves)
        groups = [[half for _ in kind.stand_ins for half in next(members)] for kind in kinds]
        cut = _copied(optimizer, [kind.index for kind in kinds], groups)
        if device.type == "cpu":
            for group in cut.param_groups:
                group.update(on_host({name: value for name, value in group.items() if name != "params"}))
        set_to_train(cut)
        reason = "updates a parameter by what it sees of all of it"
        try:
            for step in range(len(_SCALES)):
                whole.step_whole(step)
                for parameter, pair in zip(whole.parameters, halves, strict=True):
                    gradients = (None, None) if parameter.grad is None else _halves(parameter.grad)
                    for half, gradient in zip(pair, gradients, strict=True):
                        half.grad = gradient
                compat.step_without_hooks(cut)
        except Exception as error:  # a user's own optimizer may raise anything
            reason = f"{_FAILED} on a slice of a parameter: {_in_short(error)}"
            is_same = False
        else:
            is_same = all(
                _moved_alike(value, parameter, torch.cat([half.detach() for half in pair]))
                for value, parameter, pair in zip(before, whole.parameters, halves, strict=True)
            )
    if not is_same:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} {reason}, and ranks that gather have equal parts of each chunk, which cut parameters; "
            "give Sharding(collective='one to all'), where each rank updates whole parameters, or use an elementwise optimizer "
            "such as AdamW"
        )


def _halves(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = value.detach().reshape(-1)
    first, second = flat[: (flat.numel() + 1) // 2], flat[(flat.numel() + 1) // 2 :]
    return first.clone(), second.clone()


def _moved_alike(before: torch.Tensor, whole: torch.Tensor, cut: torch.Tensor) -> bool:
    """Whether a parameter and its halves have moved by the same, but for the rounding of other kernels."""
    moved, other = (whole.detach() - before).reshape(-1), cut - before.reshape(-1)
    most = torch.maximum(moved.abs().max(), other.abs().max())
    return bool(((moved - other).abs() <= 1e-2 * most).all())


@contextlib.contextmanager
def apart(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """A copy of the optimizer without parameters, to try steps on: neither it nor the random numbers are touched by them."""
    with _same_random_numbers(torch.device("cpu")):
        yield _copied(optimizer, [], [])


def set_to_train(optimizer: torch.optim.Optimizer) -> None:
    """Put a copy in the mode for training: one that is in that for evaluation refuses to step, which says nothing about it."""
    if callable(train := getattr(optimizer, "train", None)):
        train()


@dataclass(frozen=True, slots=True)
class _GroupKind:
    index: int
    """Number of the param group that stands for its kind."""
    stand_ins: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    """Shapes and types of the small tensors in place of its parameters."""
    large: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    """And of matrices that are large enough for rules that factor or project from some size on."""


class _Trial:
    """A copy of the optimizer over stand-ins, which every copy has with the same values."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kinds: Sequence[_GroupKind],
        device: torch.device,
        *,
        starts_empty: bool,
    ) -> None:
        self._numbers = torch.Generator().manual_seed(0)
        self.device = device
        members = [[self._stand_in(shape, dtype) for shape, dtype in kind.stand_ins] for kind in kinds]
        self.parameters = [parameter for group in members for parameter in group]
        self.optimizer = _copied(optimizer, [kind.index for kind in kinds], members)
        if device.type == "cpu":
            # As a session does it for the host: rates may be tensors on the device.
            for group in self.optimizer.param_groups:
                group.update(on_host({name: value for name, value in group.items() if name != "params"}))
        for parameter in () if starts_empty else self.parameters:
            self.optimizer.state[parameter] = _state_for(optimizer, parameter)
        set_to_train(self.optimizer)
        self._runner: ChunkOptimizer | None = None

    def gradients(self, step: int) -> list[torch.Tensor | None]:
        """Gradients of the step with this number: no two are of one size, and the second step has one parameter without."""
        found: list[torch.Tensor | None] = [
            self._random(parameter.shape, parameter.dtype) * (_SCALES[step] * (1 + number / 2))
            for number, parameter in enumerate(self.parameters)
        ]
        if step == 1:
            found[-1] = None
        return found

    def step_whole(self, step: int) -> None:
        """As plain torch does it."""
        self.give_gradients(step)
        compat.step_without_hooks(self.optimizer)

    def give_gradients(self, step: int) -> None:
        """As a backward would."""
        for parameter, gradient in zip(self.parameters, self.gradients(step), strict=True):
            parameter.grad = gradient

    def step_in_pieces(self, step: int, *, advances: bool) -> bool:
        """As a session does it, one parameter a chunk; whether each was updated in the memory that it was given in."""
        runner = self._runner = self._runner or ChunkOptimizer(self.optimizer, advances_groups=advances)
        settings = runner.settings_now()
        if self.device.type == "cpu":
            settings = settings.on_host()
        updates = [Update(parameter, parameter.detach()) for parameter in self.parameters]
        for update, gradient in zip(updates, self.gradients(step), strict=True):
            update.target.grad = gradient
        memory = [update.target.data_ptr() for update in updates]
        runner.claim_state(updates, settings)
        for update in updates if step % 2 else reversed(updates):
            if update.target.grad is not None:
                runner.run([update], settings)
        runner.advance()
        runner.forget_empty_state()
        return memory == [update.target.data_ptr() for update in updates]

    def _stand_in(self, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
        return nn.Parameter(self._random(torch.Size(shape), dtype))

    def _random(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        numbers = self._numbers
        return torch.randn(shape, generator=numbers, device="cpu").to(device=self.device, dtype=dtype)


def _difference(whole: _Trial, pieces: _Trial, has_drawn: Callable[[], bool], *, advances: bool) -> str | None:
    """In what a step by pieces differs from the whole; None where it does not."""
    device = whole.device
    try:
        for step in range(len(_SCALES)):
            whole.step_whole(step)
    except Exception as error:  # a user's own optimizer may raise anything
        return (
            f"{_FAILED} without a closure on {device}, on small tensors in place of its parameters: {_in_short(error)}"
        )
    if has_drawn():
        return "draws random numbers in its step, which a step by chunks would draw in another order"
    try:
        stays = [pieces.step_in_pieces(step, advances=advances) for step in range(len(_SCALES))]
    except Exception as error:
        return f"{_FAILED} on one parameter alone on {device}: {_in_short(error)}"
    if not all(stays):
        return (
            "gives its parameters other memory in its step (p.data = ...), where the session would lose sight of them"
        )
    return _first_difference(whole, pieces)


def _first_difference(whole: _Trial, pieces: _Trial) -> str | None:
    same = _Comparison(whole.parameters, pieces.parameters)
    foreign = _foreign_keys(whole.optimizer)
    if foreign:
        return _keeps(foreign)
    groups = zip(whole.optimizer.param_groups, pieces.optimizer.param_groups, strict=True)
    for index, (one, other) in enumerate(groups):
        changed = [name for name in same.differing(one, other) if name != "params"]
        if changed:
            return f"changes {', '.join(changed)} of its param group {index} in each step, by what it sees of all parameters"
    changed = same.differing(_attributes(whole.optimizer), _attributes(pieces.optimizer))
    if changed:
        return f"changes its own {', '.join(changed)} in each step, which a step by chunks would do for every chunk"
    if not same(whole.parameters, pieces.parameters):
        return "updates a parameter otherwise when it has the others beside it: it looks at several, or at their order"
    if not same(whole.optimizer.state, pieces.optimizer.state):
        return "keeps another state for a parameter when it has the others beside it"
    return None


def _num_closure_calls(trial: _Trial) -> int:
    """In one step, of a closure that gives the parameters their gradients; 1 also where the step takes none."""
    num_calls = 0

    def closure() -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        trial.give_gradients(0)
        return torch.ones(())

    try:
        if "closure" not in inspect.signature(type(trial.optimizer).step).parameters:
            return 1
        compat.step_without_hooks(trial.optimizer, closure)
    except Exception:  # whatever it misses in the closure, or in its result
        return num_calls or 1
    return num_calls


def _foreign_keys(optimizer: torch.optim.Optimizer) -> list[object]:
    keys: list[object] = list(optimizer.state)
    return [key for key in keys if not isinstance(key, torch.Tensor)]


def _keeps(foreign: Sequence[object]) -> str:
    return f"keeps {', '.join(map(repr, foreign))} in its state beside that of its parameters"


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if name not in compat.OPTIMIZER_BOOKKEEPING}


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": .")


# What stands for the user's optimizer


def _kinds_of_groups(optimizer: torch.optim.Optimizer) -> list[_GroupKind]:
    """The first and the last param group of each kind: groups of a kind differ in numbers only, such as their rates."""
    trained = {
        index: [parameter for parameter in group["params"] if parameter.requires_grad]
        for index, group in enumerate(optimizer.param_groups)
    }
    values: dict[str, set[object]] = defaultdict(set)
    settings: dict[int, dict[str, object]] = {}
    for index, group in enumerate(optimizer.param_groups):
        if trained[index]:
            settings[index] = {name: _mode(value) for name, value in group.items() if name != "params"}
            for name, mode in settings[index].items():
                values[name].add(mode)
    by_kind: dict[object, list[int]] = defaultdict(list)
    for index, modes in settings.items():
        by_kind[frozenset(item for item in modes.items() if len(values[item[0]]) <= _MOST_MODES)].append(index)
    found: list[_GroupKind] = []
    for indices in by_kind.values():
        shapes: dict[tuple[torch.dtype, int], torch.Size] = {}
        for index in indices:
            for parameter in trained[index]:
                shapes.setdefault((parameter.dtype, parameter.dim()), parameter.shape)
        small = [_small(shape, dtype, caps) for (dtype, _), shape in shapes.items() for caps in _CAPS]
        large = [_small(shape, dtype, _LARGE_MATRIX) for (dtype, dim), shape in shapes.items() if dim == 2]
        more = [each for each in large if each not in small]
        found += [_GroupKind(index, tuple(small), tuple(more)) for index in sorted({indices[0], indices[-1]})]
    return sorted(found, key=lambda kind: kind.index)


def _small(shape: torch.Size, dtype: torch.dtype, caps: Sequence[int]) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(max(1, min(size, cap)) for size, cap in zip(shape, cycle(caps), strict=False)), dtype


def _mode(value: object) -> object:
    """What of a setting may choose between ways to update: of a number that is not whole its sign alone."""
    if isinstance(value, float):
        return float, value > 0, value < 0
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_mode, value)) if len(value) <= _MOST_MODES else len(value)
    return type(value)


def _copied(
    optimizer: torch.optim.Optimizer, indices: Sequence[int], members: Sequence[Sequence[nn.Parameter]]
) -> torch.optim.Optimizer:
    """An optimizer of the same class, attributes and settings over other parameters, without state and without hooks."""
    host_target: torch.optim.Optimizer = object.__new__(type(optimizer))
    groups: list[dict[str, Any]] = [{"params": list(parameters)} for parameters in members]
    state: dict[torch.Tensor, Any] = defaultdict(dict)
    # What else refers to the optimizer, its groups, its state or its parameters shall refer to the copy's.
    known: dict[int, Any] = {id(optimizer): host_target, id(optimizer.param_groups): groups, id(optimizer.state): state}
    for index, copied in zip(indices, groups, strict=True):
        known[id(optimizer.param_groups[index])] = copied
    some = next((parameter for parameters in members for parameter in parameters), None)
    for group in optimizer.param_groups:
        inside = known.get(id(group), {"params": [some]})["params"]
        known.update((id(real), inside[number % len(inside)]) for number, real in enumerate(group["params"]))
    for index, copied in zip(indices, groups, strict=True):
        settings = optimizer.param_groups[index].items()
        copied.update({name: _copy(value, known) for name, value in settings if name != "params"})
    for name, value in vars(optimizer).items():
        if name not in compat.OPTIMIZER_BOOKKEEPING:
            vars(host_target)[name] = _copy(value, known)
    compat.complete_optimizer(host_target, groups, state)
    return host_target


def _state_for(optimizer: torch.optim.Optimizer, stand_in: torch.Tensor) -> dict[str, Any]:
    """What the optimizer has for a parameter of the same kind, cut to the stand-in's size."""
    for parameter, state in optimizer.state.items():
        if state and parameter.dtype == stand_in.dtype and parameter.dim() == stand_in.dim():
            return {name: _cut(value, parameter, stand_in) for name, value in state.items()}
    return {}


def _cut(value: Any, parameter: torch.Tensor, stand_in: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or not value.dim():
        return copy.deepcopy(value)
    return value[tuple(slice(size) for size in stand_in.shape)].to(stand_in.device, copy=True)


def _copy(value: Any, known: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, known)
    except Exception:  # a file, a lock, a writer of logs: nothing that a step works on
        return value


# What both leave behind


class _Comparison:
    """Whether two values are the same to the bit; of parameters it knows which corresponds to which."""

    def __init__(self, ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
        self._number = {id(parameter): number for each in (ones, others) for number, parameter in enumerate(each)}
        self._open: set[tuple[int, int]] = set()

    def differing(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
        """Names of the entries that differ, or that only one of them has."""
        shared = one.keys() & other.keys()
        return sorted((one.keys() ^ other.keys()) | {name for name in shared if not self(one[name], other[name])})

    def __call__(self, one: Any, other: Any) -> bool:
        """Whether they are."""
        if one is other or (id(one), id(other)) in self._open:
            return True
        if type(one) is not type(other):
            return False
        if isinstance(one, torch.Tensor):
            return _same_bits(one, other)
        self._open.add((id(one), id(other)))
        try:
            return self._same_parts(one, other)
        finally:
            self._open.discard((id(one), id(other)))

    def _same_parts(self, one: Any, other: Any) -> bool:
        if isinstance(one, Mapping):
            left, right = ({self._key(key): value for key, value in each.items()} for each in (one, other))
            return left.keys() == right.keys() and all(self(value, right[key]) for key, value in left.items())
        if isinstance(one, list | tuple):
            return len(one) == len(other) and all(map(self, one, other))
        if isinstance(one, set | frozenset):
            return {self._key(each) for each in one} == {self._key(each) for each in other}
        if isinstance(one, torch.Generator):
            return torch.equal(one.get_state(), other.get_state())
        if isinstance(one, random.Random):
            return bool(one.getstate() == other.getstate())
        if isinstance(one, np.ndarray):
            return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
        if isinstance(one, types.FunctionType | types.MethodType | types.BuiltinFunctionType | type | nn.Module):
            return True
        if hasattr(one, "__dict__"):
            return self(vars(one), vars(other))
        try:
            return bool(one == other) or bool(one != one and other != other)
        except Exception:  # what cannot be compared says nothing
            return True

    def _key(self, key: Any) -> Any:
        return ("parameter", self._number.get(id(key))) if isinstance(key, torch.Tensor) else key


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return one.layout is other.layout
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    left, right = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(left, right)


@contextlib.contextmanager
def _same_random_numbers(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Gives what says whether numbers were drawn from torch, Python or numpy; what was drawn is put back at the end."""
    cuda = [device] if device.type == "cuda" else []

    def taken() -> tuple[Any, ...]:
        numpy_state: Any = np.random.get_state()
        return (
            torch.get_rng_state(),
            [torch.cuda.get_rng_state(each) for each in cuda],
            random.getstate(),
            [numpy_state[0], numpy_state[1].tobytes(), *numpy_state[2:]],
        )

    before, numpy_before = taken(), np.random.get_state()
    same = _Comparison((), ())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a step warns of, it says again when it is taken
            yield lambda: not same(before, taken())
    finally:
        if not same(before, taken()):
            torch.set_rng_state(before[0])
            for each, state in zip(cuda, before[1], strict=True):
                torch.cuda.set_rng_state(state, each)
            random.setstate(before[2])
            np.random.set_state(numpy_before)
