"""Settings of recipe files put together, each with the file that it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from lowtide.plain_text import Plain


@dataclass(frozen=True, slots=True)
class Setting:
    """One value, which is no mapping."""

    value: Plain
    source: str
    """The path of the file that it stands in, or whatever else set it."""


Tree: TypeAlias = "dict[str, Setting | Tree]"


def tree_of(plain: Mapping[str, Plain], source: str) -> Tree:
    """The settings of one source."""
    return {
        key: tree_of(value, source) if isinstance(value, dict) else Setting(value, source)
        for key, value in plain.items()
    }


def merge(below: Tree, above: Tree) -> Tree:
    """The settings of one file over those of another, key by key, and those of a mapping one by one.

    A mapping that names another `kind`, or an optimizer of another `name`, begins anew. The settings of a built-in model go with
    it where a model of somebody's own comes in its place: that one has none.
    """
    merged = dict(below)
    if ":" in str(_value(above.get("model"))):
        merged.pop("model_settings", None)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and not _begins_anew(key, old, value):
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


def plain_of(tree: Tree) -> dict[str, Plain]:
    """The settings without their sources."""
    return {key: plain_of(value) if isinstance(value, dict) else value.value for key, value in tree.items()}


def sources_of(tree: Tree) -> dict[str, str]:
    """The source of each setting, by its dotted key."""
    return dict(_sources(tree, ""))


def _sources(tree: Tree, prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _sources(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value.source


def _begins_anew(key: str, old: Tree, new: Tree) -> bool:
    word = "name" if key == "optimizer" else "kind"
    return word in new and _value(new[word]) != _value(old.get(word))


def _value(setting: Setting | Tree | None) -> Plain:
    return setting.value if isinstance(setting, Setting) else None
