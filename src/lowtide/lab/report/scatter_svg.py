"""Memory against speed as inline SVG: every mark can be reached by mouse, finger and keyboard."""

from __future__ import annotations

from html import escape
from itertools import pairwise

from lowtide.lab.report import svg
from lowtide.lab.report.labels import Box, Label, Line, cut_name, place_labels
from lowtide.lab.report.scatter import Mark, Scatter
from lowtide.lab.report.svg import Frame
from lowtide.lab.report.tables import speed_text

_RADIUS = 5.0
_FONT_SIZE = 12.0
_BOLDER = 1.08
"""How much wider bold letters are."""


def scatter_svg(scatter: Scatter) -> str:
    """The chart for both widths of screen; marks are numbered in the order of `marks`, then `published`."""
    words = (
        f"{len(scatter.marks)} configurations, peak memory upwards and samples per second to the right; "
        "the table below has the numbers"
    )
    return svg.both_widths(lambda size: _draw(scatter, size), label=words)


def _draw(scatter: Scatter, size: tuple[int, int]) -> str:
    width, height = size
    frame = Frame(left=42, top=28, right=width - 12, bottom=height - 48, across=scatter.speed, up=scatter.memory)
    pieces = [svg.axes(frame, across_name=scatter.speed_words, up_name=f"peak, {scatter.unit.name}")]
    front = [frame.point(*corner) for corner in scatter.front]
    if len(front) > 1:
        pieces.append(svg.polyline(front, "front-line"))
    ours = {id(mark.row): _place(frame, mark) for mark in scatter.marks}
    nameless = [mark for mark in scatter.published if id(mark.row) in ours]
    pairs = [(ours[id(mark.row)], _place(frame, mark)) for mark in nameless]
    pieces += [svg.line(*pair, "to-published") for pair in pairs]
    named = [*scatter.marks, *(mark for mark in scatter.published if id(mark.row) not in ours)]
    labels = _labels(frame, named, nameless, [*pairwise(front), *pairs])
    for mark, label in zip(named, labels, strict=True):
        if label.leader is not None:
            pieces.append(svg.line(*label.leader, "leader"))
        pieces.append(_name(mark, label, _place(frame, mark)))
    # Marks come last, so that none lies under a line or a name.
    pieces += [
        _mark(frame, mark, len(scatter.marks) + index, is_published=True)
        for index, mark in enumerate(scatter.published)
    ]
    pieces += [_mark(frame, mark, index, is_published=False) for index, mark in enumerate(scatter.marks)]
    return "".join(pieces)


def _labels(frame: Frame, named: list[Mark], nameless: list[Mark], lines: list[Line]) -> tuple[Label, ...]:
    return place_labels(
        [_place(frame, mark) for mark in named],
        [(_width(mark), 1.2 * _FONT_SIZE) for mark in named],
        bounds=Box(frame.left, frame.top, frame.right, frame.bottom),
        radius=_RADIUS,
        obstacles=[Box.around(_place(frame, mark), _RADIUS) for mark in nameless],
        lines=lines,
    )


def _name(mark: Mark, label: Label, place: tuple[float, float]) -> str:
    kind = "name on-front" if mark.is_on_front else "name"
    # Set from the side of its mark, so that letters wider than thought grow away from it.
    is_left = label.box.right < place[0]
    corner = (label.box.right if is_left else label.box.left, label.box.bottom - 0.25 * _FONT_SIZE)
    return svg.text(corner, cut_name(mark.row.label), anchor="end" if is_left else "start", kind=kind)


def _width(mark: Mark) -> float:
    return svg.text_width(cut_name(mark.row.label), _FONT_SIZE) * (_BOLDER if mark.is_on_front else 1.0)


def _mark(frame: Frame, mark: Mark, number: int, *, is_published: bool) -> str:
    place = _place(frame, mark)
    kind = "published" if is_published else "on-front" if mark.is_on_front else "ours"
    who = f"{mark.row.label}, published" if is_published else mark.row.label
    words = f"{who}: {speed_text(mark.samples_per_s)} samples per second"
    # The unseen circle is what a finger can hit.
    return (
        f'<g class="mark {kind}" tabindex="0" role="img" data-mark="{number}" aria-label="{escape(words)}">'
        f"{svg.circle(place, 12, 'target')}{svg.circle(place, _RADIUS, 'dot')}</g>"
    )


def _place(frame: Frame, mark: Mark) -> tuple[float, float]:
    return frame.point(mark.samples_per_s, mark.memory)
