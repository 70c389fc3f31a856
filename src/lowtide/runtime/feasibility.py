"""What fits: the smallest set of changes that makes a step fit, the largest batch, and the hardware that holds it.

Searches estimate; what is told of one plan is replayed with the allocator. Only the ranking of all hardware is an estimate
throughout, and says so.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from lowtide import compat
from lowtide.errors import BatchMismatchError, LowtideError, PlanError
from lowtide.hardware import Hardware, known_hardware
from lowtide.planning.batch_costs import BatchCosts
from lowtide.planning.changes import Choice, Option, options
from lowtide.planning.hand_plan import make_plan
from lowtide.planning.plan import Schedule
from lowtide.planning.search import Limits
from lowtide.planning.techniques import batch_size
from lowtide.runtime.plan_problem import PlannedStep, PlanProblem, smallest, usable_bytes
from lowtide.runtime.planner import PlanOptions, Size, pose
from lowtide.tracing.settings import StepSettings
from lowtide.tracing.step_trace import StepTrace, seconds_of
from lowtide.units import format_bytes

_MOST_REPLAYS = 4
_MOST_SIZES = 12
"""Batch sizes that are replayed before the search for the largest gives up."""
_GAPS = 0.04
"""The share of a budget that the allocator is taken to hold beyond its tensors, where nothing is replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A change that needs the user's word, because the arithmetic or the loop is another with it."""

    name: str
    flags: str
    """What `lowtide plan` takes besides."""
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A set of changes with which the step fits."""

    choice: Choice
    word: Word | None
    """What it needs beside the choice."""
    step_s: float
    reserved_bytes: int
    """Replayed."""

    @property
    def words(self) -> str:
        """What it changes."""
        changed = [f"{name} {word}" for name, word in self.choice.changed.items()]
        return ", ".join([*([self.word.name] if self.word else []), *changed]) or "none, plain torch fits"

    @property
    def flags(self) -> str:
        """What shows it on the command line."""
        return " ".join(filter(None, (self.word.flags if self.word else "", self.choice.flags)))

    def code(self, device_bytes: int, for_manage: Mapping[str, object] | None = None) -> str:
        """The lines of a script that turn it on; see `Choice.code`."""
        return "; ".join([*([self.word.code] if self.word else []), self.choice.code(device_bytes, for_manage)])


def smallest_change(problem: PlanProblem, limits: Limits, word: Word | None = None) -> Remedy | None:
    """The fewest changes from the plain step with which it fits, of as many the fastest; None where no few words will do.

    Choices that are beyond a budget by their estimate are passed over; the others are replayed until one fits.
    """
    fitting = [option for option in options(problem.search, limits) if option.over_bytes <= 0]
    for option in fitting[:_MOST_REPLAYS]:
        problem.tell("replaying the smallest change")
        replayed = _replay(problem, option, limits)
        if problem.fits(replayed, limits):
            return Remedy(
                choice=option.choice,
                word=word,
                step_s=option.candidate.step_s * _accumulated(problem),
                reserved_bytes=replayed.peak_reserved_bytes,
            )
    return None


def _replay(problem: PlanProblem, option: Option, limits: Limits) -> StepTrace:
    words: dict[str, Any] = dict(option.choice.words)
    return problem.under(make_plan(problem.layout, **words, device_memory=limits.device_bytes))


def _accumulated(problem: PlanProblem) -> int:
    settings = problem.traced["settings"] or StepSettings()
    return int(settings.accumulate)


def remedies(problem: PlanProblem, limits: Limits) -> Iterator[Remedy]:
    """What would fit with one more word of the user's, where nothing fits without."""
    for word, variant in _variants(problem, limits):
        problem.tell(f"trying {word.name}")
        try:
            found = smallest_change(variant, limits, word)
        except LowtideError:
            continue  # the model does not take it
        if found is not None:
            yield found
            if _accumulated(variant) > 1:
                return  # the largest micro-batch is enough


