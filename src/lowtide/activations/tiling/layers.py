"""TiledLinear and TiledEmbedding: a huge layer as a row of small ones, so that it does not set the budget; and `tile`, which
puts them in the place of ordinary layers of a model.

The weight is split along its rows (output features, or rows of a table). Each tile is a module of its own with a
Parameter of its own, and is called by itself: under a session each is a group that comes and goes, so that the device holds
a tile or two in place of the layer. Saved and loaded, the layer looks like the ordinary one.
Its state is joined and split by hooks: one "weight" and one "bias".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.errors import ConfigError, UnknownNameError

NAMES = ("weight", "bias")


class TiledLinear(nn.Module):
    """`nn.Linear` whose output features are computed tile by tile. Outputs are those of the whole, to rounding.

    Example:
        >>> linear = nn.Linear(4, 10)
        >>> tiled = TiledLinear.from_linear(linear, num_tiles=3)
        >>> [tile.out_features for tile in tiled.tiles], list(tiled.state_dict())
        ([4, 3, 3], ['weight', 'bias'])
        >>> bool(torch.allclose(tiled(torch.ones(2, 4)), linear(torch.ones(2, 4))))
        True
    """

    def __init__(self, tiles: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.tiles = nn.ModuleList(tiles)
        self.in_features = tiles[0].in_features
        self.out_features = sum(tile.out_features for tile in tiles)
        _keep_ordinary_state(self)

    @classmethod
    def from_linear(cls, linear: nn.Linear, num_tiles: int) -> TiledLinear:
        """Split a layer. Its values are copied, its gradients too; the layer itself is left as it is."""
        sizes = tile_sizes(linear.out_features, num_tiles)
        weights = _split_parameter(linear.weight, sizes)
        # torch's own types say that there is always a bias.
        bias_of: Tensor | None = linear.bias
        biases = [None] * num_tiles if bias_of is None else _split_parameter(bias_of, sizes)
        tiles = []
        for size, weight, bias in zip(sizes, weights, biases, strict=True):
            tile = nn.Linear(linear.in_features, size, bias=False, device="meta")
            tile.weight = weight
            tile.register_parameter("bias", bias)
            tiles.append(tile)
        return cls(tiles).train(linear.training)

    def to_linear(self) -> nn.Linear:
        """The ordinary layer, with copies of the values and gradients."""
        tiles = [tile for tile in self.tiles if isinstance(tile, nn.Linear)]
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = _join_parameters([tile.weight for tile in tiles])
        biases: list[Tensor | None] = [tile.bias for tile in tiles]
        if present := [bias for bias in biases if bias is not None]:
            linear.register_parameter("bias", _join_parameters(present))
        return linear.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`. The whole output is made; see `tiled_cross_entropy` for a loss
        without it.
        """
        return torch.cat([tile(x) for tile in self.tiles], dim=-1)

    def extra_repr(self) -> str:
        """For printing."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class TiledEmbedding(nn.Module):
    """`nn.Embedding` that is looked up tile by tile. Outputs and, on the host, gradients have the same bits.

    Example:
        >>> table = nn.Embedding(10, 4)
        >>> ids = torch.tensor([[0, 9, 5]])
        >>> bool((TiledEmbedding.from_embedding(table, num_tiles=3)(ids) == table(ids)).all())
        True
    """

    def __init__(self, tiles: Sequence[nn.Embedding], padding_idx: int | None = None) -> None:
        super().__init__()
        self.tiles = nn.ModuleList(tiles)
        self.num_embeddings = sum(tile.num_embeddings for tile in tiles)
        self.embedding_dim = tiles[0].embedding_dim
        self.padding_idx = padding_idx
        _keep_ordinary_state(self)

    @classmethod
    def from_embedding(cls, table: nn.Embedding, num_tiles: int) -> TiledEmbedding:
        """Split a table. Its values are copied, its gradient too; the table itself is left as it is."""
        for name, value in (
            ("max_norm", table.max_norm is not None),
            ("scale_grad_by_freq", table.scale_grad_by_freq),
            ("sparse", table.sparse),
        ):
            if value:
                # Each tile is asked for all ids, those of other tiles too, whose results are then dropped.
                raise ConfigError(
                    f"an embedding with {name}={getattr(table, name)} cannot be tiled: each tile would act on rows that "
                    "were not looked up in it; put the table on the host, or leave it whole",
                    key=name,
                )
        sizes = tile_sizes(table.num_embeddings, num_tiles)
        tiles = []
        start = 0
        for size, weight in zip(sizes, _split_parameter(table.weight, sizes), strict=True):
            padding_idx = None if table.padding_idx is None else table.padding_idx - start
            inside = padding_idx is not None and 0 <= padding_idx < size
            tile = nn.Embedding(size, table.embedding_dim, padding_idx if inside else None, device="meta")
            tile.weight = weight
            tiles.append(tile)
            start += size
        return cls(tiles, table.padding_idx).train(table.training)

    def to_embedding(self) -> nn.Embedding:
        """The ordinary table, with copies of the values and gradients."""
        table = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta")
        table.weight = _join_parameters([tile.weight for tile in self.tiles if isinstance(tile, nn.Embedding)])
        return table.train(self.training)

    def forward(self, ids: Tensor) -> Tensor:
        """`[...]` to `[..., embedding_dim]`."""
        sizes = [tile.num_embeddings for tile in self.tiles if isinstance(tile, nn.Embedding)]
        out: Tensor | None = None
        for tile, rows in zip(self.tiles, tile_ranges(sizes), strict=True):
            found = tile(within_tile(ids, rows, self.num_embeddings))
            # Tiles come in order of their rows, so what a tile says of ids beyond it is replaced by the next.
            out = found if out is None else torch.where((ids >= rows.start).unsqueeze(-1), found, out)
        assert out is not None
        return out

    def extra_repr(self) -> str:
        """For printing."""
        return f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}"


TiledLayer = TiledLinear | TiledEmbedding


def tile(model: nn.Module, num_tiles: Mapping[str, int]) -> None:
    """Replace linear layers and embeddings of a model by tiled ones, in place.

    Parameters are replaced: make the optimizer afterwards. The model's state dictionary keeps its keys, and ordinary
    checkpoints load. Nothing is replaced where one of the layers cannot be.

    Args:
        model: Whose layers are replaced.
        num_tiles: Path of a layer, to the number of its tiles.

    Raises:
        UnknownNameError: The model has no module at a path.
        ConfigError: A layer is of another class, tied, or hooked, or has fewer rows than tiles, or their number is not whole.

    Example:
        >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
        >>> tile(model, {"0": 2, "1": 4})
        >>> [name for name, _ in model.named_parameters() if name.startswith("0")], list(model.state_dict())
        (['0.tiles.0.weight', '0.tiles.1.weight'], ['0.weight', '1.weight', '1.bias'])
        >>> untile(model)
    """
    given: object = num_tiles
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"num_tiles is {given!r}; give the number of tiles by the path of each layer, such as {{'head': 8}}",
            key="num_tiles",
        )
    made = {path: _tiled(model, path, number) for path, number in num_tiles.items()}
    for path, layer in made.items():
        model.set_submodule(path, layer)


def untile(model: nn.Module, paths: Iterable[str] | None = None) -> None:
    """Put ordinary layers back, all or those at some paths, with the values and gradients of the tiles. In place."""
    tiled = {path: module for path, module in model.named_modules() if isinstance(module, TiledLayer)}
    for path in list(tiled) if paths is None else paths:
        if path not in tiled:
            raise UnknownNameError("tiled layer", path, tiled)
        layer = tiled[path]
        model.set_submodule(path, layer.to_linear() if isinstance(layer, TiledLinear) else layer.to_embedding())


def tile_groups(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Each tile as a group of its own, for `find_groups(model, given=...)`: also where tiles are small or in a block.

    Large tiles outside of repeated blocks (a head, a table) are found without it.
    """
    paths = [path for path, module in model.named_modules() if isinstance(module, TiledLayer)]
    return {
        f"{path}.tiles.{index}": (f"{path}.tiles.{index}",)
        for path in paths
        for index in range(len(list(model.get_submodule(f"{path}.tiles").children())))
    }


