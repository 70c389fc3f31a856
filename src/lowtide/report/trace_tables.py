"""What a report says about a trace, as facts and tables: where the peak is, what it is made of, whether it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.planning.what_if import WhatIfRow
from lowtide.report.palette import STACK_ORDER
from lowtide.report.table import Fill, Table, Tone, Value, bar, make_table, number, size, words
from lowtide.report.timeline import phase_runs, run_peak
from lowtide.tracing.explanation.compare import compare_traces
from lowtide.tracing.explanation.instant import AliveGroup, group_alive, largest_alive
from lowtide.tracing.step_trace import Allocation, Category, StepTrace
from lowtide.units import format_bytes, format_count, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What the step needs of the device against what the device has."""

    needed_bytes: int
    """Peak of reserved memory, and the context."""
    least_bytes: int
    """What remains when the allocator gives cached blocks back, as it does on a full device: allocated memory and the context."""
    capacity_bytes: int
    remark: str = ""
    """What the reader must know of the context; "" where it is known."""

    @property
    def fits(self) -> bool:
        """Whether all of it goes onto the device."""
        return self.needed_bytes <= self.capacity_bytes

    @property
    def fits_tightly(self) -> bool:
        """Whether it goes onto the device only if cached blocks are given back, which costs time and may fail for fragmentation."""
        return not self.fits and self.least_bytes <= self.capacity_bytes

    @property
    def spare_bytes(self) -> int:
        """What is left; negative when it does not fit."""
        return self.capacity_bytes - (self.least_bytes if self.fits_tightly else self.needed_bytes)

    @property
    def verdict(self) -> str:
        """Whether it fits, in words, with the amount."""
        if self.fits:
            said = f"fits, {format_bytes(self.spare_bytes)} to spare"
        elif self.fits_tightly:
            said = f"fits only if cached blocks are given back, {format_bytes(self.spare_bytes)} to spare then"
        else:
            said = f"does not fit, {format_bytes(self.least_bytes - self.capacity_bytes)} too much"
        return f"{said} ({self.remark})" if self.remark else said


def fit_of(trace: StepTrace) -> Fit | None:
    """How the step fits its hardware; None when the memory of that is not known."""
    if trace.target.capacity_bytes <= 0:
        return None
    context = trace.target.context_bytes
    return Fit(
        needed_bytes=trace.peak_reserved_bytes + context,
        least_bytes=trace.peak_bytes + context,
        capacity_bytes=trace.target.capacity_bytes,
        remark=_context_remark(trace),
    )


def _context_remark(trace: StepTrace) -> str:
    if trace.target.is_context_assumed:
        return f"with {format_bytes(trace.target.context_bytes)} assumed for the CUDA context"
    return "" if trace.target.context_bytes else "CUDA context not known, not counted"


ASSUMED_CONTEXT = "assumed, as measured on an H200"
"""Said of a context that is not that of the hardware itself."""


def circumstances(trace: StepTrace) -> list[tuple[str, str]]:
    """What was traced, for what and with what, as pairs; of a trace that an older version saved, what it has."""
    about, hardware = trace.about, trace.target.card
    autocast = trace.settings.get("autocast")
    weights = " under autocast to ".join(str(word) for word in (about.get("dtype"), autocast) if word)
    memory = f", {format_bytes(trace.target.capacity_bytes)}" if trace.target.capacity_bytes else ""
    pairs = [
        ("batch", about.get("batch", "")),
        ("optimizer", about.get("optimizer", "")),
        ("weights", weights),
        ("hardware", f"{hardware}{memory}"),
        ("versions", _versions(trace)),
    ]
    return [(name, value) for name, value in pairs if value]


def _versions(trace: StepTrace) -> str:
    about, torch_version = trace.about, trace.target.torch_version
    traced_with = about.get("torch", torch_version)
    said = [f"torch {torch_version}"]
    if traced_with.partition("+")[0] != torch_version:
        said[0] += f" (traced with {traced_with})"
    commit, _, changes = about.get("commit", "").partition("+")
    named = {"lowtide": about.get("lowtide"), "Python": about.get("python"), "commit": commit[:12]}
    said += [f"{name} {value}" for name, value in named.items() if value]
    return ", ".join(said) + (f" with {changes}" if changes else "")


