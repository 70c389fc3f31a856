"""tile_sequence: run position-wise modules (MLPs) over slices of the sequence, so that their wide inside exists for one.

Between its two matrices an MLP holds tensors several times as wide as the hidden states, for all tokens at once. Each position
is computed by itself, so a slice of positions after the other gives the same; each slice is a checkpoint, whose inside is
made again in the backward, when its gradients are needed. The cost is one more forward of the module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.activations.group_call import GroupCall, MovingBuffers, TrainingModes, checkpointed
from lowtide.errors import ConfigError, UnknownNameError

Predicate = Callable[[str, nn.Module], bool]
MIXING_KINDS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.MultiheadAttention,
)  # fmt: skip
"""What is inside of these looks at several positions, some of them in training only."""
NUM_CHECKED = 16
"""Positions that are run whole and in slices, once, to see that a module does not mix them."""
POSITIONS = -2
"""The dimension of an input that is sliced."""


def tile_sequence(
    model: nn.Module,
    which: Iterable[str] | Predicate,
    *,
    num_slices: int | None = None,
    slice_tokens: int | None = None,
) -> TiledSequence:
    """Run modules over slices of the sequence, with recomputation slice by slice in the backward.

    A module must take one tensor `[..., positions, width]` first (other arguments are handed to each slice as they
    are), compute each position by itself, and give one tensor with the same positions. That is tried once, on a few positions
    of the first real input. Results are those of the whole to rounding; dropout draws other masks than the whole
    would, and the same in forward and backward. Hooks of the module run for each slice.

    Args:
        model: Holds the modules; they stay the same objects.
        which: Paths of the modules, or which ones by path and module. Those inside of a chosen module are not chosen.
        num_slices: How many slices, whatever the length; or
        slice_tokens: How many positions in each.

    Raises:
        UnknownNameError: The model has no module at a path.
        ConfigError: Both sizes or none are given, nothing is chosen, or a module mixes positions.

    Example:
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4)))
        >>> x = torch.randn(2, 10, 4)
        >>> expected = model(x)
        >>> handle = tile_sequence(model, ["0"], slice_tokens=3)
        >>> bool(torch.allclose(model(x), expected, atol=1e-6))
        True
        >>> handle.remove()
    """
    if (num_slices is None) == (slice_tokens is None):
        raise ConfigError(
            f"num_slices is {num_slices} and slice_tokens is {slice_tokens}; give one of the two", key="num_slices"
        )
    for key, value in (("num_slices", num_slices), ("slice_tokens", slice_tokens)):
        _require_count(key, value)
    chosen = _chosen(model, which)
    for path, module in chosen.items():
        _refuse_mixing(path, module)
    return TiledSequence([_Slicer(module, path, num_slices, slice_tokens) for path, module in chosen.items()])


class TiledSequence:
    """What `tile_sequence` gives back: stands in the modules' calls until `remove`."""

    def __init__(self, slicers: list[_Slicer]) -> None:
        self._slicers = slicers
        self.paths = tuple(slicer.path for slicer in slicers)
        """Paths of the modules that run in slices."""
        for slicer in slicers:
            slicer.install()

    def remove(self) -> None:
        """Give the modules their own calls back. May be repeated."""
        for slicer in self._slicers:
            slicer.remove()


