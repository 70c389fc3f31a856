"""The recipes that can be named: those of the package and of other folders, chosen by name, pattern or path."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lowtide.errors import ConfigError, LowtideError
from lowtide.lab.recipe_file import FOLDER, SUFFIXES, find_recipe, recipe_names, unknown_recipe


def known_recipes(more: Sequence[Path] = ()) -> dict[str, Path]:
    """The file of each name, those of the package first; a name that a later folder has too is the later one's.

    Raises:
        ConfigError: A folder does not exist.
    """
    for folder in more:
        if not folder.is_dir():
            raise ConfigError(f"there is no folder of recipes {str(folder)!r}", key="recipes")
    return {name: find_recipe(name, folder) for folder in (FOLDER, *more) for name in recipe_names(folder)}


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
    files = [word for word in words if Path(word).suffix in SUFFIXES]
    chosen: set[str] = set()
    for word in words:
        names = [name for name in known if name.startswith(f"{word.rstrip('/')}/")] + _names(word, known)
        if not names and word not in files:
            raise _unknown(word, known)
        chosen.update(names)
    return {name: path for name, path in known.items() if name in chosen} | choose_recipes(files, known)


def _found(word: str, known: Mapping[str, Path]) -> Iterator[tuple[str, Path]]:
    path = Path(word)
    if path.suffix in SUFFIXES:
        if not path.is_file():
            raise ConfigError(
                f"there is no recipe file {word} in {Path.cwd()}; `lowtide lab ls` has the names of recipes"
            )
        yield next((name for name, file in known.items() if file.resolve() == path.resolve()), path.stem), path
        return
    names = _names(word, known)
    if not names:
        raise _unknown(word, known)
    if len(names) > 1 and not _is_pattern(word):
        raise ConfigError(f"{word!r} is the end of several recipes: {', '.join(names)}; give one of these")
    yield from ((name, known[name]) for name in names)


def _names(word: str, known: Mapping[str, Path]) -> list[str]:
    if _is_pattern(word):
        return [name for name in known if any(fnmatch.fnmatchcase(end, word) for end in (name, _last(name)))]
    return [name for name in known if name == word] or [name for name in known if name.endswith(f"/{word}")]


def _unknown(word: str, known: Mapping[str, Path]) -> LowtideError:
    """A pattern has no near names; a folder, or a file without its suffix, is more likely meant than a near name."""
    if _is_pattern(word):
        return ConfigError(f"no recipe matches the pattern {word!r}; see lowtide lab ls")
    folder = word.rstrip("/")
    if any(name.startswith(f"{folder}/") for name in known):
        return ConfigError(f"{word!r} is a folder of recipes: write '{folder}/*' for all of them")
    here = next((file for suffix in SUFFIXES if (file := Path(f"{word}{suffix}")).is_file()), None)
    if here is not None:
        return ConfigError(f"there is no recipe named {word!r}, but a file: write {here}")
    return unknown_recipe(word, known)


def _is_pattern(word: str) -> bool:
    return any(mark in word for mark in "*?[")


def _last(name: str) -> str:
    return name.rpartition("/")[2]
