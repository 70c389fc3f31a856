"""The saved state of one parameter, in the form that its optimizer keeps here.

The same form is read as it is: no bit changes. Between two forms the way is torch's own, fp32 in the parameter's shape, of
one parameter at a time. A bf16 weight and its remainder, or a weight and its master, are one fp32 number on that way; where
the new form has no room for it the weight is its rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from lowtide import compat
from lowtide.optim.rules import Rule, names_of_states
from lowtide.optim.state import (
    MASTER,
    MOMENTS,
    STEP,
    LoadTarget,
    ParameterState,
    SavedState,
    from_torch_state,
    to_torch_state,
)
from lowtide.optim.update_types import Numerics, rounding_for
from lowtide.runtime.checkpoints.contents import MODEL, OPTIMIZER, VALUE, kept_state
from lowtide.runtime.checkpoints.matching import SavedTraining
from lowtide.runtime.checkpoints.plain_values import Decoder

_Coming = Mapping[str, Future[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedParameter:
    """A parameter's value and state, on the host, to be put in place."""

    weight: torch.Tensor
    state: ParameterState | dict[str, Any] | None


_NUM_THREADS = 3
"""Beside the loop's own: an Adam in `bf16 exact` has three tensors beside each weight."""


class StateReader:
    """Reads parameters of a checkpoint, one after the other, and the tensors of each side by side.

    Args:
        saved: The checkpoint, which was checked.
        numerics: In which formats our kernels keep state here; None for the optimizer's own.
    """

    def __init__(self, saved: SavedTraining, numerics: Numerics | None) -> None:
        self._saved = saved
        self._numerics = numerics
        self._loose = frozenset(saved.loose)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="lowtide-load")

    def __enter__(self) -> StateReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def read(self, name: str, parameter: torch.Tensor, rule: Rule | None) -> LoadedParameter:
        """One parameter.

        Args:
            name: In the checkpoint.
            parameter: Tells type and order of memory; its values are not looked at.
            rule: Of our kernels, with the saved settings; None where none is concerned.
        """
        plain = self._saved.state_of(name)
        coming = self._begin(name)
        weight = self._weight(name)
        if plain is None:
            return LoadedParameter(weight=weight, state=None)
        if self._saved.numerics is None:
            entries = self._torchs_entries(name, plain, coming)
            if self._numerics is None:
                return LoadedParameter(weight=weight, state=_cast(entries, weight.dtype, parameter.dtype))
            assert rule is not None
            return self._to_kernels(name, weight, entries, parameter, rule)
        if self._is_kept_alike(name, parameter):
            return LoadedParameter(weight=weight, state=_kept(plain, coming))
        entries = self._expanded(weight, plain, coming)
        if self._numerics is not None:
            assert rule is not None
            found = self._to_kernels(name, weight, entries, parameter, rule)
            if isinstance(found.state, ParameterState):
                found.state.lacks_momentum |= plain["lacks_momentum"]
            return found
        master = entries.pop(MASTER, None)
        entries.pop(MOMENTS, None)
        own = {key: value if key == STEP else value.to(parameter.dtype) for key, value in entries.items()}
        return LoadedParameter(weight=weight if master is None else master, state=own)

    def in_torchs_form(self, name: str) -> dict[Any, Any]:
        """The entries of one parameter for a state dict; empty where there are none."""
        plain = self._saved.state_of(name)
        if plain is None:
            return {}
        coming = self._begin(name)
        if self._saved.numerics is None:
            return self._torchs_entries(name, plain, coming)
        return self._expanded(self._weight(name), plain, coming)

    def is_exact(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether value and state are read as they are, so that training goes on with the same bits."""
        if self._saved.weights[name].dtype is not parameter.dtype:
            return False
        if self._saved.numerics is None or self._numerics is None:
            return self._saved.numerics is self._numerics
        return self._is_kept_alike(name, parameter)

    def _is_kept_alike(self, name: str, parameter: torch.Tensor) -> bool:
        saved, here = self._saved.numerics, self._numerics
        if saved is None or here is None or self._saved.weights[name].dtype is not parameter.dtype:
            return False
        plain = self._saved.state_of(name)
        is_same_order = plain is None or tuple(plain["stride"]) == parameter.stride()
        is_same_form = rounding_for(parameter, saved) is rounding_for(parameter, here)
        return is_same_order and is_same_form and saved.moments is here.moments

    def _weight(self, name: str) -> torch.Tensor:
        if name in self._loose:
            return self._saved.reader.read(OPTIMIZER, f"{name}.{VALUE}")
        return self._saved.reader.read(MODEL, name)

    def _begin(self, name: str) -> _Coming:
        """Read the tensors of a parameter's state in other threads, by their names in it."""
        reader = self._saved.reader
        return {
            key: self._threads.submit(reader.read, OPTIMIZER, f"{name}.{key}") for key in self._saved.kept.get(name, {})
        }

    def _expanded(self, weight: torch.Tensor, plain: Any, coming: _Coming) -> dict[Any, Any]:
        """What our kernels kept, in torch's form."""
        assert self._saved.numerics is not None
        with compat.without_modes(), torch.no_grad():
            return to_torch_state(_ordered(weight, plain["stride"]), _kept(plain, coming), self._saved.numerics)

    def _torchs_entries(self, name: str, plain: Any, coming: _Coming) -> dict[Any, Any]:
        def tensor(key: str) -> torch.Tensor:
            found = coming.get(key.removeprefix(f"{name}."))
            # What is inside of an entry is not expected.
            return self._saved.reader.read(OPTIMIZER, key) if found is None else found.result()

        decoder = Decoder(tensor)
        return {decoder.decode(key): decoder.decode(value) for key, value in plain}

    def _to_kernels(
        self, name: str, weight: torch.Tensor, entries: dict[Any, Any], parameter: torch.Tensor, rule: Rule
    ) -> LoadedParameter:
        """Through torch's form; the weight comes out in the parameter's type, as the rounding of its master."""
        assert self._numerics is not None
        with compat.without_modes(), torch.no_grad():
            target = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
            target.copy_(weight)
            master = entries.get(MASTER)
            if master is None and weight.dtype is torch.float32 and parameter.dtype is not torch.float32:
                # All digits of an fp32 weight are kept where the new form has a place for them.
                master = weight
            # What an option that is off now has left behind is passed over.
            names = names_of_states(rule, parameter.shape)
            tensors = {key: entries[key] for key in names if isinstance(entries.get(key), torch.Tensor)}
            # SGD counts no steps; what has a momentum has taken one at least.
            found = SavedState(num_steps=int(entries.get(STEP, 1)), tensors=tensors, master=master)
            state = from_torch_state(LoadTarget(name=name, weight=target, rule=rule), found, self._numerics)
        return LoadedParameter(weight=target, state=state)


def _kept(plain: Any, coming: _Coming) -> ParameterState:
    tensors = {key: tensor.result() for key, tensor in coming.items()}
    return kept_state(plain["step"], tensors, lacks_momentum=plain["lacks_momentum"])


def _ordered(weight: torch.Tensor, stride: list[int]) -> torch.Tensor:
    """The weight in the order of memory that its state was kept in."""
    if tuple(stride) == weight.stride():
        return weight
    return torch.empty_strided(weight.shape, stride, dtype=weight.dtype).copy_(weight)


def _cast(entries: dict[Any, Any], saved: torch.dtype, wanted: torch.dtype) -> dict[Any, Any]:
    """What was of the weight's type is so again, where that is another one now."""
    if saved is wanted:
        return entries
    return {
        key: value.to(wanted) if isinstance(value, torch.Tensor) and key != STEP and value.dtype is saved else value
        for key, value in entries.items()
    }
