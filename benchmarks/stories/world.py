"""The world of the stories: made-up villages, herbs, old words and family names, each with facts that never change.

They are the same for every seed of a corpus. Frequent ones are learnt early, rare ones late or never, as in any text.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.stories.draw import Draw, Ranked
from benchmarks.stories.vocabulary import Row, Vocabulary, vocabulary
from benchmarks.stories.word_maker import WordMaker

T = TypeVar("T")

SEED = 20_250_816
NUM_VILLAGES = 2400
NUM_RIVERS = 800
NUM_HERBS = 1200
NUM_OLD_WORDS = 2400
NUM_FAMILIES = 3000
NUM_RARE_NAMES = 2400
RARE_FLATNESS = 12.0
"""The flatness of made-up words: frequent ones stand out less, so that the tail is met more often."""

VILLAGE_ENDINGS = (
    "",
    "ton",
    "ford",
    "wick",
    "ham",
    "mere",
    "dale",
    "by",
    "stead",
    "bury",
    "holm",
    "field",
    "mouth",
    "haven",
)
HERB_ENDINGS = ("wort", "leaf", "root", "", "mint", "bloom", "weed", "thistle", "cress", "balm")
FAMILY_ENDINGS = ("", "er", "son", "man", "ley", "s")
NAME_ENDINGS = ("", "a", "o", "in", "el", "us", "is")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What there is, earlier ones more often in stories."""

    villages: Ranked[Row]
    herbs: Ranked[Row]
    old_words: Ranked[Row]
    families: Ranked[str]
    rare_names: Ranked[tuple[str, str]]
    """A name, and whether it is `he` or `she`."""


@functools.cache
def world() -> World:
    """That of all stories."""
    draw, lists = Draw(SEED), vocabulary()
    words = WordMaker(draw, lists)
    rivers = _capitals(words.make(NUM_RIVERS))
    villages = _capitals(words.make(NUM_VILLAGES, *VILLAGE_ENDINGS))
    herbs = words.make(NUM_HERBS, *HERB_ENDINGS)
    old_words = words.make(NUM_OLD_WORDS)
    families = _capitals(words.make(NUM_FAMILIES, *FAMILY_ENDINGS))
    rare_names = _capitals(words.make(NUM_RARE_NAMES, *NAME_ENDINGS))
    return World(
        villages=_ranked([_village(draw, lists, name, rivers, families) for name in villages]),
        herbs=_ranked([_herb(draw, lists, name) for name in herbs]),
        old_words=_ranked([{"name": name, "means": draw.ranked(lists.words["thing_meant"])} for name in old_words]),
        families=_ranked(families),
        rare_names=_ranked([(name, draw.one_of(("he", "she"))) for name in rare_names]),
    )


def _village(draw: Draw, lists: Vocabulary, name: str, rivers: Sequence[str], families: Sequence[str]) -> Row:
    form = draw.ranked(lists.words["hill_form"])
    return {
        "name": name,
        "kind": draw.ranked(lists.words["village_kind"]),
        "river": draw.one_of(rivers),
        "hill": f"{draw.one_of(families)} {form}",
        "product": draw.one_of(lists.tables["job"].items)["product"],
        "founder": f"{draw.ranked(lists.words['founder_title'])} {draw.one_of(families)}",
        "badge": draw.one_of(lists.tables["animal"].items)["noun"],
    }


def _herb(draw: Draw, lists: Vocabulary, name: str) -> Row:
    cures = draw.one_of(lists.words["ailment"].items)
    article, _, rest = cures.partition(" ")
    single = article in ("a", "an")
    return {
        "name": name,
        "colour": draw.ranked(lists.words["colour"]),
        "leaf": draw.one_of(lists.words["leaf"].items),
        "cures": cures,
        "cures_gone": f"the {rest} was gone"
        if single
        else f"the {cures} {'was' if cures.endswith('ness') else 'were'} gone",
    }


def _ranked(items: Sequence[T]) -> Ranked[T]:
    return Ranked(items, flatness=RARE_FLATNESS)


def _capitals(words: Sequence[str]) -> list[str]:
    return [word.capitalize() for word in words]
