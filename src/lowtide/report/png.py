"""The timeline as a figure for a paper, through matplotlib, which costs half a second: only who draws imports this.

It shows what the page shows: the stack by category, the phases, the peak with its name, the observation as a line. The
figure is made without pyplot, so that no global state, window or backend of the caller is touched.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from textwrap import shorten

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lowtide.errors import ConfigError
from lowtide.report.palette import COLOURS, INK, LINE, PEAK_COLOUR, QUIET, STACK_ORDER
from lowtide.report.phase_runs import Axis, aligned_positions, phase_axis, phase_runs
from lowtide.report.sampling import kept_positions
from lowtide.tracing.explanation.instant import instant_of
from lowtide.tracing.step_trace import StepTrace
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
    with figure_style():
        figure = Figure(figsize=(width_inches, 0.46 * width_inches), layout="constrained")
        FigureCanvasAgg(figure)
        _draw(figure.add_subplot(), trace, observed)
        figure.savefig(target, dpi=dots_per_inch)
    return target


def figure_style() -> AbstractContextManager[None]:
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
        _draw_observed(axes, observed, trace, axis, factor)
    _draw_phases(axes, trace, axis)
    top = 1.27 * highest / factor  # room for the name of the peak
    _draw_peak(axes, trace, axis, factor, top)
    axes.set_xlim(0, end)
    axes.set_ylim(0, top)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel(f"allocated ({unit})")
    axes.grid(axis="y", color=LINE, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(color=QUIET, labelcolor=QUIET, width=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_linewidth(0.6)
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


def _draw_observed(axes: Axes, observed: StepTrace, onto: StepTrace, axis: Axis, factor: int) -> None:
    positions = kept_positions(observed)
    places = axis.place(aligned_positions(observed, onto)[positions])
    values: npt.NDArray[np.float64] = observed.curve[positions] / factor
    axes.step(places, values, where="post", color="white", linewidth=2.2, alpha=0.75)
    axes.step(places, values, where="post", color=INK, linewidth=0.9, label="observed")


def _draw_phases(axes: Axes, trace: StepTrace, axis: Axis) -> None:
    edges = axis.places
    axes.set_xticks([])
    for index, run in enumerate(phase_runs(trace)):
        left, right = edges[index], edges[index + 1]
        if index % 2:
            axes.axvspan(left, right, color=INK, alpha=0.045, linewidth=0, zorder=0)
        # A phase too narrow for its name goes without; the caption of a figure can say it.
        if right - left >= 0.02 * edges[-1] * len(run.phase.value) / 2:
            axes.text(
                (left + right) / 2, -0.035, run.phase.value, transform=axes.get_xaxis_transform(), ha="center", va="top"
            )


def _draw_peak(axes: Axes, trace: StepTrace, axis: Axis, factor: int, top: float) -> None:
    place = float(axis.place(trace.peak_event + 1))
    height, moment = trace.peak_bytes / factor, instant_of(trace, trace.peak_event)
    phase = f" in {moment.phase.value}" if moment.phase else ""
    on_left = place > 0.6 * axis.places[-1]
    # The name stands above every curve, beside a line that leads down to the peak.
    axes.plot([place, place], [height, top], color=PEAK_COLOUR, linewidth=0.8)
    axes.annotate(
        f"peak {format_bytes(trace.peak_bytes)}{phase}\n{shorten(moment.place, 72, placeholder=' …')}",
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
