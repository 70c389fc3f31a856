"""WeightFile: reads parameters one by one from safetensors, so that a model on meta is filled group by group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from lowtide.errors import BadRecordError, did_you_mean
from lowtide.memory.layout_types import ParameterSpec


class WeightFile:
    """One safetensors file, or all of a folder."""

    def __init__(self, path: str | Path) -> None:
        root = Path(path)
        files = sorted(root.glob("*.safetensors")) if root.is_dir() else [root]
        if not files or not all(file.is_file() for file in files):
            raise BadRecordError(f"there is no safetensors file at {root}; give the file or its folder")
        # Any: safetensors' handles have no types.
        self._handles: list[Any] = [safe_open(str(file), framework="pt", device="cpu") for file in files]
        self._where = {name: handle for handle in self._handles for name in handle.keys()}  # noqa: SIM118  # no mapping

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor."""
        if name not in self._where:
            raise BadRecordError(
                f"the weight files have no tensor named {name!r}; {did_you_mean(name, self._where)}. They must be "
                "saved from the same model class"
            )
        tensor: torch.Tensor = self._where[name].get_tensor(name)
        return tensor

    def fill(self, spec: ParameterSpec, parameter: nn.Parameter, home: torch.Tensor) -> None:
        """Write one parameter's values, converted to its dtype."""
        del parameter
        tensor = self.tensor(spec.name)
        if tuple(tensor.shape) != spec.shape:
            raise BadRecordError(
                f"{spec.name} has shape {tuple(tensor.shape)} in the weight files and {spec.shape} in the model; they "
                "must be saved from a model of the same sizes"
            )
        home.copy_(tensor)
