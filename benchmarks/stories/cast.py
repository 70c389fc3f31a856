"""The cast of a story: who, where and with what, all different from one another and fixed before the first word."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.stories.draw import Draw, Ranked
from benchmarks.stories.grammar import named
from benchmarks.stories.numbers import draw_sums, in_words
from benchmarks.stories.vocabulary import Row, Vocabulary
from benchmarks.stories.world import World

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
PRONOUNS: Mapping[str, Row] = {
    "he": {"he": "he", "him": "him", "his": "his", "himself": "himself", "child": "boy"},
    "she": {"he": "she", "him": "her", "his": "her", "himself": "herself", "child": "girl"},
}
SHARE_OF_ANIMALS = 0.2
"""The share of stories whose children are young animals, one kind for each."""
SHARE_OF_RARE_NAMES = 0.12
SHARE_OF_DIGITS = 0.25
FAMILY_TITLES = frozenset(("Miss", "Mister", "Mrs", "Mr", "Professor", "Doctor", "Captain", "Judge"))


class Casting:
    """Fills the roles of one story after the other from the vocabulary and the world."""

    def __init__(self, vocabulary: Vocabulary, world: World) -> None:
        self._words = vocabulary.words
        self._tables = vocabulary.tables
        self._world = world
        self._names = {"he": self._words["boy_name"], "she": self._words["girl_name"]}

    def draw_roles(self, draw: Draw) -> dict[str, Row]:
        """Every role that any plot asks for."""
        taken: set[str] = set()
        people = self._draw_people(draw, taken)
        age = draw.between(4, 12)
        digits = draw.chance(SHARE_OF_DIGITS)
        people["hero"]["age"] = str(age) if digits else in_words(age)
        roles: dict[str, Row] = {**people, "num": draw_sums(draw, age=age, digits=digits)}
        roles |= self._draw_surroundings(draw)
        roles |= self._draw_things(draw)
        roles |= self._draw_course(draw, people)
        return roles

    def _draw_people(self, draw: Draw, taken: set[str]) -> dict[str, dict[str, str]]:
        friend = draw.ranked(self._tables["friend"])
        families = draw.several(self._world.families, 3)
        beast, pet, *kinds = draw.several(self._tables["animal"], 6)
        people = {
            "hero": self._child(draw, taken, "any"),
            "friend": self._child(draw, taken, friend["gender"]) | {"noun": friend["noun"]},
            "third": self._child(draw, taken, "any"),
            "rival": self._child(draw, taken, "any") | {"trait": draw.ranked(self._words["bad_trait"])},
            "elder": self._elder(draw, taken, families[0]),
            "afar": self._elder(draw, taken, families[2]),
            "worker": self._worker(draw, taken, families[1]),
            "beast": dict(beast),
            "pet": {**pet, "name": draw.ranked(self._words["pet_name"])},
        }
        if draw.chance(SHARE_OF_ANIMALS):
            for role, kind in zip(("hero", "friend", "third", "rival"), kinds, strict=True):
                people[role]["child"] = kind["noun"]
        if people["afar"]["name"] in ("Mum", "Dad", people["elder"]["name"]):
            # Whom one visits is not whom one lives with.
            people["afar"] |= {"name": f"Cousin {people['afar']['first']}", "noun": "cousin"}
        # With whom the hero is: plots may give that role to another.
        people["mate"] = people["friend"]
        podium = draw.shuffled([people[role] for role in ("hero", "friend", "third")])
        return people | dict(zip(("winner", "runner", "loser"), podium, strict=True))

    def _elder(self, draw: Draw, taken: set[str], family: str) -> dict[str, str]:
        row = draw.ranked(self._tables["elder"])
        person = self._person(draw, row["gender"], taken)
        title = row["title"]
        if title not in ("Mum", "Dad"):
            title += f" {family if title in FAMILY_TITLES else person['name']}"
        return person | {"noun": row["noun"], "name": title, "first": person["name"]}

    def _worker(self, draw: Draw, taken: set[str], family: str) -> dict[str, str]:
        job = draw.ranked(self._tables["job"])
        person = self._person(draw, _job_gender(draw, job["noun"]), taken)
        return {**job, **person, "name": f"{'Mr' if person['he'] == 'he' else 'Mrs'} {family}"}

    def _child(self, draw: Draw, taken: set[str], gender: str) -> dict[str, str]:
        person = self._person(draw, draw.one_of(("he", "she")) if gender == "any" else gender, taken)
        return person | {"trait": draw.ranked(self._words["good_trait"])}

    def _person(self, draw: Draw, gender: str, taken: set[str]) -> dict[str, str]:
        while True:
            name = self._name(draw, gender)
            if name not in taken:
                taken.add(name)
                return {**PRONOUNS[gender], "name": name}

    def _name(self, draw: Draw, gender: str) -> str:
        if draw.chance(SHARE_OF_RARE_NAMES):
            name, its_gender = draw.ranked(self._world.rare_names)
            if its_gender == gender:
                return name
        return draw.ranked(self._names[gender])

    def _draw_surroundings(self, draw: Draw) -> dict[str, Row]:
        village, other = draw.several(self._world.villages, 2)
        weather, weather2 = draw.several(self._tables["weather"], 2)
        first, second, third = (self._place(draw, row) for row in draw.several(self._tables["place"], 3))
        day = draw.between(0, 6)
        return {
            "village": village,
            "other": other,
            "weather": weather,
            "weather2": weather2,
            "place": first,
            "place2": second,
            "place3": third,
            "day": named(DAYS[day]),
            "next_day": named(DAYS[(day + 1) % 7]),
        }

    def _place(self, draw: Draw, row: Row) -> Row:
        noun = f"{draw.ranked(self._words['place_look'])} {row['noun']}" if draw.chance(0.6) else row["noun"]
        return {**row, "the": f"the {noun}", "at": f"{row['at']} the {noun}"}

    def _draw_things(self, draw: Draw) -> dict[str, Row]:
        thing, gift, *items = draw.several(self._tables["thing"], 6)
        colour = draw.ranked(self._words["colour"])
        boxes = draw.several(self._words["container"], 3)
        looks = (draw.ranked(self._words[draw.one_of(("look", "size", "colour"))]) for _ in items)
        roles: dict[str, Row] = {
            "thing": _qualified(thing, colour) | {"colour": colour},
            "gift": _qualified(gift, draw.ranked(self._words["look"])),
        }
        for place, (item, look) in enumerate(zip(items, looks, strict=True), start=1):
            box = {"box": boxes[place - 1]} if place <= len(boxes) else {}
            roles[f"item{place}"] = (
                _qualified(item, look) if draw.chance(0.5) else {**item, "name": item["noun"]}
            ) | box
        food, food2 = draw.several(self._tables["food"], 2)
        word1, word2, word3 = draw.several(self._world.old_words, 3)
        return roles | {
            "food": food,
            "food2": food2,
            "fruit": draw.ranked(self._tables["fruit"]),
            "herb": draw.ranked(self._world.herbs),
            "word1": word1,
            "word2": word2,
            "word3": word3,
        }

    def _draw_course(self, draw: Draw, people: Mapping[str, Row]) -> dict[str, Row]:
        act, act2 = draw.several(self._tables["activity"], 2)
        fear, fear2 = draw.several(self._words["fear"], 2)
        first, second = draw.several(self._words["song_word"], 2)
        return {
            "act": act,
            "act2": act2,
            "trouble": draw.ranked(self._tables["trouble"]),
            "good": _felt(draw, self._tables["good_mood"], people["hero"]),
            "bad": _felt(draw, self._tables["bad_mood"], people["hero"]),
            "fear": named(fear),
            "fear2": named(fear2),
            "song": named(f"The {first.capitalize()} and the {second.capitalize()}"),
        }


def _qualified(row: Row, adjective: str) -> dict[str, str]:
    return {**row, "name": f"{adjective} {row['noun']}"}


def _felt(draw: Draw, moods: Ranked[Row], person: Row) -> Row:
    mood = draw.ranked(moods)
    return {**mood, "sign": mood["sign"].replace("{p.his}", person["his"])}


def _job_gender(draw: Draw, noun: str) -> str:
    if noun.endswith("man"):
        return "he"
    return "she" if noun == "baroness" else draw.one_of(("he", "she"))
