"""Words that no dictionary has, put together from syllables: names of villages, rivers, herbs and people.

The syllables are a fixed set, so that a tokenizer finds the same pieces in many of them.
"""

from __future__ import annotations

from benchmarks.stories.draw import Draw, Ranked
from benchmarks.stories.vocabulary import Vocabulary

NUM_SYLLABLES = 500
SYLLABLE_FLATNESS = 20.0


class WordMaker:
    """Makes words, none of them twice, and none that the lists have."""

    def __init__(self, draw: Draw, vocabulary: Vocabulary) -> None:
        self._draw = draw
        self._taken = {word.lower() for words in vocabulary.words.values() for word in words.items}
        self._syllables = Ranked(_make_syllables(draw, vocabulary), flatness=SYLLABLE_FLATNESS)

    def make(self, count: int, *endings: str) -> list[str]:
        """That many words in lower case, each with one of the endings, earlier ones more often."""
        ranked_endings = Ranked(endings or ("",), flatness=3.0)
        words: list[str] = []
        while len(words) < count:
            ending = self._draw.ranked(ranked_endings)
            word = self._stem(short=len(ending) > 2 and self._draw.chance(0.6)) + ending
            if word not in self._taken and len(word) >= 4:
                self._taken.add(word)
                words.append(word)
        return words

    def _stem(self, *, short: bool) -> str:
        count = 1 if short else 3 if self._draw.chance(0.1) else 2
        return "".join([self._draw.ranked(self._syllables) for _ in range(count)])


def _make_syllables(draw: Draw, vocabulary: Vocabulary) -> tuple[str, ...]:
    onsets, vowels, codas = (vocabulary.words[name] for name in ("onset", "vowel", "coda"))
    found: dict[str, None] = {}
    while len(found) < NUM_SYLLABLES:
        coda = draw.ranked(codas) if draw.chance(0.4) else ""
        found[draw.ranked(onsets) + draw.ranked(vowels) + coda] = None
    return tuple(found)
