"""Program: a traced forward or backward as plain data: steps in order, and the buffers that they read and write."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Work(enum.Enum):
    """How a step is run, and so whether its result needs a buffer."""

    KERNEL = "kernel"
    """By a kernel of its own, which reads and writes memory: products, attention, convolutions, scatters."""
    POINTWISE = "pointwise"
    """Each element by itself: a compiler can compute it inside of whoever reads it."""
    REDUCTION = "reduction"
    """Fewer elements than it reads: what it reads may be computed on the way, its result is written."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """What a kernel of its own is called with: libraries take memory by the form of their arguments."""

    operator: Any
    """Torch's overload, such as `aten.mm.default`."""
    args: tuple[Any, ...]
    """Tensors are on the meta device."""
    out: Any


@dataclass(frozen=True, slots=True)
class Step:
    """One operator; views are none, they are other names of a buffer."""

    name: str
    reads: tuple[str, ...]
    """Buffers, each once."""
    writes: tuple[str, ...]
    """Buffers that begin here; none for a step that writes over an argument."""
    work: Work
    turned: frozenset[str] = frozenset()
    """Of what it reads, what it sees through a view that cuts or turns it: element by element it cannot be written over."""
    is_heavy: bool = False
    """Whether an element takes a processor long: exponentials and logarithms."""
    extent: int = 0
    """Elements that its code goes over: of its result, or of what it reduces."""
    over_rows: bool = True
    """For a reduction: whether it sums along the last dimension, as pointwise code beside it runs."""
    operator: str = ""
    """Without its overload: `aten.mm`."""
    call: KernelCall | None = None
    """For those with a kernel of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Steps in the order they run in."""

    inputs: tuple[str, ...]
    """Buffers that are there before the first step."""
    steps: tuple[Step, ...]
    outputs: frozenset[str]
    """Buffers that must be there after the last step; inputs may be among them."""
    sizes: Mapping[str, int]
    """Bytes of each buffer."""
