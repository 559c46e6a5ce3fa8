"""The packages of ``megatron/elastic``: which imports which, as import-linter sees it.

Rows are the layers of ``pyproject.toml``, lines the imports that do not follow from others: where a package imports a
second one that imports a third, the line to the third is left out. The table of imports has all of them.
"""

from __future__ import annotations

import re
import textwrap
import tomllib
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import grimp

from tools.pictures.svg import BLUE, GREY, Box, Drawing, Point

__all__ = ["draw_imports", "draw_packages"]

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = "megatron.elastic"
PACKAGES = {
    "command": (2.0, "the console command"),
    "simulate": (0.5, "the plans with costs instead of kernels"),
    "adaptor": (2.0, "the one import of a training script"),
    "launch": (3.3, "one agent a node: starts workers, sees their ends"),
    "ctl": (4.35, "questions and wishes of a user"),
    "mcore": (2.0, "Megatron's loop, model and checkpoints"),
    "runtime": (2.0, "connects, builds and reports one rank"),
    "engine": (2.0, "the step as a transaction, recovery"),
    "observe": (0.0, "events, phases, traces"),
    "plan": (1.0, "which cell computes what"),
    "state": (2.0, "copies of the optimizer state"),
    "comm": (3.08, "links and groups that are edited in place"),
    "control": (4.16, "membership: generations, leases, suspicion"),
    "platform": (2.0, "cpu, cuda, npu"),
    "config": (3.08, "the flags"),
}
"""Package → its place in its row, in boxes from the left, and its task."""


def layers() -> list[list[str]]:
    """Rows of packages, highest first: the first contract of import-linter."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    rows = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    return [[name.strip() for name in re.split(r"[|:]", row)] for row in rows]


@cache
def imports() -> Counter[tuple[str, str]]:
    """(package, another one) → number of times that a module of the first imports a module of the second."""
    graph = grimp.build_graph(ROOT, cache_dir=None)
    found: Counter[tuple[str, str]] = Counter()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            ends = tuple(name.removeprefix(f"{ROOT}.").split(".")[0] for name in (module, imported))
            if ends[0] != ends[1] and PACKAGES.keys() >= {*ends}:
                found[ends[0], ends[1]] += 1
    return found


def direct() -> list[tuple[str, str]]:
    """Imports that do not follow from others."""
    known = imports().keys()

    def reaches(package: str, other: str, first: bool = True) -> bool:
        after = [one for origin, one in known if origin == package and not (first and one == other)]
        return other in after or any(reaches(one, other, first=False) for one in after)

    return sorted((package, other) for package, other in known if not reaches(package, other))


def draw_packages() -> str:
    """Layers, and the imports between them that do not follow from others."""
    rows = layers()
    boxes = {
        name: Box(78 + 156 * PACKAGES[name][0], 40 + 92 * row + (30 if row > 4 else 0), 140, 58)
        for row, names in enumerate(rows)
        for name in names
    }
    lowest = max(box.y for box in boxes.values())
    drawing = Drawing(840, round(lowest) + 36, "Packages of megatron/elastic and their imports")
    for package, other in direct():
        drawing.arrow(_way(boxes, package, other))
    for name, box in boxes.items():
        drawing.box(box)
        drawing.text(Point(box.x, box.y - 15), name, 14, BLUE, bold=True)
        for number, line in enumerate(textwrap.wrap(PACKAGES[name][1], 24)):
            drawing.text(Point(box.x, box.y + 3 + 14 * number), line, 11)
    return drawing.finished()


def _way(boxes: Mapping[str, Box], package: str, other: str) -> list[Point]:
    """From a box straight down to the row above the other, then to that; boxes of one row are joined at their sides."""
    begin, end = boxes[package], boxes[other]
    if begin.y == end.y:
        return [begin.edge(Point(end.x, end.y)), end.edge(Point(begin.x, begin.y), gap=2)]
    down = sorted(boxes[b].x for a, b in direct() if a == package and boxes[b].y > begin.y)
    up = sorted(boxes[a].x for a, b in direct() if b == other and boxes[a].y < end.y)
    leaves = begin.x + 18 * (down.index(end.x) - (len(down) - 1) / 2)
    enters = end.x + 18 * (up.index(begin.x) - (len(up) - 1) / 2)
    above = min(box.y - box.height / 2 for box in boxes.values() if box.y == end.y) - 52
    start = Point(leaves, begin.y + begin.height / 2)
    return [start, Point(leaves, max(above, start.y)), Point(enters, end.y - end.height / 2 - 2)]


def draw_imports() -> str:
    """A table: the package of a row imports that of a column.

    How often is left out: the picture is to change with the structure, not with every module.
    """
    names = [name for row in layers() for name in row]
    found, cell, left, top = imports().keys(), 30, 96, 80
    size = cell * len(names)
    drawing = Drawing(left + size + 40, top + size + 12, "Imports between packages: row imports column")
    for row, package in enumerate(names):
        y = top + cell * (row + 0.5)
        drawing.text(Point(left - 8, y), package, anchor="end")
        drawing.text(Point(left + cell * (row + 0.5) - 4, top - 8), package, anchor="start", turned=True)
        for column, other in enumerate(names):
            fill = "#e5e7eb" if package == other else "#60a5fa" if (package, other) in found else "#ffffff"
            drawing.box(Box(left + cell * (column + 0.5), y, cell, cell), fill, "#d1d5db", radius=0)
    drawing.text(Point(left - 8, top - 12), "imports", color=GREY, anchor="end")
    return drawing.finished()
