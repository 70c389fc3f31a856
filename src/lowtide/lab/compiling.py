"""A recipe's compilation: the whole model, or each repeated block by itself."""

from __future__ import annotations

from typing import Literal

from torch import nn

from lowtide import compat
from lowtide.errors import ConfigError
from lowtide.lab.recipe import CompileRecipe
from lowtide.memory.groups import find_groups


def compile_model(model: nn.Module, recipe: CompileRecipe) -> None:
    """Have the model's calls compiled, at the first of them.

    Raises:
        ConfigError: The model has no repeated blocks, and only those were to be compiled.
    """
    backend: str | compat.BudgetedCompiler = recipe.backend
    if recipe.activation_budget is not None:
        backend = compat.BudgetedCompiler(recipe.activation_budget, recipe.backend)
    for module in compiled_modules(model, recipe.scope):
        module.compile(backend=backend, dynamic=False)


def compiled_modules(model: nn.Module, scope: Literal["model", "blocks"]) -> list[nn.Module]:
    """What is compiled by itself.

    Raises:
        ConfigError: The model has no repeated blocks, and only those are asked for.
    """
    if scope == "model":
        return [model]
    blocks = [model.get_submodule(group.name) for group in find_groups(model) if group.is_block]
    if not blocks:
        raise ConfigError(
            "compile.scope is 'blocks', and the model has no repeated blocks; compile the whole of it: scope: model",
            key="compile.scope",
        )
    return blocks
