"""The grammar: what each construct says, and that every line of the package is well formed."""

from __future__ import annotations

import re

import pytest

from benchmarks.stories import generator
from benchmarks.stories.cast import Casting
from benchmarks.stories.draw import Draw
from benchmarks.stories.exchange import exchange_steps
from benchmarks.stories.grammar import Grammar, Tale, tidy
from benchmarks.stories.vocabulary import Row, parse_vocabulary, vocabulary
from benchmarks.stories.world import world


def told(line: str, roles: dict[str, Row] | None = None, seed: int = 0) -> str:
    lists = "= colour\nred sky_blue\n== moral_care\nTake care.\n== line\n" + line
    return tidy(Grammar(parse_vocabulary(lists)).expand("line", Tale(Draw(seed), roles or {})))


def all_told(line: str) -> set[str]:
    return {told(line, seed=seed) for seed in range(60)}


def test_slots() -> None:
    assert told("^{hero.his} name is {hero}.", {"hero": {"name": "Ida", "his": "her"}}) == "Her name is Ida."


def test_words_and_choices() -> None:
    assert all_told("a~ <colour> hat") == {"a red hat", "a sky blue hat"}
    assert all_told("a [big|very [big|small]|]hat") == {"a bighat", "a very bighat", "a very smallhat", "a hat"}


def test_a_role_completes_a_rule_and_a_line_sets_a_role() -> None:
    assert told("<moral_{theme}>", {"theme": {"name": "care"}}) == "Take care."
    assert told("<theme:care><moral_{theme}>") == "Take care."
    assert told("<theme:{x.theme}><moral_{theme}>", {"x": {"theme": "care"}}) == "Take care."


def test_paragraphs() -> None:
    assert told("One.  / Two. ") == "One.\nTwo."


@pytest.mark.parametrize(
    ("word", "article"),
    [
        ("apple", "an"),
        ("pear", "a"),
        ("hour", "an"),
        ("hourglass", "an"),
        ("honest man", "an"),
        ("house", "a"),
        ("one-eyed cat", "a"),
        ("useful rope", "a"),
        ("umbrella", "an"),
        ("unimportant thing", "an"),
        ("uniform", "a"),
        ("8-year-old", "an"),
        ("11-year-old", "an"),
        ("1-year-old", "a"),
        ("eight-year-old", "an"),
        ("Olive", "an"),
    ],
)
def test_articles(word: str, article: str) -> None:
    assert tidy(f"It is a~ {word}.") == f"It is {article} {word}."
    assert tidy(f"^a~ {word}") == f"{article.capitalize()} {word}"


def test_capitals_within_quotes() -> None:
    assert tidy('He said: ^"the end."') == 'He said: "The end."'


@pytest.mark.parametrize("line", ["a [b", "a ] b", "a [b|c"])
def test_a_bracket_that_does_not_close(line: str) -> None:
    with pytest.raises(AssertionError, match="bracket"):
        told(line)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("= a\nx\n== a\ny", "there twice"),
        ("@ a: b | c\nx", "shorter"),
        ("@ a: b\nx | y", "longer"),
        ("= a\n== b\nc", "choose"),
    ],
)
def test_files_that_are_wrong(text: str, error: str) -> None:
    with pytest.raises((AssertionError, ValueError), match=error):
        parse_vocabulary(text)


def test_every_rule_and_role_that_a_line_asks_for_is_there() -> None:
    """Also in lines so rare that no story of the other tests has them."""
    lists = vocabulary()
    draw = Draw(0)
    roles = Casting(lists, world()).draw_roles(draw)
    for seed in range(30):
        for _, more in exchange_steps(Draw(seed), roles):
            roles |= more
    roles["theme"] = {"name": "care"}
    themes = {row["theme"] for row in lists.tables["trouble"].items}
    for line in (line for lines in lists.rules.values() for line in lines):
        themes |= set(re.findall(r"<theme:(\w+)>", line))
        for rule in re.findall(r"<(\w+)>", line):
            assert rule in lists.rules.keys() | lists.words.keys(), line
        for role, attribute in re.findall(r"\{(\w+)\.?(\w*)\}", line):
            assert attribute or "name" in roles[role], line
            assert not attribute or attribute in roles[role], line
    assert {f"moral_{theme}" for theme in themes} <= lists.rules.keys()
    assert {plot for plot in lists.rules if plot.startswith("plot_")} == set(generator.PLOTS) - {"exchange"}
    # And nothing is written for nobody.
    used = set(generator.PLOTS) | {f"moral_{theme}" for theme in themes}
    used |= {rule for lines in lists.rules.values() for line in lines for rule in re.findall(r"<(\w+)>", line)}
    assert {rule for rule in lists.rules if not rule.startswith("exchange_")} <= used
