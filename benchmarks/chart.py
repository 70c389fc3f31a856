"""The README's chart: time of a step against device memory, Lowtide beside plain torch and the peers.

Drawn from the records behind the tables by `python -m benchmarks.render`. What it shows stands in the file's own
description, by which a test and `--check` tell whether the drawing is out of date, whatever drew it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.optim.tables import own_and_peers, shares_of
from lowtide.units import GiB

OWN, PEER, PLAIN = "#0b5fa5", "#b3541e", "#555555"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured way to take a step."""

    label: str
    """What stands beside it; empty for the points of a curve."""
    color: str
    offset: tuple[float, float]
    """The label's distance from the point, in points; to the left where negative."""
    reserved_gib: float
    allocated_gib: float
    times: float
    """Time of a step over that of forward and backward alone, in the same run."""
    record: str


_LABELS: dict[str, tuple[str, str, tuple[float, float]]] = {
    "plain torch, fused AdamW, all bf16": ("plain torch, everything on the device, all bf16", PLAIN, (0, 11)),
    "streamed, on the host in backward, exact": ("Lowtide, all streamed", OWN, (0, -18)),
    "streamed, on the host deferred, exact, clipped": (
        "Lowtide, all streamed, clipped after the backward",
        OWN,
        (9, 0),
    ),
    "DeepSpeed ZeRO-3, all on the host, clipped": ("DeepSpeed ZeRO-3, clipped", PEER, (9, 0)),
    "FSDP2, CPUOffloadPolicy, fp32 master": ("FSDP2 CPUOffloadPolicy", PEER, (9, 0)),
    "torchao CPUOffloadOptimizer, all bf16": ("torchao CPUOffloadOptimizer, all bf16", PEER, (9, 0)),
}


def points(results: Path) -> tuple[list[Point], list[Point]]:
    """Single points, and the curve of shares that the host updates, with resident weights."""
    single = [
        Point(
            label=_LABELS[str(row["name"])][0],
            color=_LABELS[str(row["name"])][1],
            offset=_LABELS[str(row["name"])][2],
            reserved_gib=row["max_reserved_bytes"] / GiB,
            allocated_gib=row["max_allocated_bytes"] / GiB,
            times=times,
            record=record.name,
        )
        for row, record, times, _ in own_and_peers(results, list(_LABELS))
    ]
    curve = [
        Point(
            label="",
            color=OWN,
            offset=(0, 0),
            reserved_gib=row["max_reserved_bytes"] / GiB,
            allocated_gib=row["max_allocated_bytes"] / GiB,
            times=times,
            record=record.name,
        )
        for row, record, times in shares_of(results, "3.14b")
    ]
    return single, sorted(curve, key=lambda point: point.reserved_gib)


def describe(results: Path) -> str:
    """What the chart shows, in words and figures."""
    single, curve = points(results)
    shown = [
        f"{' '.join(point.label.split()) or 'share on the host'}: {point.reserved_gib:.2f} GiB, {point.times:.3f} ({point.record})"
        for point in (*single, *curve)
    ]
    return "GiB reserved on the device and time of a step over forward and backward. " + "; ".join(shown) + "."


def draw(results: Path) -> str:
    """The chart as SVG, the same bytes from the same records."""
    single, curve = points(results)
    # Text as text: small, searchable, and in the reader's font.
    with mpl.rc_context(
        {"svg.hashsalt": "lowtide", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}
    ):
        figure = Figure(figsize=(8.0, 4.2), facecolor="white")
        figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
        axes = figure.subplots()
        _draw_curve(axes, curve)
        for point in single:
            _draw_point(axes, point)
        axes.axhline(1.0, color=PLAIN, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set(
            xlim=(0, 53),
            ylim=(0, 2.8),
            xlabel="device memory reserved, GiB",
            ylabel="time of a step (1 = forward and backward)",
        )
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e5e5e5", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_title("AdamW on a 3.14-billion-parameter Llama, batch 8 x 2048, one H200", loc="left", fontsize=11)
        file = io.BytesIO()
        figure.savefig(
            file, format="svg", metadata={"Date": None, "Creator": None, "Description": escape(describe(results))}
        )
    return re.sub(r"[ \t]+$", "", file.getvalue().decode(), flags=re.MULTILINE)


def description(svg: str) -> str:
    """What a drawn chart says that it shows."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", svg, re.DOTALL)
    return unescape(unescape(found[1])) if found else ""


def _draw_curve(axes: Axes, curve: Sequence[Point]) -> None:
    axes.plot(
        [point.reserved_gib for point in curve],
        [point.times for point in curve],
        *("o-",),
        color=OWN,
        markersize=3.5,
        linewidth=1.6,
    )
    axes.annotate(
        "Lowtide, weights on the device:\n0% (right) to 100% of the updates on the host",
        (curve[-1].reserved_gib, curve[-1].times),
        (4, -18),
        textcoords="offset points",
        ha="right",
        va="top",
        color=OWN,
    )


def _draw_point(axes: Axes, point: Point) -> None:
    # A thin line back to what tensors took: the rest is the allocator's cache.
    axes.plot([point.allocated_gib, point.reserved_gib], [point.times] * 2, color=point.color, linewidth=0.9, alpha=0.6)
    axes.plot([point.reserved_gib], [point.times], "o", color=point.color, markersize=8)
    dx, _ = point.offset
    axes.annotate(
        point.label,
        (point.reserved_gib, point.times),
        point.offset,
        textcoords="offset points",
        ha="right" if dx < 0 else "left" if dx > 0 else "center",
        va="center" if dx > 0 else "baseline",
        color=point.color,
    )