NOTHING_SHARE = 0.001
"""The share of the peak below which a difference is rounding of blocks, not a saving."""


def saving(row: WhatIfRow) -> str:
    """A saving in words: `3.6 GiB`, `nothing`, or `costs 1.2 GiB` when the peak rises."""
    if abs(row.saved_bytes) < NOTHING_SHARE * row.before_bytes:
        return "nothing"
    if row.saved_bytes < 0:
        return f"costs {format_bytes(-row.saved_bytes)}"
    return format_bytes(row.saved_bytes) if row.saved_bytes else "nothing"


_NUM_GROUPS = 24
_NUM_LARGEST = 12
_MAX_RUNS = 40
"""Rows of the timeline's table: phases that alternate many times say nothing more one by one."""


def category_table(trace: StepTrace) -> Table:
    """Bytes by category at the peak, with bar and share; the last row is their sum."""
    at_peak, whole = trace.at_peak, max(trace.peak_bytes, 1)
    table = make_table(
        "At the peak, by category",
        STACK_ORDER,
        words("category", lambda category: Value(category.value, swatch=category.value), wraps=True),
        number("bytes", lambda category: size(at_peak[category])),
        number("share", lambda category: f"{at_peak[category] / whole:.1%}"),
        number("", lambda category: bar(category.value, at_peak[category] / whole)),
    )
    total = size(sum(at_peak.values()), Tone.STRONG)
    return table.with_row(Value("sum", tone=Tone.STRONG), total, "", bar("", 0.0))


def phase_table(trace: StepTrace) -> Table:
    """The highest allocated bytes of each phase; the peak's phase is marked."""
    peaks, whole = trace.phase_peaks(), max(trace.peak_bytes, 1)
    highest = trace.peak_phase if trace.peak_event >= 0 else None
    marked = Value(highest.value, tone=Tone.PEAK, badge="peak") if highest else Value("")
    return make_table(
        "Highest in each phase",
        peaks,
        words("phase", lambda phase: marked if phase is highest else phase.value, wraps=True),
        number("bytes", lambda phase: size(peaks[phase])),
        number("of the peak", lambda phase: f"{peaks[phase] / whole:.1%}"),
        number("", lambda phase: bar("peak" if phase is highest else "plain", peaks[phase] / whole)),
    )


def alive_table(trace: StepTrace, *, limit: int = _NUM_GROUPS) -> Table:
    """What is alive at the peak, equal tensors of equal layers together; rows sum to the peak."""
    groups, whole = group_alive(trace, trace.peak_event), max(trace.peak_bytes, 1)
    table = make_table(
        "Alive at the peak, equal layers together",
        groups[:limit],
        number("bytes", lambda group: size(group.bytes)),
        number("share", lambda group: f"{group.bytes / whole:.1%}", is_for_page=True),
        number("count", lambda group: f"{group.count:,}"),
        *_tensor_columns(),
        kind="wide",
    )
    if others := groups[limit:]:
        num_bytes, count = sum(group.bytes for group in others), sum(group.count for group in others)
        kinds = Value(f"{len(others)} smaller kinds", tone=Tone.QUIET)
        return table.with_row(size(num_bytes), f"{num_bytes / whole:.1%}", f"{count:,}", "", kinds, "")
    return table


def largest_table(trace: StepTrace, *, limit: int = _NUM_LARGEST) -> Table:
    """The largest single tensors alive at the peak, with where each comes from."""
    largest = largest_alive(trace, trace.peak_event, limit)
    num_bytes: Fill[Allocation] = number("bytes", lambda item: size(item.bytes))
    return make_table("Largest tensors at the peak", largest, num_bytes, *_tensor_columns(), kind="wide")


