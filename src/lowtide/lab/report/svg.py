"""Pieces of inline SVG that the page's charts share: escaped text, axes, and one drawing for each width of screen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from lowtide.lab.report.axis import Axis, tick_text

WIDE, NARROW = (960, 500), (360, 540)
"""Sizes of a chart on a desk and on a phone: letters keep theirs, so that both are drawn and the style sheet picks one."""

_GLYPH_WIDTH = 0.6
"""Of a letter, in font sizes: the widest of the usual sans serif fonts, because a page cannot know which it gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The rectangle of a chart within its drawing, and what its two axes measure."""

    left: float
    top: float
    right: float
    bottom: float
    across: Axis
    up: Axis

    def point(self, x: float, y: float) -> tuple[float, float]:
        """Where two values meet."""
        across = self.left + self.across.place(x) * (self.right - self.left)
        return across, self.bottom - self.up.place(y) * (self.bottom - self.top)


def drawing(content: str, size: tuple[int, int], *, kind: str, label: str) -> str:
    """An SVG element of that size, whose letters are as large as the page's."""
    width, height = size
    return (
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="group" '
        f'aria-label="{escape(label)}">{content}</svg>'
    )


def both_widths(
    draw: Callable[[tuple[int, int]], str],
    *,
    label: str,
    wide: tuple[int, int] = WIDE,
    narrow: tuple[int, int] = NARROW,
) -> str:
    """A chart drawn for a desk and for a phone."""
    return drawing(draw(wide), wide, kind="wide-screen", label=label) + drawing(
        draw(narrow), narrow, kind="narrow-screen", label=label
    )


def axes(frame: Frame, *, across_name: str, up_name: str) -> str:
    """Grid, ticks and names of both axes."""
    pieces = []
    most = max(3, round((frame.right - frame.left) / 75))
    for value in frame.across.ticks(most):
        x, _ = frame.point(value, frame.up.low)
        pieces.append(line((x, frame.top), (x, frame.bottom), "grid"))
        pieces.append(text((x, frame.bottom + 18), tick_text(value), anchor="middle"))
    for value in frame.up.ticks(max(3, round((frame.bottom - frame.top) / 45))):
        _, y = frame.point(frame.across.low, value)
        pieces.append(line((frame.left, y), (frame.right, y), "grid"))
        pieces.append(text((frame.left - 8, y + 4), tick_text(value), anchor="end"))
    pieces.append(text((frame.right, frame.bottom + 38), across_name, anchor="end", kind="axis"))
    pieces.append(text((0, frame.top - 10), up_name, kind="axis"))
    return "".join(pieces)


def line(start: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    """A straight line."""
    return f'<line class="{kind}" x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"/>'


def polyline(points: list[tuple[float, float]], kind: str) -> str:
    """A line through points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{kind}" points="{path}"/>'


def circle(centre: tuple[float, float], radius: float, kind: str) -> str:
    """A mark."""
    return f'<circle class="{kind}" cx="{centre[0]:.1f}" cy="{centre[1]:.1f}" r="{radius:g}"/>'


def text(place: tuple[float, float], words: str, *, anchor: str = "start", kind: str = "tick") -> str:
    """Escaped words on the baseline of a place."""
    return f'<text class="{kind}" x="{place[0]:.1f}" y="{place[1]:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def text_width(words: str, font_size: float) -> float:
    """About how wide words are, rather more than less."""
    return _GLYPH_WIDTH * font_size * len(words)
