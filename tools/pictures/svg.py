"""A drawing as SVG text: boxes, lines, arrows, words. Nothing of it depends on the machine that draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

__all__ = ["BLUE", "GREEN", "GREY", "INK", "RED", "Box", "Drawing", "Point"]

INK, GREY, BLUE, GREEN, RED = "#1f2937", "#6b7280", "#1d4ed8", "#15803d", "#b91c1c"
"""Colors of lines and words."""
FONT = "Helvetica, Arial, sans-serif"


class Point(NamedTuple):
    """A place; ``y`` grows downwards."""

    x: float
    y: float


class Box(NamedTuple):
    """A rectangle by its middle."""

    x: float
    y: float
    width: float
    height: float

    def edge(self, towards: Point, gap: float = 0.0) -> Point:
        """Where the line from the middle to ``towards`` leaves the rectangle, grown by ``gap``."""
        across, down = towards.x - self.x, towards.y - self.y
        if not across and not down:
            return Point(self.x, self.y)
        reach = min(
            (self.width / 2 + gap) / abs(across) if across else math.inf,
            (self.height / 2 + gap) / abs(down) if down else math.inf,
        )
        return Point(self.x + across * reach, self.y + down * reach)


class Drawing:
    """Elements in the order in which they were added, on white. ``title`` is read out in place of it."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="{FONT}" font-size="12">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def box(
        self, box: Box, fill: str = "#eff6ff", stroke: str = BLUE, radius: float = 5.0, dashed: bool = False
    ) -> None:
        """A rectangle with round corners."""
        self._parts.append(
            f'<rect x="{_n(box.x - box.width / 2)}" y="{_n(box.y - box.height / 2)}" width="{_n(box.width)}" '
            f'height="{_n(box.height)}" rx="{_n(radius)}" fill="{fill}" stroke="{stroke}"{_dashes(dashed)}/>'
        )

    def text(
        self,
        at: Point,
        words: str,
        size: float = 12.0,
        color: str = INK,
        anchor: str = "middle",
        bold: bool = False,
        turned: bool = False,
        ground: bool = False,
    ) -> None:
        """Words, ``at`` the middle of their height. ``ground``: on white, so that a line behind them is interrupted."""
        weight = ' font-weight="bold"' if bold else ""
        turn = f' transform="rotate(-60 {_n(at.x)} {_n(at.y)})"' if turned else ""
        halo = ' stroke="#ffffff" stroke-width="5" stroke-linejoin="round" paint-order="stroke"' if ground else ""
        self._parts.append(
            f'<text x="{_n(at.x)}" y="{_n(at.y + 0.35 * size)}" font-size="{_n(size)}" fill="{color}" '
            f'text-anchor="{anchor}"{weight}{turn}{halo}>{escape(words)}</text>'
        )

    def line(self, points: Sequence[Point], color: str = GREY, width: float = 1.2, dashed: bool = False) -> None:
        """A line through ``points``."""
        places = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(
            f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="{_n(width)}"{_dashes(dashed)}/>'
        )

    def arrow(self, points: Sequence[Point], color: str = GREY, width: float = 1.2, dashed: bool = False) -> None:
        """A line through ``points`` with a head at its end."""
        self.line(points, color, width, dashed)
        self._head(points[-2], points[-1], color)

    def arc(self, begin: Point, control: Point, end: Point, color: str = GREY, dashed: bool = False) -> None:
        """A curve that leaves ``begin`` towards ``control`` and reaches ``end`` from there, with a head at its end."""
        self._parts.append(
            f'<path d="M{_n(begin.x)},{_n(begin.y)} Q{_n(control.x)},{_n(control.y)} {_n(end.x)},{_n(end.y)}" '
            f'fill="none" stroke="{color}" stroke-width="1.2"{_dashes(dashed)}/>'
        )
        self._head(control, end, color)

    def cross(self, at: Point, size: float = 6.0, color: str = RED) -> None:
        """A mark for an end."""
        for rise in (-size, size):
            self.line([Point(at.x - size, at.y - rise), Point(at.x + size, at.y + rise)], color, 2.6)

    def finished(self) -> str:
        """The file."""
        return "\n".join([*self._parts, "</svg>", ""])

    def _head(self, origin: Point, tip: Point, color: str) -> None:
        angle = math.atan2(tip.y - origin.y, tip.x - origin.x)
        sides = [Point(tip.x - 8 * math.cos(angle + s), tip.y - 8 * math.sin(angle + s)) for s in (-0.42, 0.42)]
        places = " ".join(f"{_n(x)},{_n(y)}" for x, y in (tip, *sides))
        self._parts.append(f'<polygon points="{places}" fill="{color}"/>')


def _dashes(dashed: bool) -> str:
    return ' stroke-dasharray="5 4"' if dashed else ""


def _n(value: float) -> str:
    """A number with one digit after the point at most."""
    return f"{round(value, 1):.1f}".removesuffix(".0")
