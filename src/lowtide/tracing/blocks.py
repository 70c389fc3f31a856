"""The repeated blocks of a model: the layers of a transformer, the stages of a network built from equal parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Members of the outermost `ModuleList`s and `Sequential`s that hold at least two modules of one class, in order."""
    found: list[tuple[str, nn.Module]] = []

    def visit(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if isinstance(child, nn.ModuleList | nn.Sequential) and _repeats(child):
                for index, member in child.named_children():
                    if next(member.parameters(), None) is not None:
                        found.append((f"{child_path}.{index}", member))
            else:
                visit(child_path, child)

    visit("", model)
    return found


def _repeats(container: nn.Module) -> bool:
    kinds = [type(child) for child in container.children() if next(child.parameters(), None) is not None]
    simple = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.BatchNorm2d, nn.Embedding)
    return any(kinds.count(kind) >= 2 for kind in set(kinds) if not issubclass(kind, simple))


def caching_configs(model: nn.Module) -> list[Any]:
    """Configurations of Hugging Face models that keep keys and values of past tokens.

    A recomputed block would put its own into the cache a second time; transformers' switch for recomputation turns the
    cache off as well.
    """
    found = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    return [config for config in found.values() if getattr(config, "use_cache", False) is True]


def recompute_blocks(model: nn.Module) -> int:
    """Checkpoint each repeated block in place (non-reentrant), key-value caches off; returns how many blocks there are."""
    blocks = repeated_blocks(model)
    for config in caching_configs(model):
        config.use_cache = False
    for _, block in blocks:
        forward = block.forward

        def run(*args: object, forward: object = forward, **kwargs: object) -> object:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)  # type: ignore[operator]
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)  # type: ignore[arg-type]

        block.forward = run
    return len(blocks)
