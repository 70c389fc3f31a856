"""Short stories from a grammar, the same for the same seed on every machine.

A story has a cast with names, ages, traits and relations that hold through it, a place, a trouble and an ending. What
makes it worth modelling comes at several distances: agreement within a phrase, facts that every story shares (what an
otter eats, what a village is known for; rare ones are met rarely), and what this story said before (who was given what,
how many coins are left).
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator

from benchmarks.stories.cast import Casting
from benchmarks.stories.draw import Draw
from benchmarks.stories.exchange import Step, exchange_steps
from benchmarks.stories.grammar import Grammar, Tale, tidy
from benchmarks.stories.vocabulary import vocabulary
from benchmarks.stories.world import world

PLOTS = (
    "plot_lost",
    "plot_broken",
    "plot_share",
    "plot_make",
    "plot_rescue",
    "plot_birthday",
    "plot_race",
    "plot_fear",
    "plot_skill",
    "plot_market",
    "plot_harvest",
    "plot_riddle",
    "plot_herb",
    "plot_words",
    "plot_journey",
    "plot_storm",
    "exchange",
)
"""Each equally often; `exchange` is played out by its own module."""


class Part(enum.IntEnum):
    """Which stories of a seed: no story of one part depends on how many there are of the other."""

    TRAINING = 0
    VALIDATION = 1


def make_stories(seed: int, count: int, *, part: Part = Part.TRAINING) -> Iterator[str]:
    """The first stories of a seed: paragraphs on lines of their own, no blank lines.

    Example:
        >>> next(make_stories(0, 1)) == make_story(0, 0)
        True
    """
    return (make_story(seed, number, part=part) for number in range(count))


def make_story(seed: int, number: int, *, part: Part = Part.TRAINING) -> str:
    """The story of that number, counted from 0."""
    grammar, casting = _maker()
    draw = Draw(story_seed(seed, number, part))
    tale = Tale(draw, casting.draw_roles(draw))
    plot = draw.one_of(PLOTS)
    steps: Iterator[Step] = exchange_steps(draw, tale.roles) if plot == "exchange" else iter([(plot, {})])
    texts = []
    for rule, roles in steps:
        tale.roles |= roles
        texts.append(grammar.expand(rule, tale))
    return tidy(" ".join(texts))


def story_seed(seed: int, number: int, part: Part) -> int:
    """One number for the three: a story does not depend on those before it."""
    return (seed << 40) + (number << 1) + part


@functools.cache
def _maker() -> tuple[Grammar, Casting]:
    return Grammar(vocabulary()), Casting(vocabulary(), world())
