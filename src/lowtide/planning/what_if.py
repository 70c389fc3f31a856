"""What-if: what each technique would really save, on top of what is already on.

Savings do not add: a technique that saves nothing alone may save gigabytes once another has moved the peak. So every
row is traced, and techniques that save nothing are tried again together with those that save most.

Why a technique saves what it saves is read off the traces before and after it: how much of its *subject*, the tensors it
acts on, is alive at the peak, and where the peak goes. Nothing is looked up in a table of savings.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from lowtide.errors import LowtideError
from lowtide.planning.plan import Schedule, Weights
from lowtide.planning.techniques import TECHNIQUES, Problem, Subject, Technique
from lowtide.tracing.explanation.instant import place_of, where
from lowtide.tracing.step_trace import Category, StepTrace, step_time
from lowtide.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfRow:
    """One technique, or several together, tried on top of what is already on."""

    technique: str
    before_bytes: int
    after_bytes: int
    reason: str
    """One sentence: why it saves what it saves."""
    reserved_bytes: int | None = None
    """What the allocator holds at most with it."""
    fits: bool | None = None
    """Whether that and the CUDA context go onto the hardware; None where its memory is not known."""
    host_bytes: int | None = None
    """What a session holds of the host; None for a step without one."""
    step_s: float | None = None
    """Predicted seconds a step; None where the hardware's rates are not known, or the step was not traced."""
    set_: tuple[str, ...] = ()
    """What `--set` takes to trace it."""
    code: str = ""
    """The line that does it in a script, for a session."""

    @property
    def saved_bytes(self) -> int:
        """Negative when the technique raises the peak."""
        return self.before_bytes - self.after_bytes


_JOIN = " + "
NOTHING_SHARE = 0.005
"""The share of the peak below which a saving counts as nothing."""
_NUM_PARTNERS = 2
"""A technique that saves nothing alone is tried with this many of those that save most, and with both of them."""
_ABOUT_AS_GOOD = 0.05
"""A share of the peak: a dearer technique that is better by less does not stand for those that act alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A technique that was not tried."""

    technique: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The answer: rows in the order of the table, single techniques first, then combinations."""

    rows: tuple[WhatIfRow, ...]
    skipped: tuple[Skipped, ...]
    base_fits: bool | None = None
    """Whether the step fits as it is; None where the hardware's memory is not known."""

    @property
    def least_that_fits(self) -> WhatIfRow | None:
        """The row that fits with the fewest techniques; the fastest of several."""
        fitting = [row for row in self.rows if row.fits]
        return min(fitting, key=lambda row: (row.technique.count(_JOIN), row.step_s or math.inf), default=None)

    @property
    def verdict(self) -> str:
        """What it takes to fit, in a sentence; "" where the step fits, or nobody knows."""
        least = self.least_that_fits
        if self.base_fits is not False:
            return ""
        if least is None:
            smallest = min(self.rows, key=lambda row: row.reserved_bytes or row.after_bytes, default=None)
            best = "" if smallest is None else f"; the smallest, {smallest.technique}, reserves {_reserved(smallest)}"
            return f"Nothing that was tried fits{best}. lowtide plan searches mixtures, and a smaller batch takes less."
        host = "" if least.host_bytes is None else f", with {format_bytes(least.host_bytes)} of the host"
        return (
            f"With the fewest changes it fits like this: {least.technique}. It then reserves {_reserved(least)}{host}."
        )


def _reserved(row: WhatIfRow) -> str:
    return format_bytes(row.after_bytes if row.reserved_bytes is None else row.reserved_bytes)


@dataclass(frozen=True, slots=True)
class Progress:
    """One trace is about to be made."""

    technique: str
    number: int
    """Counts from 1."""
    total: int
    """How many there will be, as far as is known; combinations add to it once single techniques are done."""


@dataclass(frozen=True, slots=True)
class _Tried:
    """A step with some techniques added."""

    techniques: tuple[Technique, ...]
    problem: Problem
    trace: StepTrace
    """That of the step without them, where none of what they act on is alive at its peak: they cannot lower that."""
    is_traced: bool = True


