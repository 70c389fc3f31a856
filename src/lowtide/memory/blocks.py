"""The blocks of a model: the layers of a transformer, the stages of a network built from equal parts, a shared layer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from torch import nn

from lowtide import compat

SIMPLE_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.BatchNorm2d, nn.Embedding)
"""Several of these in a row are a chain of plain layers, not a stack of blocks."""
BLOCK_NAME = re.compile(r"(block|layer|cell)_?\d*$", re.IGNORECASE)
"""How the name of a block, or of its class, ends."""

_Named = tuple[str, nn.Module]


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that there are several of, and shared ones, which a forward may call several times; in order.

    Members of the outermost `ModuleList`s and `Sequential`s that hold at least two modules of one class, or one module
    twice; a list of lists counts as one list. Also the only member of a `ModuleList`, as the layer that all layers of an
    ALBERT share, unless it has such a stack inside. A model without any of these may have its block outside of a list: the
    outermost modules that are made of others, and that are named a block, a layer or a cell, themselves or by their class.
    """
    found = list(_in_stacks("", model, with_single_ones=True))
    return found or list(_named_so("", model))


def _in_stacks(path: str, module: nn.Module, *, with_single_ones: bool) -> Iterator[_Named]:
    members = list(_members(path, module)) if isinstance(module, nn.ModuleList | nn.Sequential) else []
    if _repeats(members):
        first_places = {id(member): place for place, member in reversed(members)}
        yield from ((place, member) for place, member in members if first_places[id(member)] == place)
        return
    if with_single_ones and isinstance(module, nn.ModuleList) and len(members) == 1 and _is_composed(members[0][1]):
        yield from list(_in_stacks(*members[0], with_single_ones=False)) or members
        return
    for name, child in module.named_children():
        yield from _in_stacks(_joined(path, name), child, with_single_ones=with_single_ones)


def _members(path: str, container: nn.Module) -> Iterator[_Named]:
    """With weights, by place: the same module may stand at several."""
    for name, child in container.named_modules(remove_duplicate=False):
        if not name or "." in name or next(child.parameters(), None) is None:
            continue  # the container itself, or deeper than its children
        if isinstance(child, nn.ModuleList):
            yield from _members(_joined(path, name), child)  # never called itself
        else:
            yield _joined(path, name), child


def _repeats(members: list[_Named]) -> bool:
    kinds = Counter(_kind(member) for _, member in members)
    return any(count > 1 for kind, count in kinds.items() if not issubclass(kind, SIMPLE_KINDS))


def _named_so(path: str, module: nn.Module) -> Iterator[_Named]:
    for name, child in module.named_children():
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)  # never called itself
        names_say_so = any(BLOCK_NAME.search(word) for word in (name, _kind(child).__name__))
        if names_say_so and not is_list and _is_composed(child):
            yield _joined(path, name), child
        else:
            yield from _named_so(_joined(path, name), child)


def _is_composed(module: nn.Module) -> bool:
    """Whether the weights of other modules are inside."""
    original = compat.compiled_original(module) or module
    return any(next(child.parameters(), None) is not None for child in original.children())


def _kind(module: nn.Module) -> type[nn.Module]:
    return type(compat.compiled_original(module) or module)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
