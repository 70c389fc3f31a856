"""The grammar of the stories: lines with slots, compiled once and then expanded for each story.

{hero}, {hero.his}       an attribute of a role of the story, its name where none is said
<colour>                 a word of a list, or a line of a rule, expanded
<moral_{theme}>          a rule whose name a role completes
[big|very big|]          one of several
<theme:care>             sets a role, and says nothing; the value may have slots
a~ apple                 an apple: the article fits what follows
^the mill                The mill: the next letter is a capital
/                        a new paragraph
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.stories.draw import Draw, Ranked
from benchmarks.stories.vocabulary import Row, Vocabulary

LINE_FLATNESS = 6.0
"""The last of ten lines of a rule comes about half as often as the first."""

# Vowels that do not sound like one, and the other way round.
_A_BEFORE = re.compile(r"(?:one|once|uni(?!m)|use|ukulele|eu)", re.IGNORECASE)
_AN_BEFORE = re.compile(r"(?:[aeiou]|8|11\b|18\b|hour|honest|honou?r|heir)", re.IGNORECASE)
_ARTICLE = re.compile(r"\b([Aa])~ (\W*)([\w'-]+)")
_CAPITAL = re.compile(r"\^(\W*)(\w)")
_PIECE = re.compile(r"\{[^}]*\}|<[^>]*>|[\[\]|]|[^{<\[\]|]+")


@dataclass(slots=True)
class Tale:
    """A story while it is told: the roles, which steps may change, and the draws."""

    draw: Draw
    roles: dict[str, Row]


Part = Callable[[Tale], str]


class Grammar:
    """The rules and word lists of a vocabulary, ready to be expanded."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._rules: dict[str, Ranked[str | Part]] = {**vocabulary.words}
        for name, lines in vocabulary.rules.items():
            assert name not in self._rules, f"{name} is both a list and a rule"
            self._rules[name] = Ranked([self._compile(line) for line in lines], flatness=LINE_FLATNESS)

    def expand(self, rule: str, tale: Tale) -> str:
        """One of the rule's lines with everything filled in; articles and capitals are for `tidy`."""
        line = tale.draw.ranked(self._rules[rule])
        return line if isinstance(line, str) else line(tale)

    def _compile(self, line: str) -> Part:
        pieces = _PIECE.findall(line)
        part, rest = self._alternatives(pieces)
        assert not rest, f"{line!r} has a bracket too many"
        return part

    def _alternatives(self, pieces: list[str]) -> tuple[Part, list[str]]:
        """Sequences parted by bars, up to a closing bracket or the end, and the pieces after it."""
        choices: list[list[str | Part]] = [[]]
        while pieces and pieces[0] != "]":
            piece, pieces = pieces[0], pieces[1:]
            if piece == "|":
                choices.append([])
            elif piece == "[":
                part, pieces = self._alternatives(pieces)
                assert pieces, "a bracket is not closed"
                pieces = pieces[1:]
                choices[-1].append(part)
            else:
                choices[-1].append(self._leaf(piece))
        sequences = [_sequence(choice) for choice in choices]
        if len(sequences) == 1:
            return sequences[0], pieces
        return lambda tale: tale.draw.one_of(sequences)(tale), pieces

    def _leaf(self, piece: str) -> str | Part:
        if piece.startswith("{"):
            return _slot(piece)
        if not piece.startswith("<"):
            return piece
        inner = piece[1:-1]
        if ":" in inner:
            return self._setting(inner)
        if "=" in inner:
            return _handing(inner)
        if "{" in inner:
            prefix, _, role = inner.partition("{")
            completed = _slot("{" + role)
            return lambda tale: self.expand(prefix + completed(tale), tale)
        return lambda tale: self.expand(inner, tale)

    def _setting(self, inner: str) -> Part:
        role, _, value = inner.partition(":")
        made = self._compile(value)

        def set_role(tale: Tale) -> str:
            tale.roles[role] = {"name": made(tale)}
            return ""

        return set_role


def tidy(text: str) -> str:
    """Articles, capitals and paragraphs as they are written.

    Example:
        >>> tidy("^a~ old hat was there. ^the end.")
        'An old hat was there. The end.'
    """
    text = _ARTICLE.sub(_with_article, text)
    text = _CAPITAL.sub(lambda found: found[1] + found[2].upper(), text)
    return "\n".join(" ".join(paragraph.split()) for paragraph in text.split(" / "))


def named(text: str) -> Mapping[str, str]:
    """A role that is nothing but a piece of text."""
    return {"name": text}


def _sequence(parts: list[str | Part]) -> Part:
    if all(isinstance(part, str) for part in parts):
        text = "".join(part for part in parts if isinstance(part, str))
        return lambda tale: text
    return lambda tale: "".join([part if isinstance(part, str) else part(tale) for part in parts])


def _slot(piece: str) -> Part:
    role, _, attribute = piece[1:-1].partition(".")
    key = attribute or "name"
    return lambda tale: tale.roles[role][key]


def _handing(inner: str) -> Part:
    role, _, other = inner.partition("=")

    def hand_role(tale: Tale) -> str:
        tale.roles[role] = tale.roles[other]
        return ""

    return hand_role


def _with_article(found: re.Match[str]) -> str:
    article, between, word = found.groups()
    vowel = bool(_AN_BEFORE.match(word)) and not _A_BEFORE.match(word)
    return f"{article}{'n' if vowel else ''} {between}{word}"
