"""The repeated blocks of a model: the layers of a transformer, the stages of a network built from equal parts."""

from __future__ import annotations

from torch import nn

from lowtide import compat

SIMPLE_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.BatchNorm2d, nn.Embedding)
"""Several of these in a row are a chain of plain layers, not a stack of blocks."""


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Members of the outermost `ModuleList`s and `Sequential`s that hold at least two modules of one class, in order."""
    found: list[tuple[str, nn.Module]] = []

    def visit(path: str, module: nn.Module) -> None:
        repeats = isinstance(module, nn.ModuleList | nn.Sequential) and _repeats(module)
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if not repeats:
                visit(child_path, child)
            elif next(child.parameters(), None) is not None:
                found.append((child_path, child))

    visit("", model)
    return found


def _repeats(container: nn.Module) -> bool:
    kinds = [
        type(compat.compiled_original(child) or child)
        for child in container.children()
        if next(child.parameters(), None) is not None
    ]
    return any(kinds.count(kind) >= 2 for kind in set(kinds) if not issubclass(kind, SIMPLE_KINDS))
