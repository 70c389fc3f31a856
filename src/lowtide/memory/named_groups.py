"""Groups of modules that somebody names: however small they are, and wherever they stand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from lowtide.memory.groups import find_groups, is_called, is_leaf
from lowtide.memory.layout_types import GroupSpec
from lowtide.memory.unmanaged import unmanaged_parameters


def find_named_groups(model: nn.Module, names: Iterable[str]) -> tuple[GroupSpec, ...]:
    """As `find_groups`, but each module of these names has a group of its own, also where it would be in another one.

    A small table joins the rest of a deep model and not that of a shallow one: who names it means it in both. A module that
    is made of others, none of them a block, is one group when it is named, and they are in it. The name of a tied parameter
    keeps its group apart likewise, so that the names of a plan's groups find those groups again. Names that say nothing of
    the kind are passed over.

    Example:
        >>> model = nn.Sequential(nn.Embedding(2, 4), nn.Linear(4, 4000))
        >>> [group.name for group in find_groups(model)]
        ['1', '']
        >>> [group.name for group in find_named_groups(model, ["*", "0", "head"])]
        ['0', '1']
    """
    automatic = find_groups(model)
    known = {group.name for group in automatic}
    wanted = [name for name in dict.fromkeys(names) if name and name not in known]
    if not wanted:
        return automatic
    given = _windows(model, automatic, wanted)
    return find_groups(model, given) if given else automatic


def _windows(model: nn.Module, automatic: Sequence[GroupSpec], wanted: Iterable[str]) -> dict[str, list[str]]:
    """What `find_groups` is to be given: by module, what it is to have."""
    modules = dict(model.named_modules(remove_duplicate=False))
    left_out = {name for name, _ in unmanaged_parameters(model)}
    parameters = {name: p for name, p in model.named_parameters(remove_duplicate=False) if name not in left_out}
    windows = {window for group in automatic for window in group.windows}
    blocks = {group.name for group in automatic if group.is_block}
    tied = {id(parameters[p.name]) for group in automatic if len(group.windows) > 1 for p in group.parameters}
    given: dict[str, list[str]] = {}
    for name in wanted:
        path = name.rpartition(".")[0] if name in parameters else name
        held = [parameters[other] for other in parameters if f"{other}.".startswith(f"{name}.")]
        if not path or path not in modules or not held or not _is_called_by_itself(modules, path):
            continue
        holds_blocks = any(block.startswith(f"{path}.") for block in blocks)
        is_apart = path not in windows and all(id(parameter) in tied for parameter in held)
        if not holds_blocks and not is_apart:
            given.setdefault(path, []).append(name)
    return given


def _is_called_by_itself(modules: dict[str, nn.Module], path: str) -> bool:
    # The inside of a compiled module, or of attention, is not.
    outer = ["", *(path.rsplit(".", depth)[0] for depth in range(1, path.count(".") + 1))]
    return is_called(modules[path]) and not any(is_leaf(modules[other]) for other in outer)
