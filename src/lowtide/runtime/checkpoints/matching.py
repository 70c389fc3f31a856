"""Whether a checkpoint is of this model and this optimizer: asked in full before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.errors import CheckpointMismatchError, did_you_mean
from lowtide.optim.rules import Rule, names_of_states, require_rule
from lowtide.optim.state import LoadTarget, read_state_dict
from lowtide.optim.update_types import Moments, Numerics, Rounding, state_tensors
from lowtide.runtime.checkpoints.contents import (
    KERNELS,
    MODEL,
    OPTIMIZER,
    STATE,
    VALUE,
    ModelEntries,
    class_name,
    parameter_names,
)
from lowtide.runtime.checkpoints.format import CheckpointReader, TensorSpec
from lowtide.runtime.checkpoints.plain_values import TAG, Decoder
from lowtide.runtime.updates.state import check_loaded_state

_NUM_NAMED = 3
"""How many names a message gives."""
_STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTraining:
    """What the index of a checkpoint says about the model and the optimizer, as Python values."""

    reader: CheckpointReader
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None
    settings: Sequence[Mapping[str, Any]]
    """The param groups, with the names of their parameters."""
    numerics: Numerics | None
    """Where our own kernels kept the optimizer's state: in which formats."""
    weights: Mapping[str, TensorSpec]
    """Parameters and buffers, by name: the model's, and those that the optimizer holds beside them."""
    optimizer_tensors: Mapping[str, TensorSpec]
    kept: Mapping[str, Mapping[str, TensorSpec]]
    """The same by parameter, and then by name."""

    @classmethod
    def read(cls, reader: CheckpointReader) -> SavedTraining:
        """From the index; of the tensors none is read but those of settings."""
        state = reader.index.state
        if not {"model", "optimizer", "random", "given"} <= state.keys():
            raise CheckpointMismatchError(
                f"{reader.folder.name} has the entries {', '.join(sorted(state))}, and is no checkpoint of a session; load one "
                "that session.save() wrote"
            )
        model: Any = state["model"]
        optimizer: Any = state["optimizer"]
        settings: list[Mapping[str, Any]] = []
        numerics = None
        if optimizer is not None:
            decoder = Decoder(lambda name: reader.read(STATE, name))
            settings = [decoder.decode(group) for group in optimizer["param_groups"]]
            if optimizer["kept_by"] == KERNELS:
                words = optimizer["numerics"]
                numerics = Numerics(
                    rounding=Rounding(words["rounding"]), moments=Moments(words["moments"]), seed=words["seed"]
                )
        kept: dict[str, dict[str, TensorSpec]] = {}
        tensors = _specs(reader, OPTIMIZER)
        for name, spec in tensors.items():
            parameter, _, key = name.rpartition(".")
            kept.setdefault(parameter, {})[key] = spec
        loose = {name: own.pop(VALUE) for name, own in kept.items() if VALUE in own}
        return cls(
            reader=reader,
            model=model,
            optimizer=optimizer,
            settings=settings,
            numerics=numerics,
            weights=loose | _specs(reader, MODEL),
            optimizer_tensors=tensors,
            kept=kept,
        )

    @property
    def loose(self) -> list[str]:
        """Parameters that the optimizer held and the model did not."""
        own = _specs(self.reader, MODEL)
        return [name for name in self.weights if name not in own]

    def in_torchs_form(self, state_of: Callable[[str], Mapping[str, Any] | None]) -> dict[str, Any]:
        """The form of `optimizer.state_dict()`, which has numbers for names; parameters without a state are left out of it."""
        numbers = {
            name: place for place, name in enumerate(name for group in self.settings for name in group["params"])
        }
        groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in self.settings]
        state = {place: entries for name, place in numbers.items() if (entries := state_of(name))}
        return {"state": state, "param_groups": groups}

    def state_of(self, name: str) -> Any:
        """The optimizer's state of a parameter without its tensors; None where there was none."""
        assert self.optimizer is not None
        return self.optimizer["state"].get(name)

    @property
    def words(self) -> str:
        """How the optimizer's state was kept, for messages."""
        if self.numerics is None:
            return "precision=None (torch's own optimizer)"
        return f"{self.numerics.rounding.value} rounding and {self.numerics.moments.value} moments"


