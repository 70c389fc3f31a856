"""The state of a tiled layer in the form of the ordinary one: one "weight" and one "bias", joined and split by hooks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import ConfigError

NAMES = ("weight", "bias")


def tile_sizes(num_rows: int, num_tiles: int) -> tuple[int, ...]:
    """Rows of each tile: as even as can be, the larger ones first.

    Example:
        >>> tile_sizes(10, 4)
        (3, 3, 2, 2)
    """
    given: object = num_tiles
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise ConfigError(f"num_tiles is {given!r}; give a whole number, 1 to {num_rows}", key="num_tiles")
    if not 1 <= num_tiles <= num_rows:
        raise ConfigError(
            f"{num_rows} rows cannot be split into {num_tiles} tiles; give 1 to {num_rows}", key="num_tiles"
        )
    least, more = divmod(num_rows, num_tiles)
    return tuple(least + (index < more) for index in range(num_tiles))


def tile_ranges(sizes: Sequence[int]) -> list[range]:
    """The rows of each tile among those of the layer.

    Example:
        >>> tile_ranges((3, 2))
        [range(0, 3), range(3, 5)]
    """
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def within_tile(ids: Tensor, rows: range, num_rows: int) -> Tensor:
    """Ids counted from the tile's first row; those of other tiles become a row of this one, to be dropped later.

    Ids that no tile has stay out of range in the first or last one: the lookup there fails as it would in the whole.
    """
    lowest = 0 if rows.start > 0 else None
    highest = len(rows) - 1 if rows.stop < num_rows else None
    local = ids - rows.start
    return local if lowest is None and highest is None else local.clamp(lowest, highest)


def joined(tiles: Sequence[Tensor]) -> Tensor:
    """The rows of all tiles in one tensor, a copy; on the host where the tiles are on several devices."""
    with torch.no_grad():
        if len({tile.device for tile in tiles}) > 1:
            return torch.cat([tile.detach().cpu() for tile in tiles])
        return torch.cat([tile.detach() for tile in tiles])


def split_parameter(parameter: Tensor, sizes: Sequence[int]) -> list[nn.Parameter]:
    """A Parameter of its own for each tile, with its rows of the values and of the gradient."""
    gradients = [None] * len(sizes) if parameter.grad is None else list(parameter.grad.split(list(sizes)))
    tiles = []
    for rows, gradient in zip(parameter.detach().split(list(sizes)), gradients, strict=True):
        # A copy: a view would keep the memory of the whole layer alive as long as one of its tiles is.
        tile = nn.Parameter(rows.clone(), requires_grad=parameter.requires_grad)
        tile.grad = None if gradient is None else gradient.clone()
        tiles.append(tile)
    return tiles


def join_parameters(tiles: Sequence[Tensor]) -> nn.Parameter:
    """Undo `split_parameter`."""
    whole = nn.Parameter(joined(tiles), requires_grad=tiles[0].requires_grad)
    gradients = [tile.grad for tile in tiles if tile.grad is not None]
    if len(gradients) == len(tiles):
        whole.grad = joined(gradients)
    return whole


def keep_ordinary_state(layer: nn.Module) -> None:
    """Let a layer with a `tiles` child save and load as if it had one weight and one bias.

    What `state_dict` gives is a copy: the joined rows exist nowhere else. Missing keys and sizes that do not fit are
    reported under the ordinary names.
    """
    layer.register_state_dict_post_hook(_join_saved)
    layer.register_load_state_dict_pre_hook(_split_loaded)


def _tiles_of(layer: nn.Module) -> list[nn.Module]:
    return list(layer.get_submodule("tiles").children())


def _join_saved(layer: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any]) -> None:
    del local_metadata
    num_tiles = len(_tiles_of(layer))
    for name in NAMES:
        keys = [f"{prefix}tiles.{index}.{name}" for index in range(num_tiles)]
        if keys[0] in state:
            state[prefix + name] = joined([state.pop(key) for key in keys])
    metadata: dict[str, Any] = getattr(state, "_metadata", {})
    for path in [path for path in metadata if path == f"{prefix}tiles" or path.startswith(f"{prefix}tiles.")]:
        del metadata[path]


def _split_loaded(
    layer: nn.Module,
    state: dict[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_messages: list[str],
) -> None:
    del local_metadata, strict, unexpected_keys
    modules = _tiles_of(layer)
    for name in NAMES:
        own = [tile for tile in (getattr(module, name, None) for module in modules) if isinstance(tile, Tensor)]
        if not own:
            continue  # an unexpected key is found by torch itself
        whole = state.pop(prefix + name, None)
        shape = (sum(tile.shape[0] for tile in own), *own[0].shape[1:])
        if whole is None:
            missing_keys.append(prefix + name)
        elif tuple(whole.shape) != shape:
            error_messages.append(
                f"size mismatch for {prefix}{name}: copying a param with shape {whole.shape} from checkpoint, the shape in "
                f"current model is {torch.Size(shape)}."
            )
            whole = None
        # Tiles that get nothing are given what they have, so that torch does not report each of them as well.
        rows = own if whole is None else whole.split([tile.shape[0] for tile in own])
        for index, tile in enumerate(rows):
            state[f"{prefix}tiles.{index}.{name}"] = tile
