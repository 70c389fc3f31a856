"""Figures for papers, drawn by matplotlib: the timeline of a step, and comparisons of runs.

They show what the page shows. matplotlib costs half a second, so that this module, the only one that imports it, is itself
imported where something is drawn. Figures are made without pyplot: no global state, window or backend of the caller is
touched.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import count, pairwise
from pathlib import Path
from textwrap import fill, shorten
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.path import Path as Path2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from lowtide.errors import ConfigError
from lowtide.report.charts import Panel, Scatter, StepCurve, cut_name
from lowtide.report.palette import COLOURS, INK, LINE, PEAK_COLOUR, QUIET, STACK_ORDER
from lowtide.report.timeline import Axis, aligned_positions, kept_positions, phase_axis, phase_runs
from lowtide.tracing.explanation.instant import instant_of
from lowtide.tracing.step_trace import Category, StepTrace
from lowtide.units import GiB, KiB, MiB, TiB, format_bytes

_SUFFIXES = (".png", ".pdf", ".svg")


def save_png(
    trace: StepTrace,
    path: str | os.PathLike[str],
    observed: StepTrace | None = None,
    *,
    width_inches: float = 6.75,
    dots_per_inch: int = 300,
) -> Path:
    """Draw a trace, with an observation of the same step as a line over it, and return the path.

    Args:
        trace: The stack.
        path: Where to write; `.pdf` and `.svg` are drawn as vectors, `.png` as pixels.
        observed: A second trace of the same step, aligned to the first by phase.
        width_inches: Width of the figure; the default is the text width of most two-column papers.
        dots_per_inch: Resolution of a `.png`.

    Raises:
        ConfigError: The suffix of `path` names no format that can be drawn.
    """
    target = figure_path(path)
    with _figure_style():
        figure = Figure(figsize=(width_inches, 0.46 * width_inches), layout="constrained")
        FigureCanvasAgg(figure)
        _draw(figure.add_subplot(), trace, observed)
        figure.savefig(target, dpi=dots_per_inch)
    return target


def _figure_style() -> AbstractContextManager[None]:
    """What all our figures are set in, while it is entered."""
    # Types 42 and none keep text as text in vector files, so that it can be searched and restyled.
    return rc_context({"font.family": "sans-serif", "font.size": 8.0, "pdf.fonttype": 42, "svg.fonttype": "none"})


def figure_path(path: str | os.PathLike[str]) -> Path:
    """Where a figure can be written: the folder is there, and the name says a format.

    Raises:
        ConfigError: The suffix of `path` names no format that can be drawn.
    """
    target = Path(path)
    if target.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"cannot draw a figure as {target.name!r}; name it with one of {', '.join(_SUFFIXES)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _draw(axes: Axes, trace: StepTrace, observed: StepTrace | None) -> None:
    axis, end = phase_axis(trace), max(len(trace.events), 1)
    positions = kept_positions(trace)
    places = axis.place(positions)
    highest = max(trace.peak_bytes, observed.peak_bytes if observed else 0, 1)
    unit, factor = next(((name, size) for name, size in _UNITS if highest >= size), ("B", 1))
    heights = [trace.stacked[category][positions] / factor for category in STACK_ORDER]
    axes.stackplot(
        places,
        *heights,
        colors=[COLOURS[category] for category in STACK_ORDER],
        labels=[category.value for category in STACK_ORDER],
        step="post",
        linewidth=0,
    )
    if observed is not None:
        seen = kept_positions(observed)
        line = axis.place(aligned_positions(observed, trace)[seen]), observed.curve[seen] / factor
        axes.step(*line, where="post", color="white", linewidth=2.2, alpha=0.75)
        axes.step(*line, where="post", color=INK, linewidth=0.9, label="observed")
    for index, (run, (left, right)) in enumerate(zip(phase_runs(trace), pairwise(axis.places), strict=True)):
        # A phase too narrow for its name goes without; the caption of a figure can say it.
        fits = right - left >= 0.02 * axis.places[-1] * len(run.phase.value) / 2
        _draw_phase(axes, run.phase.value if fits else "", left, right, is_banded=bool(index % 2))
    top = 1.27 * highest / factor  # room for the name of the peak
    _draw_peak(axes, trace, axis, factor, top)
    axes.set_xlim(0, end)
    axes.set_ylim(0, top)
    axes.yaxis.set_major_locator(_round_steps(5))
    axes.yaxis.set_major_formatter(_plain_numbers())
    axes.set_ylabel(f"allocated ({unit})")
    axes.grid(axis="y", color=LINE, linewidth=0.5)
    _set_back(axes)
    handles, labels = axes.get_legend_handles_labels()
    shown = [index for index, label in enumerate(labels) if label == "observed" or any(heights[index])]
    axes.legend(
        [handles[index] for index in shown],
        [labels[index] for index in shown],
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=len(shown),
        frameon=False,
        handlelength=1.0,
        handletextpad=0.5,
        columnspacing=1.4,
    )


_UNITS = (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB))


def _draw_peak(axes: Axes, trace: StepTrace, axis: Axis, factor: int, top: float) -> None:
    place = float(axis.place(trace.peak_event + 1))
    height, instant = trace.peak_bytes / factor, instant_of(trace, trace.peak_event)
    phase = f" in {instant.phase.value}" if instant.phase else ""
    on_left = place > 0.6 * axis.places[-1]
    # The name stands above every curve, beside a line that leads down to the peak.
    axes.plot([place, place], [height, top], color=PEAK_COLOUR, linewidth=0.8)
    axes.annotate(
        f"peak {format_bytes(trace.peak_bytes)}{phase}\n{shorten(instant.place, 72, placeholder=' …')}",
        xy=(place, top),
        xytext=(-4 if on_left else 4, 0),
        textcoords="offset points",
        ha="right" if on_left else "left",
        va="top",
        color=PEAK_COLOUR,
        parse_math=False,  # a "$" in a name is a "$"
    )
    axes.plot(
        [place], [height], marker="o", markersize=3.5, color=PEAK_COLOUR, markeredgecolor="white", markeredgewidth=0.6
    )


def save_panels(panels: Sequence[Panel], path: str | os.PathLike[str], *, title: str) -> Path:
    """Draw comparisons below each other, a scatter chart and the steps of each, and return the path.

    Raises:
        ConfigError: The suffix of `path` names no format that can be drawn.
    """
    target = figure_path(path)
    heights = [_panel_height(panel) for panel in panels]
    with _figure_style():
        figure = Figure(figsize=(_WIDTH, 0.5 + sum(heights)), dpi=160, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.02, ha="left", fontsize=13, weight="bold", color=INK, parse_math=False)
        parts = figure.subfigures(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
        scatters = [_draw_panel(part, panel) for part, panel in zip(parts, panels, strict=True)]
        # Names are placed where the marks have come to lie, and nothing may move afterwards.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for axes, panel in zip(scatters, panels, strict=True):
            if axes is not None and panel.scatter is not None:
                _draw_names(figure, axes, panel.scatter)
        figure.savefig(target)
    return target


_WIDTH, _SCATTER_HEIGHT, _STEP_HEIGHT, _NUM_COLUMNS = 10.0, 5.6, 1.7, 4
_BEST, _OURS, _THEIRS = COLOURS[Category.WEIGHTS], "#7b8592", "#b8720a"
_MARK_STYLES: dict[str, dict[str, Any]] = {
    "published": {"label": "published", "markerfacecolor": "white", "markeredgecolor": _THEIRS, "markeredgewidth": 1.2},
    "ours": {"label": "measured", "color": _OURS, "markeredgecolor": "white", "markeredgewidth": 0.6},
    "on-front": {"label": "measured, on the front", "color": _BEST, "markeredgecolor": "white", "markeredgewidth": 0.6},
}


def _panel_height(panel: Panel) -> float:
    rows = -(-len(panel.steps) // _NUM_COLUMNS)
    return (_SCATTER_HEIGHT if panel.scatter else 0.9) + _STEP_HEIGHT * rows


def _draw_panel(part: SubFigure, panel: Panel) -> Axes | None:
    part.suptitle(panel.title, x=0.02, ha="left", fontsize=10, color=QUIET, parse_math=False)
    rows = -(-len(panel.steps) // _NUM_COLUMNS)
    heights = [_SCATTER_HEIGHT if panel.scatter else 0.5, *([_STEP_HEIGHT * rows] if rows else [])]
    parts = part.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    axes = None
    if panel.scatter is None:
        parts[0].text(0.02, 0.5, "No finished row has both a peak and a speed.", color=INK)
    else:
        axes = parts[0].subplots()
        _draw_scatter(axes, panel.scatter)
    if rows:
        for place, index in zip(parts[1].subplots(rows, _NUM_COLUMNS, squeeze=False).flat, count()):
            if index < len(panel.steps):
                _draw_step(place, panel.steps[index])
            else:
                place.set_visible(False)
    return axes


def _draw_scatter(axes: Axes, scatter: Scatter) -> None:
    axes.set_xscale("log" if scatter.x.is_log else "linear")
    axes.set_yscale("log" if scatter.y.is_log else "linear")
    axes.set_xlim(scatter.x.low, scatter.x.high)
    axes.set_ylim(scatter.y.low, scatter.y.high)
    for axis, values in ((axes.xaxis, scatter.x), (axes.yaxis, scatter.y)):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)) if values.is_log else _round_steps(8))
        axis.set_major_formatter(_plain_numbers())
        axis.set_minor_locator(NullLocator())
    notes = fill(" ".join(scatter.notes), 150)
    axes.set_xlabel(f"{scatter.x_name}\n{notes}" if notes else scatter.x_name, fontsize=8, parse_math=False)
    axes.set_ylabel(scatter.y_name)
    axes.grid(color=LINE, linewidth=0.5)
    _set_back(axes)
    if len(scatter.front) > 1:  # one point has no line, and its legend would explain what is not there
        corners = list(zip(*scatter.front, strict=True))
        axes.plot(*corners, color=_BEST, linewidth=1.0, alpha=0.7, label="front: no other is as small and as fast")
    for mark in scatter.marks:
        if mark.belongs_to is not None:
            own = scatter.marks[mark.belongs_to]
            ends = ([own.x, mark.x], [own.y, mark.y])
            axes.plot(*ends, color=_THEIRS, linewidth=0.6, alpha=0.45, linestyle=(0, (2, 3)))
    for order, (kind, style) in enumerate(_MARK_STYLES.items()):
        marks = [mark for mark in scatter.marks if mark.kind == kind]
        if marks:
            places = ([mark.x for mark in marks], [mark.y for mark in marks])
            axes.plot(*places, linestyle="none", marker="o", markersize=5.5, zorder=3 + order, **style)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=4, frameon=False, handlelength=1.2, borderpad=0.2)


def _draw_names(figure: Figure, axes: Axes, scatter: Scatter) -> None:
    """Names of marks, off each other, off all marks and, where possible, off the front."""
    radius, frame = 3.5 * figure.dpi / 72, axes.get_window_extent()
    places = axes.transData.transform([(mark.x, mark.y) for mark in scatter.marks])
    taken = [Bbox.from_bounds(x - radius, y - radius, 2 * radius, 2 * radius) for x, y in places]
    line = Path2D(axes.transData.transform(scatter.front)) if len(scatter.front) > 1 else None
    named = [index for index, mark in enumerate(scatter.marks) if mark.belongs_to is None]
    crowded = {index: sum(np.hypot(*(places - places[index]).T) < 0.12 * frame.width) for index in named}
    for index in sorted(named, key=lambda index: -crowded[index]):
        mark = scatter.marks[index]
        text = axes.annotate(
            cut_name(mark.name),
            (mark.x, mark.y),
            xytext=(0, 0),
            textcoords="offset pixels",
            color=INK,
            weight="bold" if mark.kind == "on-front" else "normal",
            annotation_clip=False,
            parse_math=False,  # a "$" in a name is a "$"
            zorder=6,
        )
        size = text.get_window_extent()
        box = _free_box(index, places, (size.width, size.height), radius, frame, taken, line)
        taken.append(box.padded(0.3 * size.height, 0.0))
        text.set_position((box.x0 - places[index][0], box.y0 - places[index][1]))
        end = np.clip(places[index], box.min, box.max)
        if np.hypot(*(end - places[index])) > 3.5 * radius:
            ends = axes.transData.inverted().transform([places[index], end])
            axes.plot(ends[:, 0], ends[:, 1], color=QUIET, linewidth=0.5, zorder=2)


def _free_box(
    index: int,
    places: npt.NDArray[np.float64],
    size: tuple[float, float],
    radius: float,
    frame: Bbox,
    taken: Sequence[Bbox],
    line: Path2D | None,
) -> Bbox:
    """The place of a name that is nearest to its mark and free; the least bad one where none is."""
    place, (width, height), best, least = places[index], size, Bbox.null(), math.inf
    distance = 1.6 * radius
    while distance < min(least, frame.width):
        for turn in range(16):
            angle = math.pi * turn / 8
            x = place[0] + math.cos(angle) * (distance + width / 2)
            y = place[1] + math.sin(angle) * (distance + height / 2)
            box = Bbox.from_bounds(x - width / 2, y - height / 2, width, height)
            is_out = not (frame.containsx(box.x0) and frame.containsx(box.x1))
            is_out |= not (frame.containsy(box.y0) and frame.containsy(box.y1))
            apart = np.hypot(*(np.clip(places, box.min, box.max) - places).T)
            mistaken = int((apart < apart[index]).sum())
            crossed = line is not None and line.intersects_bbox(box, filled=False)
            # To the right of its mark a name reads as belonging to it; to the left is the next best.
            cost = distance + radius * {0: 0.0, 8: 0.2}.get(turn, 0.6) + radius * (8 * crossed + 3 * mistaken)
            cost += 1e4 * box.count_overlaps(taken) + 1e6 * is_out
            if cost < least:
                best, least = box, cost
        distance *= 1.18
    return best


def _draw_step(axes: Axes, curve: StepCurve) -> None:
    edges = np.linspace(0.0, 1.0, len(curve.points) + 1)
    axes.stairs(curve.points, edges, fill=True, color=_BEST, alpha=0.3)
    axes.stairs(curve.points, edges, color=_BEST, linewidth=0.9, baseline=None)
    for index, (phase, start, end) in enumerate(curve.spans):
        # A phase too narrow for its name goes without.
        _draw_phase(axes, phase if end - start >= 0.035 * len(phase) else "", start, end, is_banded=bool(index % 2))
    if curve.predicted is not None:
        axes.axhline(curve.predicted, color=PEAK_COLOUR, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.plot((edges[curve.peak] + edges[curve.peak + 1]) / 2, max(curve.points), "o", ms=3.2, color=PEAK_COLOUR)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.1 * curve.top)
    axes.yaxis.set_major_locator(_round_steps(4))
    axes.yaxis.set_major_formatter(_plain_numbers())
    _set_back(axes)
    name = axes.set_title(cut_name(curve.name, 26), loc="left", fontsize=8, weight="bold", color=INK, pad=14)
    name.set_parse_math(False)
    axes.text(0, 1.03, curve.words, transform=axes.transAxes, fontsize=6.5, color=QUIET, parse_math=False)


def _draw_phase(axes: Axes, name: str, left: float, right: float, *, is_banded: bool) -> None:
    axes.set_xticks([])
    if is_banded:
        axes.axvspan(left, right, color=INK, alpha=0.045, linewidth=0, zorder=0)
    axes.text((left + right) / 2, -0.035, name, transform=axes.get_xaxis_transform(), ha="center", va="top")


def _round_steps(most: int) -> MaxNLocator:
    return MaxNLocator(nbins=most, steps=[1, 2, 5, 10])


def _plain_numbers() -> FuncFormatter:
    return FuncFormatter(lambda value, _: f"{value:,g}")


def _set_back(axes: Axes) -> None:
    """Ticks and frame stand back behind what is drawn."""
    axes.set_axisbelow(True)
    axes.tick_params(color=QUIET, labelcolor=QUIET, width=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_linewidth(0.6)
