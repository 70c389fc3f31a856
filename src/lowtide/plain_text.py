"""JSON and YAML text to plain data and back, without the surprises of either; and files that are written whole or not at all.

A repeated key is an error in both. YAML scalars follow YAML 1.2: PyYAML's own table reads `off` as false, `1:30` as 90
and `1e-4`, a learning rate, as text.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import threading
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

import yaml

from lowtide.errors import ConfigError

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
Format: TypeAlias = Literal["json", "yaml"]


def format_of(path: Path) -> Format:
    """The format that a file's name promises.

    Raises:
        ConfigError: The name ends in none of .json, .yaml and .yml.
    """
    if path.suffix not in {".json", ".yaml", ".yml"}:
        raise ConfigError(f"cannot tell the format of {path}; name it .json, .yaml or .yml")
    return "json" if path.suffix == ".json" else "yaml"


def parse(text: str, text_format: Format) -> object:
    """Plain data from text; None for empty YAML.

    Raises:
        ConfigError: The text is not valid in the format, or gives a key twice.
    """
    try:
        if text_format == "json":
            return json.loads(text, object_pairs_hook=_unique)
        return yaml.load(text, _Loader)  # noqa: S506 - _Loader is a SafeLoader
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"not valid {text_format.upper()}: {error}") from error


def read(path: Path, what: str) -> object:
    """Plain data from a file of that kind; None for an empty YAML file.

    Raises:
        ConfigError: The file cannot be read, its name promises no format, or its text is not valid in it.
    """
    try:
        return parse(path.read_text(encoding="utf-8"), format_of(path))
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", key=error.key) from error


def render(plain: Plain, text_format: Format) -> str:
    """Text that `parse` turns back into the same plain data; keys keep their order."""
    if text_format == "json":
        return json.dumps(plain, indent=2, allow_nan=False) + "\n"
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its place when the block has ended, so that a process killed in it leaves the old one, never half of
    a new one. Folders that do not exist are made.

    Raises:
        OSError: The folder cannot be written, or the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name for each writer: two of them may write the same file at once, and the last one wins.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def clear_unfinished(path: Path) -> None:
    """Take away what writers of the file that were killed have left. None may be writing it now."""
    for unfinished in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        unfinished.unlink(missing_ok=True)


def _unique(pairs: list[tuple[str, Plain]]) -> dict[str, Plain]:
    _refuse_repeats([key for key, _ in pairs])
    return dict(pairs)


def _refuse_repeats(keys: list[str]) -> None:
    """Parsers let the last of several equal keys win in silence, which hides a forgotten edit."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            raise ConfigError(f"the key {key!r} is given twice; keep one", key=key)
        seen.add(key)


def _scalar_table() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """YAML 1.2's untagged scalars, in the form PyYAML wants: by first character."""
    patterns = (
        ("null", r"~|null|", ("~", "n", "")),
        ("bool", r"true|false", ("t", "f")),
        ("int", r"[-+]?(?:0|[1-9][0-9_]*)", tuple("-+0123456789")),
        ("float", r"[-+]?(?=[0-9.]*[.eE])(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", tuple("-+.0123456789")),
    )
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first_characters in patterns:
        for character in first_characters:
            table.setdefault(character, []).append((f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})\Z")))
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _scalar_table()

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        _refuse_repeats([str(key.value) for key, _ in node.value])
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    # The same table, so that text which `_Loader` would take for a number is written in quotes.
    yaml_implicit_resolvers = _scalar_table()
