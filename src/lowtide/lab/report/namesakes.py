"""What tells a configuration from others of the same name: every setting in which they differ, in a few words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowtide.plain_text import Plain

_MAX_WORD = 24
"""Letters of a value: labels stand in charts."""


def settings_apart(mine: Mapping[str, Plain], all_of_name: Sequence[Mapping[str, Plain]]) -> str:
    """The settings in which namesakes are not all alike, as a recipe has them; "" where it has no namesake.

    A part that some lack altogether, such as `compile`, is `none` where it is lacking; where it is there, its first
    setting stands for it, and those follow in which the ones that have it differ. Of a part that comes in kinds the
    settings of another kind are not named, and those that one kind alone has only where they differ within it.

    Example:
        >>> settings_apart({"steps": 2}, [{"steps": 2}, {"steps": 3, "compile.scope": "model", "compile.backend": "x"}])
        'steps=2, compile=none'
        >>> settings_apart({"steps": 3, "compile.scope": "model"}, [{"steps": 2}, {"steps": 3, "compile.scope": "model"}])
        'steps=3, compile.scope=model'

    Args:
        mine: By dotted keys, as `flat_settings` gives them.
        all_of_name: The same of all of the name, this one among them.
    """
    keys = list(dict.fromkeys(key for recipe in all_of_name for key in recipe))
    words: dict[str, None] = {}
    for key in keys:
        if any(other.startswith(f"{key}.") for other in keys):
            continue  # an empty part of one, whose settings others have
        values = [recipe.get(key) for recipe in all_of_name]
        if all(value == values[0] for value in values):
            continue
        for word in _words(key, mine, all_of_name, keys):
            words[word] = None
    return ", ".join(words)


def _words(
    key: str, mine: Mapping[str, Plain], all_of_name: Sequence[Mapping[str, Plain]], keys: Sequence[str]
) -> list[str]:
    kind = f"{key.rpartition('.')[0]}.kind"
    others = [recipe for recipe in all_of_name if kind in mine and recipe.get(kind, mine[kind]) != mine[kind]]
    if others and (key not in mine or _is_said_by_kind(key, mine, all_of_name, kind)):
        return []
    part = _lacking_part(key, all_of_name)
    if part is None:
        return [f"{key}={_word(mine.get(key))}"]
    if not _has(mine, part):
        # Only the outermost: where the plan is none, all of its parts are.
        return [f"{part}=none"]
    inside = [recipe for recipe in all_of_name if _has(recipe, part)]
    is_first = key == next(other for other in keys if other.startswith(f"{part}."))
    if not is_first and all(recipe.get(key) == mine.get(key) for recipe in inside):
        return []
    return [f"{key}={_word(mine.get(key))}"]


def _is_said_by_kind(
    key: str, mine: Mapping[str, Plain], all_of_name: Sequence[Mapping[str, Plain]], kind: str
) -> bool:
    """Whether only recipes of my kind have a setting, and all of them alike."""
    if any(key in recipe for recipe in all_of_name if recipe.get(kind) != mine[kind]):
        return False
    return all(recipe.get(key) == mine[key] for recipe in all_of_name if recipe.get(kind) == mine[kind])


def _lacking_part(key: str, all_of_name: Sequence[Mapping[str, Plain]]) -> str | None:
    """The outermost part around a setting that some do not have at all."""
    names = key.split(".")
    parts = (".".join(names[:length]) for length in range(1, len(names)))
    return next((part for part in parts if not all(_has(recipe, part) for recipe in all_of_name)), None)


def _has(recipe: Mapping[str, Plain], part: str) -> bool:
    return any(key.startswith(f"{part}.") for key in recipe)


def _word(value: Plain) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    text = str(value)
    return text if len(text) <= _MAX_WORD else f"{text[: _MAX_WORD - 1]}…"
