"""The recipes that can be named: chosen by name, pattern or path, compared with what they extend, and shown as YAML."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lowtide import config, plain_text
from lowtide.errors import ConfigError
from lowtide.lab import recipe_file
from lowtide.lab.recipe import Recipe
from lowtide.plain_text import Plain


def choose_recipes(words: Sequence[str], known: Mapping[str, Path]) -> dict[str, Path]:
    """The recipes that the words name, each once, in their order.

    A word is the path of a file, a name, the last part of one where that is unique, or a pattern such as
    `peak_memory/*` or `*_tiny`.

    Raises:
        UnknownNameError: There is no such recipe; the nearest name is in the message.
        ConfigError: A word stands for several recipes, a pattern or a file for none, or two files would have one name.
    """
    chosen: dict[str, Path] = {}
    for word in words:
        for name, path in _found(word, known):
            if chosen.setdefault(name, path).resolve() != path.resolve():
                raise ConfigError(
                    f"{chosen[name]} and {path} would both be recorded as {name!r}: rename one, or run them into "
                    "different folders with --out"
                )
    return chosen


def matching_recipes(words: Sequence[str], known: Mapping[str, Path]) -> dict[str, Path]:
    """All recipes that any of the words may mean: also those of a folder, and of one last part; then files, by their paths.

    Raises:
        UnknownNameError: A word means none; the nearest name is in the message.
        ConfigError: A file or a pattern's match is not there, or two files would have one name.
    """
    files = [word for word in words if Path(word).suffix in recipe_file.SUFFIXES]
    chosen: set[str] = set()
    for word in words:
        if _is_pattern(word):
            chosen.update(_matches(word, known))
            continue
        names = [name for name in known if name.startswith(f"{word.rstrip('/')}/")] + recipe_file.names_like(
            word, known
        )
        if not names and word not in files:
            raise recipe_file.unknown_recipe(word, known)
        chosen.update(names)
    return {name: path for name, path in known.items() if name in chosen} | choose_recipes(files, known)


def _found(word: str, known: Mapping[str, Path]) -> Iterator[tuple[str, Path]]:
    path = Path(word)
    if path.suffix in recipe_file.SUFFIXES:
        if not path.is_file():
            raise ConfigError(
                f"there is no recipe file {word} in {Path.cwd()}; `lowtide lab ls` has the names of recipes"
            )
        yield next((name for name, file in known.items() if file.resolve() == path.resolve()), path.stem), path
    elif _is_pattern(word):
        yield from ((name, known[name]) for name in _matches(word, known))
    else:
        name = recipe_file.only_name(word, known)
        yield name, known[name]


def _is_pattern(word: str) -> bool:
    return any(mark in word for mark in "*?[")


def _matches(pattern: str, known: Mapping[str, Path]) -> list[str]:
    ends = {name: (name, name.rpartition("/")[2]) for name in known}
    found = [name for name in known if any(fnmatch.fnmatchcase(end, pattern) for end in ends[name])]
    if not found:
        raise ConfigError(f"no recipe matches the pattern {pattern!r}; see lowtide lab ls")
    return found


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
        tree: recipe_file.Tree = {}
        for root in roots:
            tree = recipe_file.merge(tree, recipe_file.read_tree(root))
        with contextlib.suppress(ConfigError):  # such as shared settings without a model
            base = config.from_plain(Recipe, recipe_file.plain_of(tree))
    return tuple(_unlike(recipe, base, config.to_plain(recipe), ""))


def _roots(path: Path) -> Iterator[Path]:
    """The files at the ends of the chains of `extends`. The file was read before, so there are ends."""
    others = recipe_file.extended_files(path)
    if not others:
        yield path
    for other in others:
        yield from _roots(other)


def _unlike(value: object, base: object, plain: Plain, path: str) -> Iterator[str]:
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
            for difference in _unlike(
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
            yield from _unlike(value.get(key), base.get(key), plain.get(key), f"{path}.{key}")
    elif value != base:
        # As `--set` takes it.
        yield f"{path}={plain if isinstance(plain, str) else json.dumps(plain)}"


def _defaults(kind: type) -> dict[str, object]:
    """What the fields of a class are where they are left out; those that cannot be are not in it."""
    made = {
        field.name: field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        for field in dataclasses.fields(kind)
    }
    return {name: default for name, default in made.items() if default is not dataclasses.MISSING}


def annotated_yaml(plain: Mapping[str, Plain], sources: Mapping[str, str]) -> str:
    """YAML of the settings, with a comment for each that has a source; without the comments it says the same.

    Args:
        plain: A recipe as plain data.
        sources: By dotted key.

    Example:
        >>> print(annotated_yaml({"steps": 3, "plan": {"update": "host"}}, {"steps": "mine.yaml"}), end="")
        steps: 3  # mine.yaml
        plan:
          update: host
    """
    return "".join(f"{line}\n" for line in _lines(plain, sources, "", ""))


def source_name(source: str) -> str:
    """A file as people call it: a recipe of the package by its name, one below the current folder from there."""
    path = Path(source)
    for folder in (recipe_file.FOLDER, Path.cwd()):
        if path.is_absolute() and path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return source


def _lines(plain: Mapping[str, Plain], sources: Mapping[str, str], prefix: str, indent: str) -> Iterator[str]:
    for key, value in plain.items():
        dotted = f"{prefix}{key}"
        comment = f"  # {source_name(sources[dotted])}" if dotted in sources else ""
        if isinstance(value, dict) and value:
            yield f"{indent}{_key_text(key)}:{comment}"
            yield from _lines(value, sources, f"{dotted}.", f"{indent}  ")
        else:
            yield f"{indent}{_key_text(key)}: {_value_text(value)}{comment}"


def _key_text(key: str) -> str:
    return _in_one_line(key, plain_text.render({key: None}, "yaml").removesuffix(": null\n"))


def _value_text(value: Plain) -> str:
    if isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    return _in_one_line(value, plain_text.render({"_": value}, "yaml").removeprefix("_: ").removesuffix("\n"))


def _in_one_line(value: Plain, text: str) -> str:
    # A comment can only stand behind one line. Long words take several; JSON does not, and is YAML too.
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text
