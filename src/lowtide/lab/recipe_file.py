"""Recipes on disk: files that extend others, found by path or by name.

A file may begin with `extends: other`, a path from its own folder, with its suffix or without, or the name of a recipe that
comes with the package (`peak_memory/control`), or with a list of them, of which later ones win. Its
settings then replace those of the others key by key, and those of a mapping one by one; a mapping that names another
`kind`, or an optimizer of another `name`, begins anew. A relative path of data is from the folder of the file it stands in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

from lowtide import config, plain_text
from lowtide.errors import ConfigError, LowtideError, UnknownNameError
from lowtide.lab.recipe import Recipe
from lowtide.lab.recipe_parts import TextFiles
from lowtide.plain_text import Plain

SUFFIXES = (".yaml", ".yml", ".json")
FOLDER = Path(__file__).resolve().parents[1] / "recipes"
"""The recipes that come with the package."""
RUNS_FOLDER = FOLDER.with_name("train") / "recipes"
"""Those of `lowtide train`."""
OVERRIDE = "--set"
"""The source of a setting that no file has."""
_PATHS = ("path", "text", "tokens", "held_out")
"""Keys of data that are paths."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRecipe:
    """A recipe, and where its settings come from."""

    recipe: Recipe
    sources: dict[str, str]
    """The source of each setting that is not left to its default, by dotted key: the path of a file, or `OVERRIDE`."""


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a .yaml, .yml or .json file, with dotted overrides such as `plan.update=device`.

    Raises:
        ConfigError: The file or one it extends cannot be read, a key is unknown, or a value does not fit.
    """
    return resolve_recipe(path, overrides).recipe


def read_as(kind: type[T], path: Path, overrides: Sequence[str] = ()) -> T:
    """A recipe of another kind, from a file that is read in the same way; overrides may give what the file lacks.

    Raises:
        ConfigError: As for `read_recipe`.
    """
    where = f"{path} with {', '.join(overrides)}" if overrides else str(path)
    try:
        return config.from_settings(kind, plain_of(read_tree(path)), overrides)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", key=error.key) from error


def resolve_recipe(path: str | Path, overrides: Sequence[str] = ()) -> ResolvedRecipe:
    """The recipe of a file with the sources of its settings.

    Raises:
        ConfigError: As for `read_recipe`.
    """
    path = Path(path)
    tree = read_tree(path)
    try:
        recipe = config.from_plain(Recipe, plain_of(tree))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", key=error.key) from error
    parts = config.to_plain(recipe).items()
    kinds = {f"{key}.kind": str(part["kind"]) for key, part in parts if isinstance(part, dict) and "kind" in part}
    try:
        recipe = config.override(recipe, overrides)
    except ConfigError as error:
        raise ConfigError(f"{path} with {', '.join(overrides)}: {error}", key=error.key) from error
    if isinstance(recipe.data, TextFiles):
        # Those of files are absolute by now; one that was typed is from where it was typed.
        recipe = replace(recipe, data=replace(recipe.data, path=recipe.data.path.resolve()))
    return ResolvedRecipe(recipe=recipe, sources=_overridden(_sources_of(tree), overrides, kinds))


def extended_files(path: Path) -> list[Path]:
    """The files that a file extends by itself, in its order.

    Raises:
        ConfigError: The file cannot be read, or one of them is not there.
    """
    return _extended(path, _parse(path))


def known_recipes(more: Sequence[Path] = (), *, base: Path = FOLDER) -> dict[str, Path]:
    """The file of each name, such as `peak_memory/control`, those of the package (of `base`) first; a name that a later folder
    has too is the later one's.

    Raises:
        ConfigError: A folder does not exist.
    """
    for folder in more:
        if not folder.is_dir():
            raise ConfigError(f"there is no folder of recipes {str(folder)!r}", key="recipes")
    known: dict[str, Path] = {}
    for folder in (base, *more):
        files = [path for path in folder.rglob("*") if path.suffix in SUFFIXES and not path.name.startswith("_")]
        files.sort(key=lambda path: SUFFIXES.index(path.suffix), reverse=True)
        found = {path.relative_to(folder).with_suffix("").as_posix(): path for path in files}
        known |= {name: found[name] for name in sorted(found)}
    return known


def find_recipe(name: str, known: Mapping[str, Path] | None = None) -> Path:
    """The file of a recipe: a path with its suffix, a name such as `peak_memory/control`, or its last part where that is unique.

    Raises:
        UnknownNameError: There is none; the nearest name is in the message.
        ConfigError: Several recipes end so, or it is a folder's name.
    """
    if Path(name).suffix in SUFFIXES:
        return Path(name)  # reading it says what is wrong with it
    known = known_recipes() if known is None else known
    return known[only_name(name, known)]


def names_like(word: str, known: Mapping[str, Path]) -> list[str]:
    """The name itself, or those that it is the last part of."""
    return [word] if word in known else [name for name in known if name.endswith(f"/{word}")]


def only_name(word: str, known: Mapping[str, Path]) -> str:
    """The one name that a word stands for.

    Raises:
        UnknownNameError: There is none; the nearest name is in the message.
        ConfigError: Several recipes end so, or it is a folder's name.
    """
    names = names_like(word, known)
    if not names:
        raise unknown_recipe(word, known)
    if len(names) > 1:
        raise ConfigError(f"{word!r} is the end of several recipes: {', '.join(names)}; give one of these")
    return names[0]


def unknown_recipe(word: str, known: Mapping[str, Path]) -> LowtideError:
    """Says which names are nearest, whole or by their last part; a folder, or a file without its suffix, is likelier meant."""
    folder = word.rstrip("/")
    if any(name.startswith(f"{folder}/") for name in known):
        return ConfigError(f"{word!r} is a folder of recipes: write '{folder}/*' for all of them")
    here = next((file for suffix in SUFFIXES if (file := Path(f"{word}{suffix}")).is_file()), None)
    if here is not None:
        return ConfigError(f"there is no recipe named {word!r}, but a file: write {here}")
    # Once each: two folders may have recipes of one last part.
    names = list(dict.fromkeys([*known, *(name.rpartition("/")[2] for name in known)]))
    return UnknownNameError("recipe", word, names, listed_by="lowtide lab ls")


def read_tree(path: Path, seen: tuple[Path, ...] = ()) -> Tree:
    """The settings of a file over those of all that it extends, with their sources; paths of data are absolute.

    Args:
        path: The file.
        seen: The files that extend it, by way of one another.

    Raises:
        ConfigError: A file cannot be read, is no mapping, or extends what is not there.
    """
    if path.resolve() in seen:
        raise ConfigError(f"{path} extends itself, by way of {', '.join(str(step) for step in seen)}", key="extends")
    plain = _parse(path)
    merged: Tree = {}
    for other in _extended(path, plain):
        merged = merge(merged, read_tree(other, (*seen, path.resolve())))
    data = plain.get("data")
    if isinstance(data, dict):
        # From the file that names it, so that a folder with a recipe and its texts can be moved and run from anywhere.
        named = {key: value for key in _PATHS if isinstance(value := data.get(key), str)}
        plain["data"] = data | {key: str((path.parent / value).resolve()) for key, value in named.items()}
    plain.pop("extends", None)
    return merge(merged, _tree_of(plain, str(path.resolve())))


def _parse(path: Path) -> dict[str, Plain]:
    plain = plain_text.read(path, "recipe file")
    if plain is None:
        return {}
    if not isinstance(plain, dict):
        raise ConfigError(f"{path} must be a mapping of settings, got {type(plain).__name__}")
    return plain


def _extended(path: Path, plain: Mapping[str, Plain]) -> list[Path]:
    named = plain.get("extends", [])
    files = []
    for other in named if isinstance(named, list) else [named]:
        if not isinstance(other, str):
            raise ConfigError(
                f"{path}: 'extends' must be the path of another recipe, or a list of paths, got {other!r}",
                key="extends",
            )
        files.append(_find_extended(path, other))
    return files


def _find_extended(path: Path, other: str) -> Path:
    """The file that another one extends: one in the same folder, or a recipe that comes with the package, by its name."""
    named = path.parent / other
    for file in (named, *(path.parent / f"{other}{suffix}" for suffix in SUFFIXES)):
        # Not itself: `extends: control` in a file of that name is the package's.
        if file.is_file() and (file == named or file.resolve() != path.resolve()):
            return file
    try:
        name = other.removesuffix(Path(other).suffix) if Path(other).suffix in SUFFIXES else other
        found = find_recipe(name, known_recipes(base=RUNS_FOLDER) | known_recipes())
    except LowtideError as error:
        raise ConfigError(
            f"{path} extends {other!r}, which is neither the file {named} nor a recipe of the package: {error}",
            key="extends",
        ) from error
    return found


def _overridden(sources: Mapping[str, str], overrides: Sequence[str], kinds: dict[str, str]) -> dict[str, str]:
    """The sources after overrides that fit: what one replaces has no other source any more."""
    left = dict(sources)
    for override in overrides:
        key, _, text = (part.strip() for part in override.partition("="))
        is_other_kind = key.endswith(".kind") and kinds.get(key) != text
        replaced = key.removesuffix(".kind") if is_other_kind else key
        left = {known: source for known, source in left.items() if not f"{known}.".startswith(f"{replaced}.")}
        left |= _sources_of(_tree_of({key: _mapping(text) or text}, OVERRIDE))
        kinds = {**kinds, key: text} if is_other_kind else kinds
    return left


def _mapping(text: str) -> dict[str, Plain] | None:
    """A mapping that was typed whole, such as `plan={weights: resident}`; None for anything else."""
    try:
        value = plain_text.parse(text, "yaml")
    except ConfigError:
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True)
class Setting:
    """One value, which is no mapping."""

    value: Plain
    source: str
    """The path of the file that it stands in, or whatever else set it."""


Tree: TypeAlias = "dict[str, Setting | Tree]"


def _tree_of(plain: Mapping[str, Plain], source: str) -> Tree:
    """The settings of one source."""
    return {
        key: _tree_of(value, source) if isinstance(value, dict) else Setting(value, source)
        for key, value in plain.items()
    }


def merge(below: Tree, above: Tree) -> Tree:
    """The settings of one file over those of another, key by key, and those of a mapping one by one.

    A mapping that names another `kind`, or an optimizer of another `name`, begins anew. The settings of a built-in model go with
    it where a user's own model comes in its place: that one has none.
    """
    merged = dict(below)
    if ":" in str(_value_of(above.get("model"))):
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


def _sources_of(tree: Tree, prefix: str = "") -> dict[str, str]:
    """The source of each setting, by its dotted key."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        found |= _sources_of(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value.source}
    return found


def _begins_anew(key: str, old: Tree, new: Tree) -> bool:
    word = "name" if key == "optimizer" else "kind"
    return word in new and _value_of(new[word]) != _value_of(old.get(word))


def _value_of(setting: Setting | Tree | None) -> Plain:
    return setting.value if isinstance(setting, Setting) else None