def what_if(
    problem: Problem,
    base: StepTrace,
    *,
    techniques: Sequence[Technique] = TECHNIQUES,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> WhatIf:
    """Trace each technique, and the combinations worth it, on top of a step.

    A technique that acts on nothing that is alive at the peak saves nothing alone and is not traced alone. Otherwise a row
    takes one trace: about a second for a small model, some for one with billions of parameters.

    Args:
        problem: The step as it is.
        base: Its trace, from `problem.trace()`.
        techniques: Those to try.
        on_progress: Is told before each trace.

    Example:
        >>> import torch
        >>> from lowtide.models import resolve_model
        >>> from lowtide.planning.plan import Schedule, Weights
        >>> from lowtide.planning.techniques import UPDATE_IN_BACKWARD
        >>> source = resolve_model("gpt-tiny")
        >>> problem = Problem(model=source.build(None), batch=source.make_batch("8x128"), optimizer=torch.optim.AdamW)
        >>> answer = what_if(problem, problem.trace(), techniques=[UPDATE_IN_BACKWARD])
        >>> answer.rows[0].reason.startswith("the peak is in the backward of the loss, before any gradient exists")
        True
    """
    search = _Search(_Tried((), problem, base), on_progress)
    singles = search.try_each(techniques)
    combinations = _combinations(singles, base)
    search.expected += len(combinations)
    for combination in combinations:
        search.try_together(combination)
    streamed = [tried for tried in singles if tried.techniques[0].begins_session and tried.is_traced]
    if streamed:
        search.try_in_session(min(streamed, key=lambda tried: tried.trace.peak_bytes), techniques)
    return WhatIf(rows=tuple(search.rows), skipped=tuple(search.skipped), base_fits=_fits(base))


def _fits(trace: StepTrace) -> bool | None:
    target = trace.target
    return trace.peak_reserved_bytes + target.context_bytes <= target.capacity_bytes if target.capacity_bytes else None


class _Search:
    """Makes the traces of one what-if and the rows that come of them."""

    def __init__(self, base: _Tried, on_progress: Callable[[Progress], None]) -> None:
        self.base = base
        self.rows: list[WhatIfRow] = []
        self.skipped: list[Skipped] = []
        self.expected = 0
        self._made: dict[tuple[Technique, ...], _Tried] = {}
        self._num_traces = 0
        self._on_progress = on_progress

    def try_each(self, techniques: Iterable[Technique]) -> list[_Tried]:
        """A row for each technique that applies."""
        fitting: list[Technique] = []
        for technique in techniques:
            refusal = technique.why_not(self.base.problem, self.base.trace)
            if refusal is None:
                fitting.append(technique)
            else:
                self.skipped.append(Skipped(technique=technique.name, reason=refusal))
        absent = {technique for technique in fitting if self._is_absent(technique)}
        self.expected = len(fitting) - len(absent)
        tried = []
        for technique in fitting:
            after = (
                _Tried((technique,), self.base.problem, self.base.trace, is_traced=False)
                if technique in absent
                else self._add(self.base, technique)
            )
            if after is not None:
                tried.append(after)
                subject = technique.subject(self.base.trace)
                if after.is_traced:
                    self._row(after, reason(subject, self.base.trace, after.trace))
                else:
                    self._row(after, _why_absent(subject, self.base.trace))
        return tried

    def _is_absent(self, technique: Technique) -> bool:
        """Whether hardly anything of what the technique acts on is alive at the peak, so that it cannot lower it."""
        trace = self.base.trace
        held = technique.subject(trace).bytes_at(trace, trace.peak_event)
        return held < NOTHING_SHARE * trace.peak_bytes and not technique.begins_session

    def try_in_session(self, session: _Tried, techniques: Iterable[Technique]) -> None:
        """Policies on top of a session: the first one where the session fits, else one after the other until one fits."""
        [begun] = session.techniques
        ladder = [
            technique
            for technique in techniques
            if technique.is_for_sessions and technique.why_not(session.problem, session.trace) is None
        ]
        if _fits(session.trace) is not False:
            ladder = [technique for technique in ladder if technique.name == "recompute"]
        self.expected += len(ladder)
        for technique in ladder:
            self.try_together((begun, technique))
            if _fits(session.trace) is False and self.rows[-1].fits:
                return

    def try_together(self, combination: tuple[Technique, ...]) -> None:
        """A row for a combination, if its last technique adds to what the others save."""
        *partners, last = combination
        before = self.base
        for technique in partners:
            step = self._add(before, technique)
            if step is None:
                return
            before = step
        after = self._add(before, last)
        if after is None or after.trace.peak_bytes > before.trace.peak_bytes * (1 - NOTHING_SHARE):
            return
        names = " + ".join(technique.name for technique in partners)
        why = reason(last.subject(before.trace), before.trace, after.trace)
        saved = format_bytes(before.trace.peak_bytes - after.trace.peak_bytes)
        self._row(after, f"{last.name} saves {saved} on top of {names}: {why}")

    def _row(self, after: _Tried, why: str) -> None:
        trace = after.trace
        time = step_time(trace) if after.is_traced else None
        self.rows.append(
            WhatIfRow(
                technique=_JOIN.join(technique.name for technique in after.techniques),
                before_bytes=self.base.trace.peak_bytes,
                after_bytes=trace.peak_bytes,
                reason=why,
                reserved_bytes=trace.peak_reserved_bytes,
                fits=_fits(trace),
                host_bytes=trace.host_bytes,
                step_s=None if time is None else time.step_s,
                set_=_settings_of(self.base.problem, after.problem),
                code=_code(after.problem) if self.base.problem.plan is None else "",
            )
        )

    def _add(self, before: _Tried, technique: Technique) -> _Tried | None:
        """The step with one more technique; None, and a reason kept, where they do not go together."""
        techniques = (*before.techniques, technique)
        if techniques in self._made:
            return self._made[techniques]
        name = " + ".join(item.name for item in techniques)
        refusal = technique.why_not(before.problem, before.trace) if before.techniques else None
        self._num_traces += 1
        if refusal is None:
            self._on_progress(Progress(name, self._num_traces, max(self.expected, self._num_traces)))
            try:
                problem = technique.apply(before.problem)
                with warnings.catch_warnings():
                    # Said of the step itself, where it is true of that.
                    warnings.filterwarnings("ignore", message="autocast=")
                    made = self._made[techniques] = _Tried(techniques, problem, problem.trace())
            except LowtideError as error:
                refusal = f"it could not be traced: {error}"
            except (
                Exception
            ) as error:  # a model's own code may raise anything under a technique; the other rows still hold
                refusal = f"it could not be traced: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            else:
                return made
        self.skipped.append(Skipped(technique=name, reason=refusal))
        return None


def _settings_of(base: Problem, problem: Problem) -> tuple[str, ...]:
    """The difference between two steps as what `--set` takes; a smaller batch is not among them."""
    named = [
        f"step.{each.name}={value}"
        for each in fields(problem.settings)
        if (value := getattr(problem.settings, each.name)) != getattr(base.settings, each.name) and value is not None
    ]
    return (*named, *(f"plan.{key}={value}" for key, value in _plan_words(problem).items()))


def _plan_words(problem: Problem) -> dict[str, str]:
    """A plan that treats all groups alike, in the words of `make_plan`."""
    plan = problem.plan
    if plan is None:
        return {}
    streamed = any(group.weights is Weights.STREAMED for group in plan.groups)
    words = {"weights": "streamed" if streamed else "resident", "update": plan.groups[0].sites[0].value}
    if plan.schedule is not Schedule.DEFERRED:
        words["schedule"] = plan.schedule.value
    if problem.policy not in (None, "keep"):
        words["activations"] = str(problem.policy)
    return words


def _code(problem: Problem) -> str:
    if problem.plan is None:
        return ""
    words = ", ".join(f"{key}={value!r}" for key, value in _plan_words(problem).items())
    return f"session = lowtide.manage(model, optimizer, lowtide.make_plan(model, {words}))"


def _combinations(singles: Sequence[_Tried], base: StepTrace) -> list[tuple[Technique, ...]]:
    """Each technique that saves nothing alone, behind those that save most: one of them, then two."""
    saving = _partners(singles, base)
    found: list[tuple[Technique, ...]] = []
    seen: set[str] = set()
    for tried in singles:
        technique = tried.techniques[0]
        noun = technique.subject(base).noun
        # Of two that act on the same tensors (fused and for-loop steps) the first speaks for both.
        is_without_effect = tried.is_traced and is_same(base, tried.trace)
        if noun in seen or not is_nothing(base, tried.trace) or is_without_effect:
            continue
        seen.add(noun)
        partners = [other for other in saving if technique.why_not(other.problem, other.trace) is None][:_NUM_PARTNERS]
        found += [(other.techniques[0], technique) for other in partners]
        if len(partners) == _NUM_PARTNERS:
            found.append((*(other.techniques[0] for other in partners), technique))
    return found


def _partners(singles: Sequence[_Tried], base: StepTrace) -> list[_Tried]:
    """Those that save, most first; of several that act on the same tensors the one that stands for all.

    They come in the order of what they cost, so that is the first of them that is about as good as the best.
    """
    kinds: dict[str, list[_Tried]] = {}
    for tried in singles:
        # What goes with a session is tried apart.
        is_plain = not tried.techniques[0].begins_session
        if is_plain and tried.trace.peak_bytes < base.peak_bytes * (1 - NOTHING_SHARE):
            kinds.setdefault(tried.techniques[0].subject(base).noun, []).append(tried)
    chosen = []
    for alike in kinds.values():
        best = min(tried.trace.peak_bytes for tried in alike)
        chosen.append(next(tried for tried in alike if tried.trace.peak_bytes <= best * (1 + _ABOUT_AS_GOOD)))
    return sorted(chosen, key=lambda tried: tried.trace.peak_bytes)


def is_nothing(before: StepTrace, after: StepTrace) -> bool:
    """Whether two peaks are the same for all that matters."""
    return abs(before.peak_bytes - after.peak_bytes) < NOTHING_SHARE * before.peak_bytes


def is_same(before: StepTrace, after: StepTrace) -> bool:
    """Whether two steps allocate the same at every instant: the technique never took effect."""
    return bool(np.array_equal(before.curve, after.curve))


def reason(subject: Subject, before: StepTrace, after: StepTrace) -> str:
    """One sentence on what the technique with this subject did to the peak."""
    held, left = (subject.bytes_at(trace, trace.peak_event) for trace in (before, after))
    if is_same(before, after):
        return f"{subject.when_ineffective}."
    if is_nothing(before, after):
        return _why_nothing(subject, before, after, held, left)
    noun = subject.noun
    if held < NOTHING_SHARE * before.peak_bytes and left < NOTHING_SHARE * after.peak_bytes:
        # Not the subject itself but what comes with it changed the peak.
        sentence = f"hardly any {noun} are alive at either peak, but other tensors change with them"
    else:
        verb = "fall" if left < held else "rise"
        sentence = f"the {noun} alive at the peak {verb} from {format_bytes(held)} to {format_bytes(left)}"
        sentence += _what_stays(subject, after)
    return f"{sentence}{_other_changes(subject, before, after)}; {_move(before, after)}."


def _what_stays(subject: Subject, after: StepTrace) -> str:
    stays = sum(item.bytes for item in after.alive_at(after.peak_event) if subject.what_stays(item))
    return f", of which {format_bytes(stays)} {subject.why_stays}" if stays >= 0.05 * after.peak_bytes else ""


def _why_nothing(subject: Subject, before: StepTrace, after: StepTrace, held: int, left: int) -> str:
    if held < NOTHING_SHARE * before.peak_bytes:
        return _why_absent(subject, before)
    here = f"the peak is {where(before, before.peak_event)}"
    if held - left < NOTHING_SHARE * before.peak_bytes:
        return f"{here}, and the {subject.noun} alive there stay the same ({format_bytes(left)})."
    return (
        f"it takes {format_bytes(held - left)} of {subject.noun} away from the peak, but {_move(before, after)}, "
        f"as high as before{_other_changes(subject, before, after)}."
    )


def _why_absent(subject: Subject, before: StepTrace) -> str:
    absent = subject.when_absent(place_of(before, before.peak_event))
    return f"the peak is {where(before, before.peak_event)}, {absent}{_elsewhere(subject, before)}."


def _elsewhere(subject: Subject, trace: StepTrace) -> str:
    """Where the subject does fill memory, and why that is not the peak."""
    curve = subject.curve(trace)
    most = int(curve.max())
    if most < NOTHING_SHARE * trace.peak_bytes:
        return f", and no more than {format_bytes(most)} of {subject.noun} exist at any time"
    # The instant with the highest memory, of those at which nearly all of the subject is alive.
    highest = int(np.argmax(np.where(curve >= 0.9 * most, trace.curve, 0)))
    total = format_bytes(int(trace.curve[highest]))
    place = where(trace, highest - 1)
    return f"; the {subject.noun} reach {format_bytes(most)} {place}, where only {total} are alive in all"


def _other_changes(subject: Subject, before: StepTrace, after: StepTrace) -> str:
    """The categories outside the subject that change most at the peak, when they matter beside the saving."""
    least = 0.1 * max(abs(before.peak_bytes - after.peak_bytes), NOTHING_SHARE * before.peak_bytes)
    old, new = (_outside(subject, trace) for trace in (before, after))
    partly = {item.category for item in before.allocations if subject.matches(item)}
    told = [
        f"{'other ' if category in partly else ''}{category.value} from {format_bytes(old[category])} "
        f"to {format_bytes(new[category])}"
        for category in sorted(Category, key=lambda category: -abs(new[category] - old[category]))
        if abs(new[category] - old[category]) >= least
    ]
    return f" ({', '.join(told[:2])})" if told else ""


def _outside(subject: Subject, trace: StepTrace) -> dict[Category, int]:
    """Bytes at the peak by category, without the subject's."""
    totals = dict.fromkeys(Category, 0)
    for item in trace.alive_at(trace.peak_event):
        totals[item.category] += 0 if subject.matches(item) else item.bytes
    return totals


def _move(before: StepTrace, after: StepTrace) -> str:
    old, new = where(before, before.peak_event), where(after, after.peak_event)
    return f"the peak stays {new}" if old == new else f"the peak moves from {_bare(old)} to {_bare(new)}"


def _bare(place: str) -> str:
    """`in the backward of x` as `the backward of x`."""
    return place.removeprefix("in ").removeprefix("at ").replace("before the step begins", "the start of the step")