def _tensor_columns() -> tuple[Fill[AliveGroup | Allocation], ...]:
    return (
        words("category", lambda item: Value(item.category.value, swatch=item.category.value)),
        words("tensor", lambda item: f"{list(item.shape)} {item.dtype}"),
        # Module, op and line share a column, because as three they are unreadable in 80 characters.
        words(
            "made by",
            lambda item: Value(
                f"{item.module or '(outside the model)'} {item.op}".rstrip(), detail=item.source, is_code=True
            ),
            wraps=True,
        ),
    )


def comparison_table(predicted: StepTrace, observed: StepTrace) -> Table:
    """Predicted against observed: peaks, then the peak of each phase, then each category at the peak of its own trace."""
    return make_table(
        "Predicted against observed",
        compare_traces(predicted, observed).differences,
        words("", lambda row: row.what, wraps=True),
        number("predicted", lambda row: size(row.predicted_bytes)),
        number("observed", lambda row: size(row.observed_bytes)),
        number("error", lambda row: "" if row.error is None else f"{row.error:+.2%}"),
        kind="narrow",
    )


def what_if_table(techniques: Sequence[WhatIfRow]) -> Table:
    """What each technique would do to the peak, and on the page why."""
    tones = {0: Tone.QUIET, 1: Tone.GOOD, -1: Tone.BAD}
    known = [row for row in techniques if row.fits is not None]
    fits: Fill[WhatIfRow] = words("fits", _fits_value)
    hosted: Fill[WhatIfRow] = number("host", lambda row: "" if row.host_bytes is None else size(row.host_bytes))
    timed: Fill[WhatIfRow] = number("a step", lambda row: "" if row.step_s is None else format_seconds(row.step_s))
    return make_table(
        "What would lower the peak",
        techniques,
        words("technique", lambda row: Value(row.technique, tone=Tone.STRONG), wraps=True),
        number("before", lambda row: size(row.before_bytes), is_for_page=True),
        number("after", lambda row: size(row.after_bytes)),
        number("saves", lambda row: Value(saving(row), tone=tones[int(np.sign(row.saved_bytes))])),
        *(hosted,) * any(row.host_bytes is not None for row in techniques),
        *(timed,) * any(row.step_s is not None for row in techniques),
        *(fits,) * bool(known),
        words("because", lambda row: row.reason, is_for_page=True),
        kind="reasons",
    )


def _fits_value(row: WhatIfRow) -> Value:
    """By what the allocator holds, and the context."""
    return Value("yes", tone=Tone.GOOD) if row.fits else Value("no", tone=Tone.QUIET)


def timeline_table(trace: StepTrace) -> Table:
    """The timeline as a table: each phase's start, summit and end, by category."""
    rows = [
        (run.phase.value, instant, position)
        for run in phase_runs(trace)[:_MAX_RUNS]
        for instant, position in (("start", run.first), ("highest", run_peak(trace, run)), ("end", run.last))
    ]

    def column(category: Category) -> Fill[tuple[str, str, int]]:
        return number(category.value, lambda row: format_bytes(int(trace.stacked[category][row[2]])))

    return make_table(
        "The timeline as a table",
        rows,
        words("phase", lambda row: row[0]),
        words("instant", lambda row: row[1]),
        number("event", lambda row: f"{row[2]:,}"),
        number("allocated", lambda row: format_bytes(int(trace.curve[row[2]]))),
        *map(column, STACK_ORDER),
        kind="wide",
    )


def settings_table(trace: StepTrace) -> Table:
    """What the step ran under."""
    pairs: list[tuple[str, object]] = [
        ("model", trace.model),
        ("parameters", f"{format_count(trace.num_parameters)} ({trace.num_parameters:,})"),
        ("origin", trace.origin),
        *circumstances(trace),
        ("ops, events", f"{len(trace.ops):,}, {len(trace.events):,}"),
        *_flat(trace.settings),
    ]
    return make_table(
        "Settings", pairs, words("setting", lambda pair: pair[0]), words("value", lambda pair: str(pair[1]))
    )


def _flat(settings: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs
