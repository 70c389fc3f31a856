"""Experiments as data: recipes, and the check of a managed run against plain PyTorch."""

from __future__ import annotations

from lowtide.lab.check import CheckReport, run_check
from lowtide.lab.recipe import Recipe
from lowtide.lab.recipe_file import read_recipe

__all__ = ["CheckReport", "Recipe", "read_recipe", "run_check"]