class _Slicer:
    def __init__(self, module: nn.Module, path: str, num_slices: int | None, slice_tokens: int | None) -> None:
        self.module, self.path, self._num_slices, self._slice_tokens = module, path, num_slices, slice_tokens
        self._inner: Callable[..., Any] | None = None
        self._is_installed = False
        self._is_checked = False
        self._buffers = MovingBuffers(module)
        self._parts = [*module.modules()]

    def install(self) -> None:
        self._inner = compat.replace_call(self.module, self._call)
        self._is_installed = True

    def remove(self) -> None:
        if self._is_installed:
            self._is_installed = False
            # Where others have taken the calls since, they pass through here to what was before.
            if compat.call_of(self.module) == self._call:
                compat.replace_call(self.module, self._inner)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        inner = self._inner or compat.plain_call(self.module)
        if not self._is_installed:
            return inner(*args, **kwargs)
        if not args or not isinstance(args[0], Tensor) or args[0].dim() < 2:
            first = type(args[0]).__name__ if args and not isinstance(args[0], Tensor) else "no tensor of positions"
            raise ConfigError(
                f"{type(self.module).__name__} at {self.path!r} was called with {first} first; a module that runs in slices "
                "takes a tensor [..., positions, width] as its first argument. Leave it out of tile_sequence",
                key=self.path,
            )
        x, others = args[0], args[1:]
        if not self._is_checked:
            self._is_checked = self._check(inner, x, others, kwargs)
        length, outputs = x.shape[POSITIONS], []
        size = self._slice_tokens if self._slice_tokens is not None else math.ceil(length / (self._num_slices or 1))
        for part in x.split(max(size, 1), dim=POSITIONS):
            output = self._run(inner, (part, *others), kwargs)
            self._require_positions(part, output)
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=POSITIONS)

    def _run(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        leaves, structure = compat.flatten((args, kwargs))
        modes = TrainingModes(self._parts)
        return checkpointed(GroupCall(inner, (args, kwargs), structure, self._buffers, modes, _pass), leaves)

    def _require_positions(self, part: Tensor, output: object) -> None:
        if isinstance(output, Tensor) and output.dim() >= 2 and output.shape[POSITIONS] == part.shape[POSITIONS]:
            return
        what = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise ConfigError(
            f"{type(self.module).__name__} at {self.path!r} gave {what} for an input of shape {tuple(part.shape)}; slices can "
            "be joined only where the output is one tensor with the input's positions. Leave it out of tile_sequence",
            key=self.path,
        )

    def _check(self, inner: Callable[..., Any], x: Tensor, others: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Refuse a module that gives something else for slices. True when that is known."""
        # Tensors of tracers and compilers have no values, and one position cannot be sliced.
        has_values = type(x) in (Tensor, nn.Parameter) and not x.is_meta and not torch.compiler.is_compiling()
        if not has_values or x.shape[POSITIONS] < 2:
            return False
        few = x.detach().narrow(POSITIONS, 0, min(NUM_CHECKED, x.shape[POSITIONS]))
        modes = [(module, module.training) for module in self.module.modules()]
        try:
            self.module.eval()  # dropout would differ by its masks
            with torch.no_grad():
                whole = inner(few, *others, **kwargs)
                self._require_positions(few, whole)
                parts = [inner(part, *others, **kwargs) for part in few.chunk(2, dim=POSITIONS)]
                difference = (torch.cat(parts, dim=POSITIONS) - whole).float().abs().max().item()
                largest = whole.float().abs().max().item()
        finally:
            for module, training in modes:
                module.training = training
        # Sums of another grouping: far below the square root of the precision, unless positions are mixed. NaN passes:
        # it says nothing.
        if difference > math.sqrt(torch.finfo(whole.dtype).eps) * largest:
            raise ConfigError(
                f"{type(self.module).__name__} at {self.path!r} mixes positions: run in two slices, its output differs by "
                f"{difference:.3g} where the largest value is {largest:.3g}. Leave it out of tile_sequence",
                key=self.path,
            )
        return True


def _pass() -> None:
    """Slices are not counted."""


def _require_count(key: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{key} is {value!r}; give a whole number, 1 or more", key=key)
    if int(value) < 1:
        raise ConfigError(f"{key} is {value}; give 1 or more", key=key)


def _chosen(model: nn.Module, which: Iterable[str] | Predicate) -> dict[str, nn.Module]:
    modules = {path: module for path, module in model.named_modules() if path}
    if callable(which):
        chosen = [path for path, module in modules.items() if which(path, module)]
    else:
        chosen = list(which)
        for path in chosen:
            if path not in modules:
                raise UnknownNameError("module", path, modules)
    outermost = [path for path in chosen if not any(path.startswith(f"{other}.") for other in chosen)]
    if not outermost:
        raise ConfigError(
            "no module was chosen to run in slices; give paths, or a predicate that is true for some", key="which"
        )
    return {path: modules[path] for path in dict.fromkeys(outermost)}


def _refuse_mixing(path: str, module: nn.Module) -> None:
    if type(module).forward is nn.Module.forward:
        raise ConfigError(
            f"{path!r} is a {type(module).__name__}, which is never called; choose what it holds", key=path
        )
    for name, inner in module.named_modules():
        if isinstance(inner, MIXING_KINDS):
            where = f"{path}.{name}" if name else path
            raise ConfigError(
                f"{path!r} has a {type(inner).__name__} at {where!r}, which looks at several positions; leave it out of "
                "tile_sequence",
                key=path,
            )
