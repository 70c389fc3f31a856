"""Weights from a file: a model is built without values, and filled group by group from safetensors."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from lowtide.errors import BadRecordError, did_you_mean
from lowtide.memory.chunk import ParameterSpec


@contextmanager
def empty_weights() -> Iterator[None]:
    """Inside, parameters of new modules are on the meta device: building takes no time and no memory.

    Buffers keep their values, unlike under `torch.device("meta")`: what a model computes once (frequencies of a rotary
    embedding) is not in any weight file. One Parameter under several names, a tied one, stays one. `manage(...,
    weights=FILE)` fills the parameters, group by group. Only one thread may build models meanwhile: torch's registration
    of parameters is exchanged for all.

    Example:
        >>> with empty_weights():
        ...     layer = nn.BatchNorm1d(3)
        >>> layer.weight.device.type, layer.running_var.device.type
        ('meta', 'cpu')
    """
    register = nn.Module.register_parameter
    # Weak: a parameter with values must go as soon as its empty one has taken its place.
    made: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def empty_one(parameter: nn.Parameter) -> nn.Parameter:
        source, empty = made.get(id(parameter), (None, None))
        if source is None or empty is None or source() is not parameter:
            empty = nn.Parameter(torch.empty_like(parameter.data, device="meta"), requires_grad=parameter.requires_grad)
            made[id(parameter)] = weakref.ref(parameter), empty
        return empty

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        # One that is empty already comes from another module: the two are tied by being the same object.
        if type(parameter) is nn.Parameter and not parameter.is_meta:
            module._parameters[name] = empty_one(parameter)

    # Exchanged on purpose, and put back below: there is no hook that could replace what is registered.
    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


NUM_NAMED = 3
"""How many names a message gives."""
_COMPARED_ELEMENTS = 1 << 24
"""How much of two tensors is read at once: a table may be as large as what is left of the host's memory."""


class WeightFile:
    """One safetensors file, or all of a folder; of a checkpoint's folder, the weights.

    Raises:
        BadRecordError: There is no such file, one is broken, or two have a tensor of the same name.
    """

    def __init__(self, path: str | Path) -> None:
        root = Path(path)
        # A checkpoint has other tensors beside the weights.
        pattern = "model*.safetensors" if (root / "checkpoint.json").exists() else "*.safetensors"
        files = sorted(root.glob(pattern)) if root.is_dir() else [root]
        if not files or not all(file.is_file() for file in files):
            raise BadRecordError(f"there is no safetensors file at {root}; give the file or its folder")
        self._path = root
        self._handles: dict[str, Any] = {file.name: _opened(file) for file in files}
        self._where: dict[str, str] = {}
        self._names: dict[str, str] = {}
        """By a parameter's first name, that under which the files have it, where it is another."""
        for file, handle in self._handles.items():
            for name in handle.keys():  # noqa: SIM118  # no mapping
                if name in self._where:
                    raise BadRecordError(
                        f"the tensor {name!r} is in {self._where[name]} and in {file}, both in {root}; give the one file "
                        "that is meant, or a folder of its own"
                    )
                self._where[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def check(self, model: nn.Module) -> None:
        """Refuse files that cannot fill the model, before anything is touched; warn of tensors that it does not have.

        A tied parameter may stand in the files under any of its names, or with the same values under several.

        Raises:
            BadRecordError: A parameter's tensor is missing, has another shape, or is there twice with two values.
        """
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for name, parameter in model.named_parameters():
            stored = [alias for alias in names[id(parameter)] if alias in self._where]
            self._names[name] = next(iter(stored), name)
            for alias in stored or [name]:
                self._check_shape(alias, tuple(parameter.shape))
            for other in stored[1:]:
                self._check_equal(stored[0], other, parameter)
        known = {name for group in names.values() for name in group} | {
            name for name, _ in model.named_buffers(remove_duplicate=False)
        }
        surplus = sorted(self._where.keys() - known)
        if surplus:
            shown = ", ".join(map(repr, surplus[:NUM_NAMED])) + (", ..." if len(surplus) > NUM_NAMED else "")
            warnings.warn(
                f"{self._path} has {len(surplus)} tensors that the model does not have, and that are not read: {shown}",
                UserWarning,
                stacklevel=3,
            )

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor."""
        tensor: torch.Tensor = self._handle(name).get_tensor(self._names.get(name, name))
        return tensor

    def fill(self, spec: ParameterSpec, parameter: nn.Parameter, target: torch.Tensor) -> None:
        """Write one parameter's values, converted to its dtype."""
        del parameter
        self._check_shape(spec.name, spec.shape)
        target.copy_(self.tensor(spec.name))

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        found = tuple(self._handle(name).get_slice(self._names.get(name, name)).get_shape())
        if found != shape:
            raise BadRecordError(
                f"{name} has shape {found} in the weight files and {shape} in the model; they must be saved from a "
                "model of the same sizes"
            )

    def _check_equal(self, one: str, other: str, parameter: nn.Parameter) -> None:
        """Refuse two values: torch would keep the one that it loads last, and nobody knows which of the two was meant."""
        if not all(map(_same_bits, self._pieces(one, parameter), self._pieces(other, parameter))):
            raise BadRecordError(
                f"{one} and {other} are one parameter of the model, tied, and two tensors with different values in the "
                "weight files; untie them in the model (give one its own Parameter), or leave one of the two out of the files"
            )

    def _pieces(self, name: str, parameter: nn.Parameter) -> Iterator[torch.Tensor]:
        """The tensor's rows, a few at a time, as the parameter would hold them."""
        if not parameter.dim():
            yield self.tensor(name).to(parameter.dtype)
            return
        rows = self._handle(name).get_slice(name)
        step = max(1, _COMPARED_ELEMENTS * len(parameter) // max(1, parameter.numel()))
        for start in range(0, len(parameter), step):
            yield rows[start : start + step].to(parameter.dtype)

    def _handle(self, name: str) -> Any:  # Any: safetensors' handles have no types
        stored = self._names.get(name, name)
        if stored not in self._where:
            raise BadRecordError(
                f"the weight files have no tensor named {name!r}, and must be saved from the same model class; "
                f"{did_you_mean(name, self._where, num_listed=NUM_NAMED)}"
            )
        return self._handles[self._where[stored]]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    # By bytes: a NaN is the same as itself here.
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except SafetensorError as error:
        raise BadRecordError(f"{file} is not a safetensors file: {error}; save the weights again") from error