def _variants(problem: PlanProblem, limits: Limits) -> Iterator[tuple[Word, PlanProblem]]:
    settings: StepSettings = problem.traced["settings"] or StepSettings()
    if callable(getattr(problem.model, "get_output_embeddings", None)) and not settings.chunked_loss:
        word = Word(
            name="chunked loss",
            flags="--set step.chunked_loss=true",
            code="lowtide.activations.chunked_head(model)",
        )
        yield word, _with_settings(problem, replace(settings, chunked_loss=True))
    size = batch_size(problem.batch)
    if size is None or limits.schedule is Schedule.IN_BACKWARD:
        return
    times = 2
    while size % times == 0:
        word = Word(
            name=f"{times} micro-batches of {size // times}",
            flags=f"--set step.accumulate={times * settings.accumulate}, --batch of {size // times}",
            code=f"call backward() on {times} micro-batches of {size // times} before each optimizer.step()",
        )
        smaller = replace(problem, batch=resized(problem.batch, size // times), known=None)
        # Priced as a single pass, and replayed with all of them.
        priced = replace(smaller, known=smaller.priced)
        yield word, _with_settings(priced, replace(settings, accumulate=times * settings.accumulate))
        times *= 2


def _with_settings(problem: PlanProblem, settings: StepSettings) -> PlanProblem:
    return replace(problem, traced={**problem.traced, "settings": settings})


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """The largest batch whose step fits."""

    num_samples: int
    found: PlannedStep
    """The fastest plan for it."""
    next_bytes: int
    """What one sample more takes of the device at least; its smallest plan was replayed, as was that of `num_samples`."""

    def __repr__(self) -> str:
        more = format_bytes(self.next_bytes)
        return f"<LargestBatch: {self.num_samples} samples, one more takes {more}; {self.found!r}>"


def largest_batch(model: nn.Module, batch: Any, **options: Unpack[PlanOptions]) -> LargestBatch:
    """The largest batch whose step fits the memory, with the fastest plan for it; the arguments are those of `plan`.

    The step is traced at two sizes, and what it takes at others is told from these. The answer is verified: the step of the
    smallest plan is replayed with the allocator for that size, which fits, and for one sample more, which does not.

    Args:
        model: As for `plan`.
        batch: One of any size, whose tensors share their first dimension; its samples are repeated or left out.
        **options: As for `plan`.

    Raises:
        PlanError: Not even one sample fits.

    Example:
        >>> import lowtide, torch
        >>> from lowtide.models import resolve_model
        >>> source = resolve_model("gpt-tiny")
        >>> model, batch = source.build(torch.bfloat16), source.make_batch("2x64")
        >>> largest = lowtide.largest_batch(
        ...     model, batch, optimizer=torch.optim.AdamW, device_memory="100MiB", hardware="rtx-4090"
        ... )
        >>> largest.found.trace.peak_reserved_bytes <= 100 << 20 < largest.next_bytes
        True
    """
    return largest(*pose(model, batch, **options))


def largest(problem: PlanProblem, limits: Limits) -> LargestBatch:
    """`largest_batch` of a step that is posed."""
    size = batch_size(problem.batch)
    if size is None:
        raise BatchMismatchError("the tensors of the batch share no first dimension, so there is no size to change")
    sizes = (size, 2 * size)
    traced = [replace(problem, batch=resized(problem.batch, each), known=None) for each in sizes]
    (first, low_beyond), (second, high_beyond) = (each.priced for each in traced)
    line = BatchCosts(sizes=sizes, costs=(first, second), beyond=(low_beyond, high_beyond))

    def at(num_samples: int) -> PlanProblem:
        return replace(problem, batch=resized(problem.batch, num_samples), known=line.at(num_samples))

    def estimate(num_samples: int) -> int:
        costs, beyond = line.at(num_samples)
        return smallest(replace(problem, known=(costs, beyond)).search, limits).device_bytes

    slope = max(1, estimate(sizes[1]) - estimate(sizes[0])) / size
    replayed: dict[int, StepTrace] = {}

    def fits(num_samples: int) -> bool:
        if num_samples not in replayed:
            problem.tell(f"replaying {num_samples} samples")
            posed = at(num_samples)
            replayed[num_samples] = posed.replay(smallest(posed.search, limits), limits)[1]
        return problem.fits(replayed[num_samples], limits)

    count = size + int((limits.device_bytes * (1 - _GAPS) - estimate(size)) / slope)
    most, too_many = _bracket(fits, replayed, max(1, count), slope, limits)
    if most == 0:
        one = at(1)
        raise one.nothing_fits(smallest(one.search, limits), replayed[1].peak_reserved_bytes, limits)
    return LargestBatch(
        num_samples=most, found=at(most).fastest(limits), next_bytes=replayed[too_many].peak_reserved_bytes
    )


def _bracket(
    fits: Callable[[int], bool], replayed: Mapping[int, StepTrace], guess: int, slope: float, limits: Limits
) -> tuple[int, int]:
    """The largest size that fits and the next one, which does not.

    Until both sides are known, a guess is on the line through the replay before it; then it is on the line between them, and
    in their middle every other time, since what the allocator reserves grows by steps.
    """
    low, high = 0, None
    for number in range(_MOST_SIZES):
        if fits(guess):
            low = guess
        else:
            high = guess
        if high == low + 1:
            return low, high
        rest = limits.device_bytes - replayed[guess].peak_reserved_bytes
        if high is None:
            guess += max(1, int(rest / slope))
        elif low == 0:
            guess = max(1, min(guess + math.floor(rest / slope), high - 1))
        else:
            span = replayed[high].peak_reserved_bytes - replayed[low].peak_reserved_bytes
            share = (limits.device_bytes - replayed[low].peak_reserved_bytes) / max(1, span) if number % 2 else 0.5
            guess = max(low + 1, min(low + int((high - low) * share), high - 1))
    raise PlanError(
        f"the largest batch lies between {low} and {high or 'more'} samples, and {_MOST_SIZES} replays did not find it; "
        "give a batch nearer to that"
    )


def resized(batch: Any, num_samples: int) -> Any:
    """A batch of so many samples: the given ones, again from the first when there are too few."""
    size = batch_size(batch)
    assert size is not None, "ask batch_size first"
    rows = torch.arange(num_samples) % size
    leaves, structure = compat.flatten(dict(batch) if isinstance(batch, Mapping) else batch)
    taken = [
        leaf.index_select(0, rows.to(leaf.device))
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size
        else leaf
        for leaf in leaves
    ]
    return compat.unflatten(taken, structure)


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareRow:
    """What a step does on one kind of device, estimated."""

    hardware: Hardware
    step_s: float | None
    """None where it does not fit."""
    tokens_per_s: float | None
    bound_by: str
    device_bytes: int
    """What the fastest plan takes, or, where none fits, the smallest."""
    is_host_short: bool
    """Whether the device would hold the smallest plan, and the host does not."""


def rank(problem: PlanProblem, limits: Limits, *, device_memory: Size | None = None) -> list[HardwareRow]:
    """The step on all known hardware: the fastest first, then those that do not hold it, the nearest first.

    The step is traced once for each family of kernels, and its operators' seconds are told for each device from their work.
    """
    families: dict[tuple[bool, bool], tuple[PlanProblem, list[tuple[dict[str, str], StepTrace]]]] = {}
    rows = []
    for hardware in known_hardware():
        if hardware.is_host:
            continue
        family = hardware.compute_capability[0] in (9, 10), hardware.compute_capability[0] >= 8
        if family not in families:
            first = _on(problem, hardware)
            probes = first.probes()
            families[family] = replace(first, known=first.read(probes)), probes
        problem.tell(f"pricing {hardware.name}")
        priced, probes = families[family]
        budget = usable_bytes(hardware) if device_memory is None else min(limits.device_bytes, usable_bytes(hardware))
        within = replace(limits, device_bytes=budget)
        needed = smallest(priced.search, within).device_bytes + int(_GAPS * budget)
        posed = _on(problem, hardware)
        if needed <= budget:  # else no rates are of interest
            probes = [(policies, at_rates_of(hardware, traced)) for policies, traced in probes]
            posed = replace(posed, known=posed.read(probes))
        rows.append(_row(posed, within, needed))
    return sorted(
        rows, key=lambda row: (row.step_s is None, row.step_s or row.device_bytes - row.hardware.memory_bytes)
    )


def _on(problem: PlanProblem, hardware: Hardware) -> PlanProblem:
    return replace(problem, hardware=hardware, traced={**problem.traced, "hardware": hardware}, known=None)


def at_rates_of(hardware: Hardware, trace: StepTrace) -> StepTrace:
    """A trace whose operators take what they would on other hardware."""
    ops = tuple(
        op if op.work is None else replace(op, seconds=seconds_of(op.name, op.work, hardware.rates)) for op in trace.ops
    )
    return replace(trace, ops=ops)


def _row(problem: PlanProblem, limits: Limits, needed_bytes: int) -> HardwareRow:
    found = None
    if needed_bytes <= limits.device_bytes:
        costs, beyond = problem.priced
        gaps = int(_GAPS * limits.device_bytes)
        with contextlib.suppress(PlanError):  # the host may be short
            found = replace(problem, known=(costs, beyond + gaps)).search.fastest(limits).best
    return HardwareRow(
        hardware=problem.hardware,
        step_s=None if found is None else found.step_s,
        tokens_per_s=problem.num_tokens / found.step_s if found is not None and problem.num_tokens else None,
        bound_by="" if found is None else found.times.bound_by,
        device_bytes=needed_bytes if found is None else found.device_bytes,
        is_host_short=found is None and needed_bytes <= limits.device_bytes,
    )
