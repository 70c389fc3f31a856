"""The steps of all rows as small charts side by side, inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lowtide.lab.report import svg
from lowtide.lab.report.axis import Axis, tick_text
from lowtide.lab.report.byte_unit import ByteUnit
from lowtide.lab.report.timeline import RowTimeline

_SIZE = (320, 150)
_LEFT, _TOP, _RIGHT, _BOTTOM = 34.0, 8.0, 318.0, 128.0
_FONT_SIZE = 11.0


def timeline_grid(timelines: Sequence[RowTimeline], unit: ByteUnit) -> str:
    """A figure for each; a style sheet can scale all of them to the largest, by `--share`."""
    largest = max(timeline.top_bytes for timeline in timelines)
    return f'<div class="multiples">{"".join(_figure(each, unit, largest) for each in timelines)}</div>'


def _figure(timeline: RowTimeline, unit: ByteUnit, largest_bytes: int) -> str:
    row = timeline.row
    peak = unit.text(max(timeline.points))
    phase = next(span.phase for span in timeline.spans if span.peak_bytes == max(timeline.points))
    predicted = ""
    if timeline.predicted_bytes is not None:
        predicted = f", predicted {unit.text(timeline.predicted_bytes)}"
    words = f"{peak} {unit.name} in {phase}{predicted}"
    own, same = (_axis(top, unit) for top in (timeline.top_bytes, largest_bytes))
    content = "".join(
        [
            _bands(timeline),
            f'<g class="own-scale">{_grid(own)}</g><g class="same-scale">{_grid(same)}</g>',
            # Scaled about its foot, where the style sheet asks for it; strokes keep their width.
            f'<g class="curve" style="--share:{own.high / same.high:.5f};transform-origin:0 {_BOTTOM:g}px">',
            _curve(timeline, own, unit),
            "</g>",
            svg.line((_LEFT, _BOTTOM), (_RIGHT, _BOTTOM), "foot"),
        ]
    )
    return (
        f'<figure class="multiple"><figcaption><b>{escape(row.label)}</b> <span class="quiet">{escape(words)}</span>'
        f"</figcaption>{svg.drawing(content, _SIZE, kind='step', label=f'{row.label}: {words}')}</figure>"
    )


def _axis(top_bytes: int, unit: ByteUnit) -> Axis:
    return Axis(low=0.0, high=1.06 * top_bytes / unit.num_bytes, is_log=False)


def _bands(timeline: RowTimeline) -> str:
    pieces = []
    for index, span in enumerate(timeline.spans):
        left, right = (_LEFT + share * (_RIGHT - _LEFT) for share in (span.start, span.end))
        if index % 2:
            pieces.append(
                f'<rect class="band" x="{left:.1f}" y="{_TOP:g}" width="{right - left:.1f}" height="{_BOTTOM - _TOP:g}"/>'
            )
        # A phase too narrow for its name goes without; the table of phases has it.
        if right - left >= svg.text_width(span.phase, _FONT_SIZE):
            pieces.append(svg.text(((left + right) / 2, _BOTTOM + 15), span.phase, anchor="middle"))
    return "".join(pieces)


def _grid(axis: Axis) -> str:
    pieces = []
    for value in axis.ticks(4):
        y = _BOTTOM - axis.place(value) * (_BOTTOM - _TOP)
        pieces.append(svg.line((_LEFT, y), (_RIGHT, y), "grid"))
        pieces.append(svg.text((_LEFT - 5, y + 4), tick_text(value), anchor="end"))
    return "".join(pieces)


def _curve(timeline: RowTimeline, axis: Axis, unit: ByteUnit) -> str:
    step = (_RIGHT - _LEFT) / len(timeline.points)

    def height(num_bytes: int) -> float:
        return _BOTTOM - axis.place(num_bytes / unit.num_bytes) * (_BOTTOM - _TOP)

    corners = []
    for index, num_bytes in enumerate(timeline.points):
        corners += [(_LEFT + (index + side) * step, height(num_bytes)) for side in (0, 1)]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
    pieces = [
        f'<path class="mass" d="M{_LEFT:g} {_BOTTOM:g}L{path}L{_RIGHT:g} {_BOTTOM:g}Z"/>',
        f'<path class="outline" d="M{path}"/>',
    ]
    if timeline.predicted_bytes is not None:
        y = height(timeline.predicted_bytes)
        pieces.append(f'<path class="predicted" d="M{_LEFT:g} {y:.1f}H{_RIGHT:g}"/>')
    x, y = _LEFT + (timeline.peak_index + 0.5) * step, height(max(timeline.points))
    # A line of no length with round ends stays a dot under any scale.
    pieces.append(f'<path class="peak-dot" d="M{x:.1f} {y:.1f}h0"/>')
    return "".join(pieces)
