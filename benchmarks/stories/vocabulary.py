"""The text files of the generator, read: word lists, tables of facts, and the lines of each rule.

= colour                         a list of words; an underscore stands for a space
red blue sky-blue

@ animal: noun | plural | food   a table, a row a line
dog | dogs | bones

== glad                          a rule, an alternative a line
{hero} was very {good.adjective}.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.stories.draw import Ranked

FOLDER = Path(__file__).parent / "text"
WORD_FLATNESS = 3.0
"""The first of 30 words is about eight times as frequent as the last."""

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What the files hold, by name."""

    words: Mapping[str, Ranked[str]]
    tables: Mapping[str, Ranked[Row]]
    rules: Mapping[str, tuple[str, ...]]


@functools.cache
def vocabulary() -> Vocabulary:
    """That of the package."""
    return parse_vocabulary("\n".join(path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.txt"))))


def parse_vocabulary(text: str) -> Vocabulary:
    """The contents of the files, one after the other."""
    words: dict[str, list[str]] = {}
    tables: dict[str, list[Row]] = {}
    rules: dict[str, list[str]] = {}
    for kind, name, lines in _sections(text):
        assert name not in words.keys() | tables.keys() | rules.keys(), f"{name} is there twice"
        match kind:
            case "=":
                words[name] = [word.replace("_", " ") for line in lines for word in line.split()]
            case "==":
                rules[name] = lines
            case "@":
                name, _, header = name.partition(": ")
                # Strict: a row with a cell too many or too few fails here.
                tables[name] = [dict(zip(_cells(header), _cells(line), strict=True)) for line in lines]
    return Vocabulary(
        words={name: Ranked(items, flatness=WORD_FLATNESS) for name, items in words.items()},
        tables={name: Ranked(rows, flatness=WORD_FLATNESS) for name, rows in tables.items()},
        rules={name: tuple(lines) for name, lines in rules.items()},
    )


def _sections(text: str) -> Iterator[tuple[str, str, list[str]]]:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    heads = [place for place, line in enumerate(lines) if line.startswith(("= ", "== ", "@ "))]
    for start, end in zip(heads, [*heads[1:], len(lines)], strict=True):
        kind, name = lines[start].split(" ", 1)
        yield kind, name, lines[start + 1 : end]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")]
