"""Which buffers inductor would keep for later ones, if it always did.

torch 2.8 hands the memory of a buffer that goes to the next planned one with its type and number of elements, the last that went
first, and so holds it until then (`AllocateLine.plan` in `torch/_inductor/codegen/wrapper.py`). Newer versions (2.11 does) ask
`should_reuse_buffer` first, which refuses where that raises the peak by an estimate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.inductor.replay import Event, Extent


def kept_for_reuse(events: Sequence[Event]) -> list[Event]:
    """The events under that rule. Arguments are never kept, and what operators return takes nobody's place."""
    result: list[Event | None] = []
    waiting: dict[Extent, list[int]] = defaultdict(list)
    stands_for: dict[int, int] = {}
    for event in events:
        if event.comes and event.is_planned and waiting[event.extent]:
            place = waiting[event.extent].pop()
            gone = result[place]
            assert gone is not None, "it waits as long as it is there"
            result[place] = None
            stands_for[event.buffer] = gone.buffer
        elif event.comes:
            result.append(event)
        else:
            if not event.is_argument:
                waiting[event.extent].append(len(result))
            result.append(replace(event, buffer=stands_for.get(event.buffer, event.buffer)))
    return [event for event in result if event is not None]
