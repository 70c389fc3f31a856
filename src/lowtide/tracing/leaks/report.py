"""LeakReport: what survives from step to step, who holds it, and how fast it grows, as frozen data."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lowtide.units import format_bytes

GRAPH = "autograd graph"
"""Kind of the holder that stands for all nodes between a tensor's `grad_fn` and what they saved for the backward."""
CYCLE = "reference cycle"
"""Kind of the holder that stands for objects that hold each other and that nothing else holds."""
UNSEEN = "native code"
"""Kind of the holder that stands for a reference which no Python object shows."""

ANY_PLACE = "[...]"
"""Name of a holder that stands for several entries of the container before it."""


class LeakKind(enum.StrEnum):
    """Whether the memory is held, or only waits for the garbage collector."""

    HELD = "held"
    """Reachable: it stays until its holder lets go of it."""
    GARBAGE = "garbage"
    """Held by nothing but a reference cycle: it stays until the garbage collector happens to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One object in a chain of holders, and how the one before it knows it."""

    kind: str
    """What it is: its type's name (`list`, `LossLogger`, `Tensor`), `forward hook`, `autograd graph` and the like."""
    name: str = ""
    """Its variable, attribute, `[index]` or `['key']`; "" where it has none. `[...]` stands for several entries."""
    where: str = ""
    """The place of that name: `in function train (train.py:31)`, `of LossLogger`."""
    detail: str = ""
    """What else helps to recognise it: a tensor's shape, dtype and whether it has a graph."""

    def __str__(self) -> str:
        # `[...]` says nothing that the container before it does not say.
        name = self.name
        if name == ANY_PLACE:
            name = ""
        elif name and not name.startswith("["):
            name = f"'{name}'"
        return " ".join(part for part in (self.kind, name, self.detail, self.where) if part)


Chain = tuple[Holder, ...]
"""Each holds the next; the last one owns the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """Where leaked storages were allocated."""

    op: str
    """For example `aten.mm`; "" for a tensor that no operator made while the step was watched."""
    module: str
    """Path of the innermost module, its outermost class first: `GPT.blocks.0.mlp`; "" outside any module."""
    source: str
    """`file.py:line` of the innermost frame outside torch; "" when there is none."""
    device: str
    count: int
    bytes: int
    """What the `count` storages hold together at the end."""

    def __str__(self) -> str:
        op = self.op or "no operator"
        return op + (f" in {self.module}" if self.module else "") + (f" at {self.source}" if self.source else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Memory that grows with the steps, all held in one place."""

    kind: LeakKind
    bytes_per_step: int
    total_bytes: int
    """Everything that the measured steps left behind here."""
    count: int
    """How many storages that is; views of one storage count once."""
    saved_bytes: int
    """The part of `total_bytes` that is held only by an autograd graph, as saved for a backward."""
    holders: Chain
    """From the variable that a person can find down to the tensor or graph that owns the bytes."""
    births: tuple[Birth, ...]
    """Where the storages were allocated, most bytes first."""

    @property
    def op(self) -> str:
        """The operator that made most of the bytes."""
        return self.births[0].op

    @property
    def module(self) -> str:
        """The module that made most of the bytes."""
        return self.births[0].module

    @property
    def source(self) -> str:
        """The line that made most of the bytes."""
        return self.births[0].source

    @property
    def chain(self) -> str:
        """The holders in one line, outermost first, and what the last one keeps alive."""
        links = [str(holder) for holder in self.holders if holder.kind != GRAPH]
        what = "of saved activations " if self.saved_bytes * 2 > self.total_bytes else ""
        return " -> ".join([*links, f"keeps {format_bytes(self.total_bytes)} {what}alive"])

    def summary(self) -> str:
        """The leak as lines of text for people."""
        freed = "" if self.kind is LeakKind.HELD else " of garbage in a cycle, freed only when the collector runs"
        storages = "1 storage" if self.count == 1 else f"{self.count} storages"
        lines = [f"{format_bytes(self.bytes_per_step)} a step{freed}, {storages} so far", f"   {self.chain}"]
        lines += [f"   made by {birth}: {format_bytes(birth.bytes)}" for birth in self.births[:3]]
        if others := self.births[3:]:
            lines.append(f"   and {len(others)} more: {format_bytes(sum(birth.bytes for birth in others))}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakReport:
    """What `find_leaks` saw."""

    steps: int
    """Steps that were measured."""
    warmup: int
    """Steps that ran before, unmeasured."""
    leaks: tuple[Leak, ...]
    """The fastest growing first; empty for a clean step."""

    @property
    def bytes_per_step(self) -> int:
        """Growth of all leaks together."""
        return sum(leak.bytes_per_step for leak in self.leaks)

    def summary(self) -> str:
        """The report as text for people, one paragraph a leak."""
        measured = f"{self.steps} steps after {self.warmup} of warm-up"
        if not self.leaks:
            return f"No leak: nothing that {measured} allocated kept growing."
        places = "1 place" if len(self.leaks) == 1 else f"{len(self.leaks)} places"
        head = f"Memory grows by {format_bytes(self.bytes_per_step)} a step, in {places} ({measured})."
        return "\n\n".join([head, *(f"{index}. {leak.summary()}" for index, leak in enumerate(self.leaks, start=1))])