def _tiled(model: nn.Module, path: str, num_tiles: int) -> TiledLayer:
    modules = dict(model.named_modules(remove_duplicate=False))
    if path not in modules or not path:
        raise UnknownNameError("module", path, [name for name in modules if name])
    module = modules[path]
    # Exactly these: a subclass may use its weight in another way.
    if type(module) not in (nn.Linear, nn.Embedding) or compat.parametrized_names(module) is not None:
        raise ConfigError(
            f"{path!r} is a {type(module).__name__}; only a plain nn.Linear or nn.Embedding can be tiled", key=path
        )
    if compat.has_module_hooks(module) or compat.call_of(module) is not None:
        raise ConfigError(
            f"{path!r} has hooks, or its calls were replaced, and they would be lost; tile the layer first", key=path
        )
    _refuse_tied(model, path, module)
    if isinstance(module, nn.Linear):
        return TiledLinear.from_linear(module, num_tiles)
    assert isinstance(module, nn.Embedding)
    return TiledEmbedding.from_embedding(module, num_tiles)


def _refuse_tied(model: nn.Module, path: str, module: nn.Module) -> None:
    places = [name for name, other in model.named_modules(remove_duplicate=False) if other is module]
    if len(places) > 1:
        raise ConfigError(f"{path!r} is one module at {len(places)} places ({', '.join(places)}); tile none", key=path)
    own = {f"{path}.{name}": parameter for name, parameter in module.named_parameters()}
    keys = {compat.storage_key(parameter): name for name, parameter in own.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in own and (tied := keys.get(compat.storage_key(parameter))) is not None:
            raise ConfigError(
                f"{tied!r} is tied to {name!r}, and each tile has a Parameter of its own, so that the tie would be cut; give "
                "one of the two its own Parameter first, or leave the layer whole",
                key=path,
            )


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


def _joined(tiles: Sequence[Tensor]) -> Tensor:
    """The rows of all tiles in one tensor, a copy; on the host where the tiles are on several devices."""
    with torch.no_grad():
        if len({tile.device for tile in tiles}) > 1:
            return torch.cat([tile.detach().cpu() for tile in tiles])
        return torch.cat([tile.detach() for tile in tiles])


def _split_parameter(parameter: Tensor, sizes: Sequence[int]) -> list[nn.Parameter]:
    """A Parameter of its own for each tile, with its rows of the values and of the gradient."""
    gradients = [None] * len(sizes) if parameter.grad is None else list(parameter.grad.split(list(sizes)))
    tiles = []
    for rows, gradient in zip(parameter.detach().split(list(sizes)), gradients, strict=True):
        # A copy: a view would keep the memory of the whole layer alive as long as one of its tiles is.
        tile = nn.Parameter(rows.clone(), requires_grad=parameter.requires_grad)
        tile.grad = None if gradient is None else gradient.clone()
        tiles.append(tile)
    return tiles


def _join_parameters(tiles: Sequence[Tensor]) -> nn.Parameter:
    """Undo `_split_parameter`."""
    whole = nn.Parameter(_joined(tiles), requires_grad=tiles[0].requires_grad)
    gradients = [tile.grad for tile in tiles if tile.grad is not None]
    if len(gradients) == len(tiles):
        whole.grad = _joined(gradients)
    return whole


def _keep_ordinary_state(layer: nn.Module) -> None:
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
            state[prefix + name] = _joined([state.pop(key) for key in keys])
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
