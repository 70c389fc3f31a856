"""What compiled code does with a traced program: fuse, join, reorder, in inductor's order of things."""

from __future__ import annotations

from collections.abc import Collection

from lowtide.partition.fusion import fuse
from lowtide.partition.joining import join
from lowtide.partition.ordering import reorder
from lowtide.partition.program import Program


def schedule(program: Program, *, freeable: Collection[str] = ()) -> Program:
    """The program as code compiled for a card would run it.

    Args:
        program: As it was traced.
        freeable: Inputs that end with their last reader: what a forward has saved for its backward.
    """
    return reorder(join(fuse(program)), freeable)
