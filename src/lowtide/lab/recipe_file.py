"""Recipes on disk: files that extend others, found by path or by name.

A file may begin with `extends: other.yaml`, a path from its own folder or the name of a recipe that comes with the package
(`peak_memory/control`), or with a list of them, of which later ones win. Its
settings then replace those of the others key by key, and those of a mapping one by one; a mapping that names another
`kind`, or an optimizer of another `name`, begins anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lowtide import config, plain_text
from lowtide.errors import ConfigError, LowtideError, UnknownNameError
from lowtide.lab.recipe import Recipe
from lowtide.plain_text import Plain

SUFFIXES = (".yaml", ".yml", ".json")
FOLDER = Path(__file__).resolve().parents[1] / "recipes"
"""The recipes that come with the package."""


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a .yaml, .yml or .json file, with dotted overrides such as `plan.update=device`.

    Raises:
        ConfigError: The file or one it extends cannot be read, a key is unknown, or a value does not fit.
    """
    path = Path(path)
    plain = _read(path, ())
    try:
        recipe = config.from_plain(Recipe, plain)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", key=error.key) from error
    try:
        return config.override(recipe, overrides)
    except ConfigError as error:
        raise ConfigError(f"{path} with {', '.join(overrides)}: {error}", key=error.key) from error


def recipe_names(folder: Path = FOLDER) -> tuple[str, ...]:
    """The names of all recipes in a folder and those below it, such as `peak_memory/control`, in order."""
    files = (path for path in folder.rglob("*") if path.suffix in SUFFIXES and not path.name.startswith("_"))
    return tuple(sorted(path.relative_to(folder).with_suffix("").as_posix() for path in files))


def find_recipe(name: str, folder: Path = FOLDER) -> Path:
    """The file of a recipe: a path with its suffix, a name such as `peak_memory/control`, or its last part where that is unique.

    Raises:
        UnknownNameError: There is none; the nearest name is in the message.
        ConfigError: Several recipes end so.
    """
    if Path(name).suffix in SUFFIXES:
        return Path(name)  # whoever reads it says what is wrong with it
    names = recipe_names(folder)
    found = [known for known in names if known == name] or [known for known in names if known.endswith(f"/{name}")]
    if not found:
        raise UnknownNameError("recipe", name, [*names, *(known.rpartition("/")[2] for known in names)])
    if len(found) > 1:
        raise ConfigError(f"{name!r} is the end of several recipes: {', '.join(found)}; give one of these")
    return next(path for suffix in SUFFIXES if (path := folder / f"{found[0]}{suffix}").is_file())


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Plain]:
    if path.resolve() in seen:
        raise ConfigError(f"{path} extends itself, by way of {', '.join(str(step) for step in seen)}", key="extends")
    try:
        plain = plain_text.parse(path.read_text(encoding="utf-8"), plain_text.format_of(path))
    except OSError as error:
        raise ConfigError(f"cannot read the recipe file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", key=error.key) from error
    if plain is None:
        plain = {}
    if not isinstance(plain, dict):
        raise ConfigError(f"{path} must be a mapping of settings, got {type(plain).__name__}")
    extended = plain.pop("extends", [])
    merged: dict[str, Plain] = {}
    for other in extended if isinstance(extended, list) else [extended]:
        if not isinstance(other, str):
            raise ConfigError(
                f"{path}: 'extends' must be the path of another recipe, or a list of paths, got {other!r}",
                key="extends",
            )
        merged = merge_settings(merged, _read(_extended(path, other), (*seen, path.resolve())))
    return merge_settings(merged, plain)


def _extended(path: Path, other: str) -> Path:
    """The file that another one extends: beside it, or a recipe that comes with the package, by its name."""
    beside = path.parent / other
    if beside.is_file():
        return beside
    try:
        found = find_recipe(other.removesuffix(Path(other).suffix) if Path(other).suffix in SUFFIXES else other)
    except LowtideError as error:
        raise ConfigError(
            f"{path} extends {other!r}, which is neither the file {beside} nor a recipe of the package: {error}",
            key="extends",
        ) from error
    return found


def merge_settings(below: dict[str, Plain], above: dict[str, Plain]) -> dict[str, Plain]:
    """The settings of one file over those of another, as `extends` puts them together."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and not _begins_anew(key, old, value):
            merged[key] = merge_settings(old, value)
        else:
            merged[key] = value
    return merged


def _begins_anew(key: str, old: dict[str, Plain], new: dict[str, Plain]) -> bool:
    word = "name" if key == "optimizer" else "kind"
    return word in new and new[word] != old.get(word)
