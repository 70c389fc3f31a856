"""tile and untile: put tiled layers in the place of ordinary ones in a model, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from lowtide import compat
from lowtide.activations.tiled_layers import TiledEmbedding, TiledLinear
from lowtide.errors import ConfigError, UnknownNameError

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
