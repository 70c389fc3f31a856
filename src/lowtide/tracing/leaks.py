"""`find_leaks`: runs a training step a few times and reports the memory that survives from step to step.

Note [What counts as a leak]
    A storage that is alive after its step is not yet a leak: gradients, caches, a window of recent losses and the last
    output all are. What they have in common is that the number of *different steps* they still hold memory of stops
    growing. So storages are counted by the line of their birth, and after each step its depth is noted: how many of the
    measured steps it still holds something of. A line leaks when its depth reaches a new height in each third of the
    measured steps. Sizes do not matter for that, so that batches of varying length mislead nobody.
    What grows for longer than the window lasts (a deque of 100 under 12 steps) does look like a leak, and what grows
    more rarely than once in a third of the window is missed: more `steps` settle both.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from lowtide.errors import ConfigError, ObserveError
from lowtide.tracing.leak_groups import Survivor, group_survivors
from lowtide.tracing.leak_holders import shortest_paths, starting_points
from lowtide.tracing.leak_names import describe
from lowtide.tracing.leak_report import CYCLE, Chain, Holder, LeakKind, LeakReport
from lowtide.tracing.leak_unreachable import chains_of_unreachable
from lowtide.tracing.storage_births import BirthLog, Born, Site

MIN_STEPS = 6
"""Two steps for each third: with fewer, one hiccup is a trend."""

_GONE: Chain = (Holder(kind=CYCLE, detail="that was gone before it could be examined"),)

Depths = dict[str, list[int]]
"""For each line of birth, after each step: of how many measured steps it still holds memory."""


def find_leaks(
    step: Callable[[], object], *, steps: int = 12, warmup: int = 3, min_bytes_per_step: int = 64
) -> LeakReport:
    """Memory on any device that a training step leaves behind, time after time, and who holds it.

    Calls `step()` `warmup + steps` times. Optimizer state, caches that fill up, gradients that stay at one size and the
    last step's own leftovers are not reported; Note [What counts as a leak] says how they are told apart. Nothing that
    the step owns is kept alive. A watched step costs some 20 microseconds more for each operator, and a look through
    the objects of the process, some 150 milliseconds for a million of them; when something leaks, one search through
    all of them comes on top, about four seconds for a million. Compiled code stays compiled; what it allocates inside
    is known without its operator.

    Args:
        step: Runs one training step; takes no arguments, and its result is dropped.
        steps: How many steps to measure. More find slower leaks and tell longer windows from leaks.
        warmup: How many to run before: the first ones allocate what stays (optimizer state, workspaces).
        min_bytes_per_step: Growth below this is not reported; by default one detached scalar a step may be kept.

    Raises:
        ConfigError: Fewer than six steps, or a negative number.
        ObserveError: The step ran out of data.

    Example:
        >>> history = []
        >>> model = torch.nn.Linear(256, 256)
        >>> report = find_leaks(lambda: history.append(model(torch.randn(8, 256)).square().mean()))
        >>> report.leaks[0].holders[0].name
        'history'
    """
    if steps < MIN_STEPS:
        raise ConfigError(f"steps is {steps}, but growth shows only over {MIN_STEPS} or more; raise it", key="steps")
    for key, value in (("warmup", warmup), ("min_bytes_per_step", min_bytes_per_step)):
        if value < 0:
            raise ConfigError(f"{key} is {value}; it cannot be negative", key=key)
    for index in range(warmup):
        _call(step, index + 1, warmup + steps)
    with BirthLog() as log:
        depths = _measure(step, log, steps=steps, warmup=warmup)
        survivors = _survivors(step, log, depths)
    leaks = group_survivors(survivors, steps=steps)
    return LeakReport(
        steps=steps, warmup=warmup, leaks=tuple(leak for leak in leaks if leak.bytes_per_step >= min_bytes_per_step)
    )


def keeps_growing(depths: Sequence[int]) -> bool:
    """Whether a depth reached a new height in each third of the steps, and is at its highest now.

    Example:
        >>> keeps_growing([1, 2, 3, 4, 5, 6]), keeps_growing([1, 2, 3, 3, 3, 3]), keeps_growing([1, 0, 1, 0, 1, 0])
        (True, False, False)
    """
    first, second = len(depths) // 3, 2 * len(depths) // 3
    return 0 < max(depths[:first]) < max(depths[:second]) < depths[-1]


def in_every_third(births: Iterable[int], steps: int) -> bool:
    """Whether there is a birth in each third of the steps, which count from 1."""
    return {3 * (birth - 1) // steps for birth in births} == {0, 1, 2}


def _call(step: Callable[[], object], number: int, total: int) -> None:
    try:
        step()
    except StopIteration as error:
        raise ObserveError(
            f"the step ran out of data at call {number} of {total}; let it start over, or ask for fewer steps"
        ) from error


def _measure(step: Callable[[], object], log: BirthLog, *, steps: int, warmup: int) -> Depths:
    depths: Depths = defaultdict(lambda: [0] * steps)
    for index in range(steps):
        # Without the collector in the last step, so that a cycle which it would free is there to be examined.
        with _collector_paused() if index == steps - 1 else nullcontext(), log.watch(index + 1):
            _call(step, warmup + index + 1, warmup + steps)
        for line, depth in _depths_now(log).items():
            depths[line][index] = depth
    return depths


def _depths_now(log: BirthLog) -> dict[str, int]:
    births: dict[str, set[int]] = defaultdict(set)
    for born in list(log.alive.values()):
        births[born.site.line].add(born.step)
    return {line: len(steps) for line, steps in births.items()}


def _survivors(step: Callable[[], object], log: BirthLog, depths: Depths) -> list[Survivor]:
    """What leaks, with its holders; frees the garbage among it, to tell it from what is held."""
    steps = len(next(iter(depths.values()), []))
    suspected = {line for line, history in depths.items() if keeps_growing(history)}
    suspected |= {collected.site.line for collected in log.collected}
    suspects = {key: born for key, born in list(log.alive.items()) if born.site.line in suspected}
    with _collector_paused():
        chains, unreachable = _chains(step, suspects)
    if unreachable:
        gc.collect()
    now = _depths_now(log)
    survivors = [
        Survivor(kind=LeakKind.HELD, site=born.site, step=born.step, bytes=born.bytes, holders=chains[key])
        for key, born in suspects.items()
        if log.alive.get(key) is born and keeps_growing([*depths[born.site.line][:-1], now[born.site.line]])
    ]
    births: dict[str, list[int]] = defaultdict(list)
    for collected in log.collected:
        births[collected.site.line].append(collected.step)
    survivors += [
        Survivor(
            kind=LeakKind.GARBAGE,
            site=collected.site,
            step=collected.step,
            bytes=collected.bytes,
            holders=unreachable.get(collected.site, _GONE),
        )
        for collected in log.collected
        if in_every_third(births[collected.site.line], steps)
    ]
    return survivors


def _chains(step: Callable[[], object], suspects: dict[int, Born]) -> tuple[dict[int, Chain], dict[Site, Chain]]:
    """The holders of each suspect, and those of the unreachable by the site of their birth."""
    # The step itself last: where a variable of the caller's holds it too, that has a name.
    paths = shortest_paths([*starting_points(), [step]], suspects.keys()) if suspects else {}
    chains = {key: describe(path) for key, path in paths.items()}
    del paths  # before the search backwards, which would find it
    unreached = {key: born for key, born in suspects.items() if key not in chains}
    by_site = chains_of_unreachable(unreached) if unreached else {}
    return chains | {key: by_site[born.site] for key, born in unreached.items()}, by_site


@contextmanager
def _collector_paused() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
