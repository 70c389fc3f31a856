"""Peak and saved bytes over the activation memory budget as inline SVG."""

from __future__ import annotations

from html import escape

from lowtide.lab.report import svg
from lowtide.lab.report.axis import Axis
from lowtide.lab.report.byte_unit import byte_unit
from lowtide.lab.report.svg import Frame
from lowtide.lab.report.sweep import Sweep, SweepPoint


def sweep_svg(sweep: Sweep) -> str:
    """The chart for both widths of screen, with a ring around each point that a larger budget beats."""
    label = f"{sweep.title}: peak and saved bytes by budget"
    return svg.both_widths(lambda size: _draw(sweep, size), label=label, wide=(720, 340), narrow=(360, 300))


def _draw(sweep: Sweep, size: tuple[int, int]) -> str:
    width, height = size
    largest = max(max(point.peak_bytes, point.saved_bytes) for point in sweep.points)
    unit = byte_unit(largest)
    frame = Frame(
        left=42,
        top=28,
        right=width - 12,
        bottom=height - 48,
        across=Axis(low=0.0, high=1.0, is_log=False),
        up=Axis(low=0.0, high=1.1 * largest / unit.num_bytes, is_log=False),
    )
    reversed_points = {id(reversal.point) for reversal in sweep.reversals}
    pieces = [svg.axes(frame, across_name="activation memory budget", up_name=unit.name)]
    for kind, points in sweep.curves.items():
        for what in ("saved", "peak"):
            places = [frame.point(point.budget, _bytes(point, what) / unit.num_bytes) for point in points]
            pieces.append(svg.polyline(places, f"budget-line {what} {kind}"))
            for point, place in zip(points, places, strict=True):
                is_reversed = what == "peak" and id(point) in reversed_points
                ring = svg.circle(place, 9, "reversal") if is_reversed else ""
                pieces.append(f"<g>{_title(point)}{ring}{svg.circle(place, 4, f'budget-dot {what} {kind}')}</g>")
    return "".join(pieces)


def _bytes(point: SweepPoint, what: str) -> int:
    return point.peak_bytes if what == "peak" else point.saved_bytes


def _title(point: SweepPoint) -> str:
    unit = byte_unit(point.peak_bytes)
    words = (
        f"budget {point.budget:g} ({point.kind}): peak {unit.text(point.peak_bytes)}, saved "
        f"{unit.text(point.saved_bytes)} {unit.name}, {point.recomputed_flops_share:.1%} recomputed"
    )
    return f"<title>{escape(words)}</title>"
