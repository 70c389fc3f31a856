"""A recipe as YAML for people: every setting, and behind those that something set, what did."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from lowtide import plain_text
from lowtide.lab.recipe_file import FOLDER
from lowtide.plain_text import Plain


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
    for folder in (FOLDER, Path.cwd()):
        if path.is_absolute() and path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return source


def _lines(plain: Mapping[str, Plain], sources: Mapping[str, str], prefix: str, indent: str) -> Iterator[str]:
    for key, value in plain.items():
        dotted = f"{prefix}{key}"
        comment = f"  # {source_name(sources[dotted])}" if dotted in sources else ""
        if isinstance(value, dict) and value:
            yield f"{indent}{_key(key)}:{comment}"
            yield from _lines(value, sources, f"{dotted}.", f"{indent}  ")
        else:
            yield f"{indent}{_key(key)}: {_value(value)}{comment}"


def _key(key: str) -> str:
    return _in_one_line(key, plain_text.render({key: None}, "yaml").removesuffix(": null\n"))


def _value(value: Plain) -> str:
    if isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    return _in_one_line(value, plain_text.render({"_": value}, "yaml").removeprefix("_: ").removesuffix("\n"))


def _in_one_line(value: Plain, text: str) -> str:
    # A comment can only stand behind one line. Long words take several; JSON does not, and is YAML too.
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text
