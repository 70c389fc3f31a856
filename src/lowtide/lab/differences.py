"""What a recipe does differently, in a few words: its settings that are not those of what it descends from."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from lowtide import config
from lowtide.errors import ConfigError
from lowtide.lab.recipe import Recipe
from lowtide.lab.recipe_file import extended_files, read_tree
from lowtide.lab.settings_tree import Tree, merge, plain_of
from lowtide.plain_text import Plain

NOT_COMPARED = frozenset({"model", "about", "published", "tolerance"})
"""Said elsewhere, or no part of a run."""


def recipe_differences(path: Path, recipe: Recipe) -> tuple[str, ...]:
    """Settings such as `dtype=bfloat16` and `plan.schedule=in_backward`, in the order of the recipe's fields.

    Against the files at the end of all that this one extends, so that a variant of a variant shows both changes; against
    the defaults where it extends none, or such as are no recipe by themselves.
    """
    base = Recipe(model=recipe.model)
    roots = list(_roots(path))
    if roots != [path]:
        tree: Tree = {}
        for root in roots:
            tree = merge(tree, read_tree(root))
        with contextlib.suppress(ConfigError):  # such as shared settings without a model
            base = config.from_plain(Recipe, plain_of(tree))
    return tuple(_differences(recipe, base, config.to_plain(recipe), ""))


def _roots(path: Path) -> Iterator[Path]:
    """The files at the ends of the chains of `extends`. The file was read before, so there are ends."""
    others = extended_files(path)
    if not others:
        yield path
    for other in others:
        yield from _roots(other)


def _differences(value: object, base: object, plain: Plain, path: str) -> Iterator[str]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        assert isinstance(plain, dict)
        is_new = type(base) is not type(value)
        # A part that there was not at all: its first setting says what it is, also where that is the default.
        named = dataclasses.fields(value)[0].name if base is None and "kind" not in plain else None
        bases = _defaults(type(value)) if is_new else {name: getattr(base, name) for name in plain if name != "kind"}
        inner = [
            difference
            for field in dataclasses.fields(value)
            if path or field.name not in NOT_COMPARED
            for difference in _differences(
                getattr(value, field.name),
                dataclasses.MISSING if field.name == named else bases.get(field.name, dataclasses.MISSING),
                plain[field.name],
                f"{path}.{field.name}" if path else field.name,
            )
        ]
        if is_new and "kind" in plain:
            yield f"{path}={plain['kind']}"
        elif is_new and not inner:
            yield path
        yield from inner
    elif isinstance(value, dict) and isinstance(base, dict):
        assert isinstance(plain, dict)
        for key in dict.fromkeys([*value, *base]):
            yield from _differences(value.get(key), base.get(key), plain.get(key), f"{path}.{key}")
    elif value != base:
        yield f"{path}={_shown(plain)}"


def _defaults(kind: type) -> dict[str, object]:
    """What the fields of a class are where they are left out; those that cannot be are not in it."""
    made = {
        field.name: field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        for field in dataclasses.fields(kind)
    }
    return {name: default for name, default in made.items() if default is not dataclasses.MISSING}


def _shown(plain: Plain) -> str:
    # As `--set` takes it.
    return plain if isinstance(plain, str) else json.dumps(plain)
