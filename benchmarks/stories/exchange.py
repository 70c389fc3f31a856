"""A plot that is played out: three children give, swap and put away three things, and the story keeps account."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from benchmarks.stories.draw import Draw
from benchmarks.stories.grammar import named
from benchmarks.stories.vocabulary import Row

ITEMS = ("item1", "item2", "item3")
Step = tuple[str, Mapping[str, Row]]
"""A rule to expand, and the roles that it is about."""


@dataclass(slots=True)
class Ledger:
    """Where each thing is."""

    people: list[Row]
    things: list[Row]
    holder: dict[str, Row] = field(default_factory=dict)
    """By the name of a thing; one without a holder is in its box."""

    def held(self) -> list[Row]:
        """The things that somebody has."""
        return [thing for thing in self.things if thing["name"] in self.holder]

    def boxed(self) -> list[Row]:
        """The things that are put away."""
        return [thing for thing in self.things if thing["name"] not in self.holder]

    def in_words(self) -> str:
        """Everybody's things, and what is in a box."""
        parts = []
        for person in self.people:
            things = [f"the {thing['name']}" for thing in self.held() if self.holder[thing["name"]] is person]
            parts.append(f"{person['name']} had {' and '.join(things) or 'nothing'}")
        parts += [f"the {thing['name']} was still in the {thing['box']}" for thing in self.boxed()]
        return f"{', '.join(parts[:-1])}, and {parts[-1]}."


def exchange_steps(draw: Draw, roles: Mapping[str, Row]) -> Iterator[Step]:
    """The steps of one such story."""
    people = draw.shuffled([roles["hero"], roles["friend"], roles["third"]])
    ledger = Ledger(people, [roles[item] for item in ITEMS])
    yield "exchange_start", {"first": people[0], "second": people[1], "last": people[2]}
    for thing in ledger.things:
        ledger.holder[thing["name"]] = draw.one_of(people)
        yield "exchange_holds", {"who": ledger.holder[thing["name"]], "what": thing}
    for move in range(draw.between(4, 6)):
        yield _draw_move(draw, ledger)
        if move == 2:
            yield "exchange_pause", {}
    for thing in draw.shuffled(ledger.things)[: draw.between(1, 2)]:
        yield "exchange_asked", {"what": thing}
        holder = ledger.holder.get(thing["name"])
        yield "exchange_held" if holder else "exchange_boxed", {"what": thing, "who": holder or people[0]}
    yield "exchange_end", {"holdings": named(ledger.in_words())}


def _draw_move(draw: Draw, ledger: Ledger) -> Step:
    boxed, held = ledger.boxed(), ledger.held()
    if boxed and (not held or draw.chance(0.5)):
        what, who = draw.one_of(boxed), draw.one_of(ledger.people)
        ledger.holder[what["name"]] = who
        return "exchange_take", {"who": who, "what": what}
    what = draw.one_of(held)
    who = ledger.holder[what["name"]]
    if draw.chance(0.25):
        del ledger.holder[what["name"]]
        return "exchange_put", {"who": who, "what": what}
    others = [thing for thing in held if ledger.holder[thing["name"]] is not who]
    if others and draw.chance(0.35):
        other = draw.one_of(others)
        whom = ledger.holder[other["name"]]
        ledger.holder[what["name"]], ledger.holder[other["name"]] = whom, who
        return "exchange_swap", {"who": who, "whom": whom, "what": what, "other_what": other}
    whom = draw.one_of([person for person in ledger.people if person is not who])
    ledger.holder[what["name"]] = whom
    return "exchange_give", {"who": who, "whom": whom, "what": what}