def _specs(reader: CheckpointReader, file: str) -> dict[str, TensorSpec]:
    """The tensors of a file; a checkpoint from before the first step has none of the optimizer's."""
    return dict(reader.names(file)) if file in reader.index.files else {}


def check_model(saved: SavedTraining, own: ModelEntries, *, has_values: bool = True) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        CheckpointMismatchError: It says which names are missing or unexpected, or which tensor differs first.
    """
    where = f"{saved.reader.folder.name} is of another model"
    specs = _specs(saved.reader, MODEL)
    missing = [name for name in own.tensors if name not in specs]
    unexpected = [name for name in specs if name not in own.tensors]
    if missing or unexpected:
        near = did_you_mean(missing[0], specs, num_listed=_NUM_NAMED) if missing and specs else ""
        raise CheckpointMismatchError(
            f"{where}: it lacks {_listed(missing)} of the model's, and has {_listed(unexpected)} that the model has not; "
            f"build the model that it was saved from{f' ({near})' if near else ''}. Nothing was loaded"
        )
    tied: Mapping[str, str] = saved.model["tied"]
    for alias in (*own.tied, *tied):
        if own.tied.get(alias) != tied.get(alias):
            here, there = (
                f"tied to {names[alias]}" if alias in names else "a tensor of its own" for names in (own.tied, tied)
            )
            raise CheckpointMismatchError(
                f"{where}: {alias} is {here} in the model, and {there} in the checkpoint; tie them alike. Nothing was loaded"
            )
    for name, tensor in own.tensors.items():
        _check_tensor(where, name, tensor, specs[name])
        if has_values and tensor.is_meta:
            raise CheckpointMismatchError(
                f"{name} of the model is on the meta device and has no memory to load into; give the checkpoint to "
                "lowtide.manage(..., weights=FOLDER) first. Nothing was loaded"
            )
    extra = sorted(own.extra.keys() ^ saved.model["extra"].keys())
    if extra:
        raise CheckpointMismatchError(
            f"{where}: the extra state of {_listed(extra)} is in one of the two only. Nothing was loaded"
        )


def _check_tensor(where: str, name: str, tensor: torch.Tensor, spec: TensorSpec) -> None:
    if tuple(tensor.shape) != spec.shape:
        raise CheckpointMismatchError(
            f"{where}: {name} has the shape {spec.shape} there, and {tuple(tensor.shape)} in the model; build the model with "
            "the sizes that it was saved with. Nothing was loaded"
        )
    if tensor.dtype != spec.dtype and not (tensor.is_floating_point() and spec.dtype.is_floating_point):
        raise CheckpointMismatchError(
            f"{where}: {name} is {spec.dtype} there, and {tensor.dtype} in the model. Nothing was loaded"
        )


def check_optimizer(
    saved: SavedTraining, optimizer: torch.optim.Optimizer, own: ModelEntries, numerics: Numerics | None
) -> None:
    """Refuse a checkpoint of another optimizer.

    Args:
        saved: The checkpoint.
        optimizer: What it is to be loaded into.
        own: The model's entries.
        numerics: The formats of our own kernels, where they keep the state.

    Raises:
        CheckpointMismatchError: It says what differs first.
    """
    where = f"{saved.reader.folder.name} is of another optimizer"
    assert saved.optimizer is not None
    if not _is_same_class(saved.optimizer["class"], class_name(optimizer)):
        raise CheckpointMismatchError(
            f"{where}: it was saved from a {saved.optimizer['class']}, and this one is a {class_name(optimizer)}; make the "
            "optimizer that it was saved from, or take the weights alone with lowtide.load_weights. Nothing was loaded"
        )
    groups = parameter_names(optimizer, own)
    sizes, saved_sizes = [len(group) for group in groups], [len(group["params"]) for group in saved.settings]
    if sizes != saved_sizes:
        raise CheckpointMismatchError(
            f"{where}: it has param groups of {saved_sizes} parameters, and this one of {sizes}; make the groups as they were. "
            "Nothing was loaded"
        )
    for index, (pairs, group) in enumerate(zip(groups, saved.settings, strict=True)):
        for number, ((name, parameter), saved_name) in enumerate(zip(pairs, group["params"], strict=True)):
            if name != saved_name:
                raise CheckpointMismatchError(
                    f"{where}: parameter {number} of its param group {index} is {saved_name}, and {name} here; give the "
                    "optimizer its parameters in the same order. Nothing was loaded"
                )
            _check_tensor(where, name, parameter, saved.weights[name])
            if name in saved.optimizer["state"]:
                rule = rule_with(optimizer, optimizer.param_groups[index], group, parameter, numerics, saved.numerics)
                if rule is not None:
                    _check_kernel_state(saved, name, parameter, rule)
    if saved.numerics is None and numerics is None:
        # What `optimizer.state_dict()` gave, with tensors that have no values.
        known = saved.in_torchs_form(lambda name: _ghosts(saved, name) if saved.state_of(name) else None)
        check_loaded_state(optimizer, known)


def _is_same_class(saved: str, own: str) -> bool:
    """By name and package: modules inside of a package may be arranged anew."""
    return all(saved.split(".")[end] == own.split(".")[end] for end in (0, -1))


def rule_with(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    settings: Mapping[str, Any],
    parameter: torch.Tensor,
    *numerics: Numerics | None,
) -> Rule | None:
    """The rule of our kernels for a parameter, under the saved settings; None where no kernel is concerned."""
    if all(each is None for each in numerics):
        return None
    return require_rule(optimizer, {**group, **settings, "params": [parameter]})


def _check_kernel_state(saved: SavedTraining, name: str, parameter: torch.Tensor, rule: Rule) -> None:
    """Refuse state that is not what the rule keeps for the parameter."""
    if saved.numerics is None:
        _check_torchs_state(saved, name, parameter, rule)
        return
    found = saved.kept.get(name, {})
    # What is missing comes with the next update, as where a setting asks for it in the middle of a run; what an option that is
    # off now has left behind stays.
    for key, (dtype, count) in state_tensors(rule, parameter.shape, saved.numerics.moments).items():
        if key in found and (found[key].dtype, found[key].shape) != (dtype, (count,)):
            raise CheckpointMismatchError(
                f"{key} of {name} in {saved.reader.folder.name} has the shape {found[key].shape} and {found[key].dtype}, and "
                f"{type(rule).__name__} keeps {(count,)} in {dtype} with the saved settings: it was saved by another version of "
                "Lowtide; load it with that one. Nothing was loaded"
            )


def _check_torchs_state(saved: SavedTraining, name: str, parameter: torch.Tensor, rule: Rule) -> None:
    entries = {
        key: value for key, value in _ghosts(saved, name).items() if key in names_of_states(rule, parameter.shape)
    }
    state = {"state": {0: {**entries, _STEP: 1}}, "param_groups": [{"params": [0]}]}
    read_state_dict(state, [[LoadTarget(name=name, weight=parameter, rule=rule)]])


def _ghosts(saved: SavedTraining, name: str) -> dict[str, Any]:
    """The entries of a parameter: tensors of the right shape on the meta device, and None for what is no tensor."""

    def ghost(key: str) -> torch.Tensor:
        spec = saved.optimizer_tensors[key]
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    plain = Decoder(ghost)
    return {
        plain.decode(key): plain.decode(value) if isinstance(value, dict) and value.get(TAG) == "tensor" else None
        for key, value in saved.state_of(name)
    }


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    shown = ", ".join(names[:_NUM_NAMED])
    return f"{len(names)} tensors ({shown}{', ...' if len(names) > _NUM_NAMED else ''})"
