"""The played-out plot against a replay of its steps by other means."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.stories.cast import Casting
from benchmarks.stories.draw import Draw
from benchmarks.stories.exchange import exchange_steps
from benchmarks.stories.vocabulary import Row, vocabulary
from benchmarks.stories.world import world


def replay(rule: str, about: Mapping[str, Row], where: dict[str, str]) -> None:
    """Moves things between people and boxes by their names, and fails on a move that cannot be."""
    name = {role: row["name"] for role, row in about.items()}
    match rule:
        case "exchange_holds":
            assert name["what"] not in where
            where[name["what"]] = name["who"]
        case "exchange_give":
            assert name["who"] != name["whom"]
            assert where[name["what"]] == name["who"]
            where[name["what"]] = name["whom"]
        case "exchange_swap":
            assert (where[name["what"]], where[name["other_what"]]) == (name["who"], name["whom"])
            where[name["what"]], where[name["other_what"]] = name["whom"], name["who"]
        case "exchange_put":
            assert where[name["what"]] == name["who"]
            where[name["what"]] = "in " + about["what"]["box"]
        case "exchange_take":
            assert where[name["what"]] == "in " + about["what"]["box"]
            where[name["what"]] = name["who"]
        case "exchange_held":
            assert where[name["what"]] == name["who"]
        case "exchange_boxed":
            assert where[name["what"]] == "in " + about["what"]["box"]
        case _:
            assert rule in ("exchange_start", "exchange_pause", "exchange_asked", "exchange_end")


@given(seed=st.integers(0, 2**32))
@settings(max_examples=300)
def test_nobody_gives_what_they_have_not(seed: int) -> None:
    draw = Draw(seed)
    roles = Casting(vocabulary(), world()).draw_roles(draw)
    where: dict[str, str] = {}
    steps = list(exchange_steps(draw, roles))
    for rule, about in steps:
        replay(rule, about, where)
    holdings = steps[-1][1]["holdings"]["name"]
    people = [steps[0][1][role]["name"] for role in ("first", "second", "last")]
    assert len(where) == 3
    for thing, place in where.items():
        sentence = (
            f"the {thing} was still {place.replace('in ', 'in the ', 1)}" if place.startswith("in ") else f"{place} had"
        )
        assert sentence in holdings
        assert f"the {thing}" in holdings
    for person in people:
        held = [thing for thing, place in where.items() if place == person]
        part = holdings.split(f"{person} had ")[1].split(", ")[0].rstrip(".")
        assert set(part.split(" and ")) == ({f"the {thing}" for thing in held} or {"nothing"})


def test_all_kinds_of_moves_come_up() -> None:
    seen = set()
    for seed in range(50):
        draw = Draw(seed)
        seen |= {rule for rule, _ in exchange_steps(draw, Casting(vocabulary(), world()).draw_roles(draw))}
    assert {
        "exchange_give",
        "exchange_swap",
        "exchange_put",
        "exchange_take",
        "exchange_boxed",
        "exchange_held",
    } <= seen
