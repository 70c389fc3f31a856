"""The world: every made-up word is new and the facts about it hold."""

from __future__ import annotations

from benchmarks.stories.vocabulary import vocabulary
from benchmarks.stories.world import world


def test_no_name_is_there_twice() -> None:
    lists, made = vocabulary(), world()
    names = [row["name"] for row in (*made.villages.items, *made.herbs.items, *made.old_words.items)]
    names += [*made.families.items, *(name for name, _ in made.rare_names.items)]
    lowered = [name.lower() for name in names]
    assert len(set(lowered)) == len(lowered) > 10_000
    assert not {word.lower() for words in lists.words.values() for word in words.items} & set(lowered)


def test_the_same_on_every_machine() -> None:
    made = world()
    assert made.villages.items[0]["name"] == "Dovton"
    assert made.herbs.items[-1]["name"] == "kaileaf"
    assert made.families.items[1000] == "Maistonts"


def test_facts_come_from_the_tables() -> None:
    lists, made = vocabulary(), world()
    products = {job["product"] for job in lists.tables["job"].items}
    assert {village["product"] for village in made.villages.items} == products
    assert {village["badge"] for village in made.villages.items} <= {
        row["noun"] for row in lists.tables["animal"].items
    }


def test_an_illness_that_is_gone() -> None:
    gone = {herb["cures"]: herb["cures_gone"] for herb in world().herbs.items}
    assert gone["a cough"] == "the cough was gone"
    assert gone["sore feet"] == "the sore feet were gone"
    assert gone["seasickness"] == "the seasickness was gone"
