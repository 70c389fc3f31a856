"""WeightFile: reads parameters one by one from safetensors, so that a model on meta is filled group by group."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from lowtide.errors import BadRecordError, did_you_mean
from lowtide.memory.layout_types import ParameterSpec

NUM_NAMED = 3
"""How many names a warning gives."""


class WeightFile:
    """One safetensors file, or all of a folder.

    Raises:
        BadRecordError: There is no such file, one is broken, or two have a tensor of the same name.
    """

    def __init__(self, path: str | Path) -> None:
        root = Path(path)
        files = sorted(root.glob("*.safetensors")) if root.is_dir() else [root]
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

        A tied parameter may stand in the files under any of its names.

        Raises:
            BadRecordError: A parameter's tensor is missing or has another shape.
        """
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for name, parameter in model.named_parameters():
            self._names[name] = next((known for known in names[id(parameter)] if known in self._where), name)
            self._check_shape(name, tuple(parameter.shape))
        known = {name for group in names.values() for name in group} | {name for name, _ in model.named_buffers()}
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

    def fill(self, spec: ParameterSpec, parameter: nn.Parameter, home: torch.Tensor) -> None:
        """Write one parameter's values, converted to its dtype."""
        del parameter
        self._check_shape(spec.name, spec.shape)
        home.copy_(self.tensor(spec.name))

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        found = tuple(self._handle(name).get_slice(self._names.get(name, name)).get_shape())
        if found != shape:
            raise BadRecordError(
                f"{name} has shape {found} in the weight files and {shape} in the model; they must be saved from a "
                "model of the same sizes"
            )

    def _handle(self, name: str) -> Any:  # Any: safetensors' handles have no types
        stored = self._names.get(name, name)
        if stored not in self._where:
            raise BadRecordError(
                f"the weight files have no tensor named {name!r}; {did_you_mean(name, self._where)}. They must be "
                "saved from the same model class"
            )
        return self._handles[self._where[stored]]


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except SafetensorError as error:
        raise BadRecordError(f"{file} is not a safetensors file: {error}; save the weights again") from error
