"""What a report says about a trace, as facts and tables: where the peak is, what it is made of, whether it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lowtide.planning.what_if import WhatIfRow
from lowtide.report.palette import STACK_ORDER
from lowtide.report.table import Cell, Table, Tone, Value, bar, make_table, number, size, words
from lowtide.report.timeline import phase_runs, run_peak
from lowtide.tracing.explanation.compare import compare
from lowtide.tracing.explanation.instant import AliveGroup, group_alive, largest_alive
from lowtide.tracing.step_trace import Allocation, StepTrace
from lowtide.units import format_bytes, format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What the step needs of the device against what the device has."""

    needed_bytes: int
    """Peak of reserved memory and the context beside it."""
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
_SHARE = replace(number("share"), is_for_page=True)
_BARS = number("")
_TENSOR_COLUMNS = (words("category"), words("tensor"), words("made by", wraps=True))


def category_table(trace: StepTrace) -> Table:
    """Bytes by category at the peak, with bar and share; the last row is their sum."""
    at_peak, whole = trace.at_peak, max(trace.peak_bytes, 1)
    rows: list[list[Cell | str]] = [
        [
            Value(category.value, swatch=category.value),
            size(at_peak[category]),
            f"{at_peak[category] / whole:.1%}",
            bar(category.value, at_peak[category] / whole),
        ]
        for category in STACK_ORDER
    ]
    rows.append([Value("sum", tone=Tone.STRONG), size(sum(at_peak.values()), Tone.STRONG), "", bar("", 0.0)])
    columns = (words("category", wraps=True), number("bytes"), number("share"), _BARS)
    return make_table("At the peak, by category", columns, rows)


def phase_table(trace: StepTrace) -> Table:
    """The highest allocated bytes of each phase; the peak's phase is marked."""
    whole = max(trace.peak_bytes, 1)
    rows: list[list[Cell | str]] = []
    for phase, num_bytes in trace.phase_peaks().items():
        at_peak = trace.peak_event >= 0 and phase is trace.peak_phase
        name = Value(phase.value, tone=Tone.PEAK, badge="peak") if at_peak else Value(phase.value)
        share = num_bytes / whole
        rows.append([name, size(num_bytes), f"{share:.1%}", bar("peak" if at_peak else "plain", share)])
    columns = (words("phase", wraps=True), number("bytes"), number("of the peak"), _BARS)
    return make_table("Highest in each phase", columns, rows)


def alive_table(trace: StepTrace, *, limit: int = _NUM_GROUPS) -> Table:
    """What is alive at the peak, equal tensors of equal layers together; rows sum to the peak."""
    groups, whole = group_alive(trace, trace.peak_event), max(trace.peak_bytes, 1)
    rows: list[list[Cell | str]] = [
        [size(group.bytes), f"{group.bytes / whole:.1%}", f"{group.count:,}", *_tensor(group)]
        for group in groups[:limit]
    ]
    if rest := groups[limit:]:
        num_bytes, count = sum(group.bytes for group in rest), sum(group.count for group in rest)
        kinds = Value(f"{len(rest)} smaller kinds", tone=Tone.QUIET)
        rows.append([size(num_bytes), f"{num_bytes / whole:.1%}", f"{count:,}", "", kinds, ""])
    columns = (number("bytes"), _SHARE, number("count"), *_TENSOR_COLUMNS)
    return make_table("Alive at the peak, equal layers together", columns, rows, kind="wide")


def largest_table(trace: StepTrace, *, limit: int = _NUM_LARGEST) -> Table:
    """The largest single tensors alive at the peak, with where each comes from."""
    rows = [[size(item.bytes), *_tensor(item)] for item in largest_alive(trace, trace.peak_event, limit)]
    return make_table("Largest tensors at the peak", (number("bytes"), *_TENSOR_COLUMNS), rows, kind="wide")


def comparison_table(predicted: StepTrace, observed: StepTrace) -> Table:
    """Predicted against observed: peaks, then the peak of each phase, then each category at the peak of its own trace."""
    rows: list[list[Cell | str]] = [
        [
            row.what,
            size(row.predicted_bytes),
            size(row.observed_bytes),
            "" if row.error is None else f"{row.error:+.2%}",
        ]
        for row in compare(predicted, observed).differences
    ]
    columns = (words("", wraps=True), number("predicted"), number("observed"), number("error"))
    return make_table("Predicted against observed", columns, rows, kind="narrow")


def what_if_table(techniques: Sequence[WhatIfRow]) -> Table:
    """What each technique would do to the peak, and on the page why."""
    rows: list[list[Cell | str]] = [
        [
            Value(row.technique, tone=Tone.STRONG),
            size(row.before_bytes),
            size(row.after_bytes),
            Value(saving(row), tone=_tone(row)),
            row.reason,
        ]
        for row in techniques
    ]
    because = replace(words("because"), is_for_page=True)
    columns = (words("technique", wraps=True), number("before"), number("after"), number("saves"), because)
    return make_table("What would lower the peak", columns, rows, kind="reasons")


def timeline_table(trace: StepTrace) -> Table:
    """The timeline as a table: each phase's start, summit and end, by category."""
    rows: list[list[Cell | str]] = []
    for run in phase_runs(trace)[:_MAX_RUNS]:
        for instant, position in (("start", run.first), ("highest", run_peak(trace, run)), ("end", run.last)):
            sizes = [format_bytes(int(trace.stacked[category][position])) for category in STACK_ORDER]
            total = format_bytes(int(trace.curve[position]))
            rows.append([run.phase.value, instant, f"{position:,}", total, *sizes])
    columns = (words("phase"), words("instant"), number("event"), number("allocated"))
    by_category = (number(category.value) for category in STACK_ORDER)
    return make_table("The timeline as a table", (*columns, *by_category), rows, kind="wide")


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
    return make_table("Settings", (words("setting"), words("value")), [[name, str(value)] for name, value in pairs])


def _tensor(item: AliveGroup | Allocation) -> list[Cell | str]:
    # Module, op and line share a column, because as three they are unreadable in 80 characters.
    return [
        Value(item.category.value, swatch=item.category.value),
        f"{list(item.shape)} {item.dtype}",
        Value(f"{item.module or '(outside the model)'} {item.op}".rstrip(), detail=item.source, is_code=True),
    ]


def _tone(row: WhatIfRow) -> Tone:
    if row.saved_bytes == 0:
        return Tone.QUIET
    return Tone.GOOD if row.saved_bytes > 0 else Tone.BAD


def _flat(settings: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs
