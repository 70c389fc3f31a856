"""The report as one picture: memory against speed, and the step of each row below it.

Panels are placed by hand, in inches, because names can only be kept off each other where the places of the marks are
known before anything is drawn. matplotlib costs half a second: only who draws imports this.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from lowtide.lab.report.axis import Axis, tick_text
from lowtide.lab.report.byte_unit import ByteUnit, unit_for
from lowtide.lab.report.comparison import Comparison
from lowtide.lab.report.labels import Box, Line, Point, cut_name, place_labels
from lowtide.lab.report.scatter import Mark, Scatter, scatter_of
from lowtide.lab.report.timeline import RowTimeline, timeline_of
from lowtide.report.palette import COLOURS, INK, LINE, PEAK_COLOUR, QUIET
from lowtide.report.png import figure_path, figure_style
from lowtide.tracing.step_trace import Category

_WIDTH = 10.0
_MARGIN, _RIGHT_MARGIN = 0.6, 0.25
_SCATTER_HEIGHT, _SCATTER_ABOVE, _SCATTER_BELOW, _NOTE_HEIGHT = 4.6, 0.6, 0.55, 0.15
_STEP_HEIGHT, _STEP_ABOVE, _STEP_BELOW = 1.05, 0.45, 0.25
_COLUMNS = 4
_BEST, _OURS, _THEIRS = COLOURS[Category.WEIGHTS], "#7b8592", "#b8720a"
_DPI = 160


def save_report_png(comparisons: Sequence[Comparison], path: Path, *, title: str) -> Path:
    """Draw all comparisons below each other, and return the path.

    Raises:
        ConfigError: The suffix of `path` names no format that can be drawn.
    """
    target = figure_path(path)
    panels = [_Panel(comparison) for comparison in comparisons]
    height = 0.4 + sum(panel.height for panel in panels)
    with figure_style():
        figure = Figure(figsize=(_WIDTH, height), dpi=_DPI)
        FigureCanvasAgg(figure)
        figure.text(_MARGIN / _WIDTH, 1 - 0.3 / height, title, fontsize=13, weight="bold", color=INK, parse_math=False)
        top = height - 0.4
        for panel in panels:
            panel.draw(figure, top, height)
            top -= panel.height
        figure.savefig(target, dpi=_DPI)
    return target


class _Panel:
    """One comparison in the picture."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._scatter = scatter_of(comparison)
        self._timelines = [each for row in comparison.rows if (each := timeline_of(row)) is not None]
        self._notes = fill(" ".join(self._scatter.notes), 170) if self._scatter else ""
        self._step_rows = -(-len(self._timelines) // _COLUMNS)

    @property
    def _note_lines(self) -> int:
        return self._notes.count("\n") + 1 if self._notes else 0

    @property
    def height(self) -> float:
        """In inches."""
        scatter = _SCATTER_HEIGHT + _SCATTER_BELOW + _NOTE_HEIGHT * self._note_lines if self._scatter else 0.3
        return _SCATTER_ABOVE + scatter + self._step_rows * (_STEP_ABOVE + _STEP_HEIGHT + _STEP_BELOW) + 0.1

    def draw(self, figure: Figure, top: float, whole: float) -> None:
        """Into the figure, from this height in inches downwards."""
        figure.text(
            _MARGIN / _WIDTH, (top - 0.18) / whole, self._comparison.title, fontsize=10, color=QUIET, parse_math=False
        )
        top -= _SCATTER_ABOVE
        width = _WIDTH - _MARGIN - _RIGHT_MARGIN
        if self._scatter is None:
            words = "No finished row has both a peak and a speed."
            figure.text(_MARGIN / _WIDTH, top / whole, words, color=INK)
            top -= 0.3
        else:
            axes = figure.add_axes(_share(_MARGIN, top - _SCATTER_HEIGHT, width, _SCATTER_HEIGHT, whole))
            _draw_scatter(figure, axes, self._scatter)
            top -= _SCATTER_HEIGHT + _SCATTER_BELOW
            figure.text(
                _MARGIN / _WIDTH,
                (top + 0.05) / whole,
                self._notes,
                fontsize=7,
                color=QUIET,
                va="top",
                linespacing=1.4,
                parse_math=False,
            )
            top -= _NOTE_HEIGHT * self._note_lines
        unit, each = unit_for(self._comparison.rows), width / _COLUMNS
        for index, timeline in enumerate(self._timelines):
            row, column = divmod(index, _COLUMNS)
            bottom = top - (row + 1) * (_STEP_ABOVE + _STEP_HEIGHT) - row * _STEP_BELOW
            place = _share(_MARGIN + column * each, bottom, each - 0.35, _STEP_HEIGHT, whole)
            _draw_step(figure.add_axes(place), timeline, unit)


def _share(left: float, bottom: float, width: float, height: float, whole: float) -> tuple[float, float, float, float]:
    return left / _WIDTH, bottom / whole, width / _WIDTH, height / whole


def _draw_scatter(figure: Figure, axes: Axes, scatter: Scatter) -> None:
    _set_axis(axes, scatter.speed, is_across=True)
    _set_axis(axes, scatter.memory, is_across=False)
    axes.set_xlabel(scatter.speed_words)
    axes.set_ylabel(f"peak ({scatter.unit.name})")
    axes.grid(color=LINE, linewidth=0.5)
    _plain(axes)
    if len(scatter.front) > 1:  # one point has no line, and its legend would explain what is not there
        axes.plot(
            [x for x, _ in scatter.front],
            [y for _, y in scatter.front],
            color=_BEST,
            linewidth=1.0,
            alpha=0.7,
            label="front: no other is as small and as fast",
        )
    ours = {id(mark.row): mark for mark in scatter.marks}
    nameless = [mark for mark in scatter.published if id(mark.row) in ours]
    for mark in nameless:
        own = ours[id(mark.row)]
        ends = ([own.samples_per_s, mark.samples_per_s], [own.memory, mark.memory])
        axes.plot(*ends, color=_THEIRS, linewidth=0.6, alpha=0.45, linestyle=(0, (2, 3)))
    hollow = {"markerfacecolor": "white", "markeredgecolor": _THEIRS, "markeredgewidth": 1.2}
    _draw_marks(axes, scatter.published, "published", zorder=3, **hollow)
    beaten = [mark for mark in scatter.marks if not mark.is_on_front]
    front = [mark for mark in scatter.marks if mark.is_on_front]
    _draw_marks(axes, beaten, "measured", zorder=4, color=_OURS, markeredgecolor="white", markeredgewidth=0.6)
    _draw_marks(
        axes, front, "measured, on the front", zorder=5, color=_BEST, markeredgecolor="white", markeredgewidth=0.6
    )
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=4, frameon=False, handlelength=1.2, borderpad=0.2)
    named = [*scatter.marks, *(mark for mark in scatter.published if id(mark.row) not in ours)]
    lines = [*pairwise(scatter.front), *((_values(ours[id(mark.row)]), _values(mark)) for mark in nameless)]
    _draw_names(figure, axes, named, [_values(mark) for mark in nameless], lines)


def _draw_marks(axes: Axes, marks: Sequence[Mark], label: str, *, zorder: int, **style: object) -> None:
    if marks:
        axes.plot(
            [mark.samples_per_s for mark in marks],
            [mark.memory for mark in marks],
            linestyle="none",
            marker="o",
            markersize=5.5,
            label=label,
            zorder=zorder,
            **style,  # type: ignore[arg-type]
        )


def _draw_names(
    figure: Figure, axes: Axes, named: Sequence[Mark], nameless: Sequence[Point], lines: Sequence[Line]
) -> None:
    """Names of marks, off each other, off other marks and, where possible, off lines."""
    tall = figure.bbox.height
    texts = [
        axes.text(
            0,
            0,
            cut_name(mark.row.label),
            color=INK,
            weight="bold" if mark.is_on_front else "normal",
            va="bottom",
            parse_math=False,  # a "$" in a name is a "$"
            zorder=6,
        )
        for mark in named
    ]
    extents = [text.get_window_extent() for text in texts]

    def pixel(place: Point) -> Point:
        # With y downwards, as `place_labels` has it.
        x, y = axes.transData.transform(place)
        return float(x), tall - float(y)

    radius, frame = 3.5 * figure.dpi / 72, axes.get_window_extent()
    labels = place_labels(
        [pixel(_values(mark)) for mark in named],
        [(extent.width, extent.height) for extent in extents],
        bounds=Box(frame.x0 + 2, tall - frame.y1, frame.x1, tall - frame.y0),
        radius=radius,
        obstacles=[Box.around(pixel(place), radius) for place in nameless],
        lines=[(pixel(start), pixel(end)) for start, end in lines],
    )
    back = axes.transData.inverted()
    for text, label in zip(texts, labels, strict=True):
        x, y = back.transform((label.box.left, tall - label.box.bottom))
        text.set_position((float(x), float(y)))
        if label.leader is not None:
            ends = back.transform([(x, tall - y) for x, y in label.leader])
            axes.plot(ends[:, 0], ends[:, 1], color=QUIET, linewidth=0.5, zorder=2)


def _values(mark: Mark) -> Point:
    return mark.samples_per_s, mark.memory


def _set_axis(axes: Axes, axis: Axis, *, is_across: bool) -> None:
    scale = "log" if axis.is_log else "linear"
    if is_across:
        axes.set_xscale(scale)
        axes.set_xlim(axis.low, axis.high)
    else:
        axes.set_yscale(scale)
        axes.set_ylim(axis.low, axis.high)
    one = axes.xaxis if is_across else axes.yaxis
    one.set_major_locator(FixedLocator(axis.ticks(9)))
    one.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
    one.set_minor_locator(NullLocator())


def _draw_step(axes: Axes, timeline: RowTimeline, unit: ByteUnit) -> None:
    count = len(timeline.points)
    edges = [index / count for index in range(count + 1)]
    heights = [num_bytes / unit.num_bytes for num_bytes in timeline.points]
    axes.stairs(heights, edges, fill=True, color=_BEST, alpha=0.3)
    axes.stairs(heights, edges, color=_BEST, linewidth=0.9, baseline=None)
    for index, span in enumerate(timeline.spans):
        if index % 2:
            axes.axvspan(span.start, span.end, color=INK, alpha=0.045, linewidth=0, zorder=0)
        # A phase too narrow for its name goes without.
        if span.end - span.start >= 0.035 * len(span.phase):
            axes.text(
                (span.start + span.end) / 2,
                -0.05,
                span.phase,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize=6.5,
                color=QUIET,
            )
    words = f"{unit.text(max(timeline.points))} {unit.name}"
    if timeline.predicted_bytes is not None:
        axes.axhline(timeline.predicted_bytes / unit.num_bytes, color=PEAK_COLOUR, linewidth=0.8, linestyle=(0, (4, 3)))
        words += f", predicted {unit.text(timeline.predicted_bytes)}"
    axes.plot([(timeline.peak_index + 0.5) / count], [max(heights)], marker="o", markersize=3.2, color=PEAK_COLOUR)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.1 * timeline.top_bytes / unit.num_bytes)
    axes.set_xticks([])
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
    _plain(axes)
    above = axes.transAxes
    axes.text(
        0,
        1.2,
        cut_name(timeline.row.label, 26),
        transform=above,
        weight="bold",
        color=INK,
        va="bottom",
        parse_math=False,
    )
    axes.text(0, 1.05, words, transform=above, fontsize=6.5, color=QUIET, va="bottom")


def _plain(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.tick_params(color=QUIET, labelcolor=QUIET, width=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_linewidth(0.6)
