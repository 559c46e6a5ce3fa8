"""The pictures that are drawn from the code show what the code does now, and refuse what they cannot show."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.pictures import states
from tools.pictures.__main__ import PICTURES
from tools.pictures.packages import direct, imports, layers

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "recovery" else ()) for name in PICTURES]
)
def test_a_picture_is_the_one_that_the_code_gives_now(name: str) -> None:
    drawn = PICTURES[name]()
    ElementTree.fromstring(drawn)
    assert (IMAGES / f"{name}.svg").read_text(encoding="utf-8") == drawn, "run python -m tools.pictures"


MEASURED = {"peers"}
"""Drawn from recorded figures by ``tools.benchmark_docs``."""


def test_every_drawing_of_the_folder_is_drawn_by_a_function() -> None:
    assert {path.stem for path in IMAGES.glob("*.svg")} == PICTURES.keys() | MEASURED


def test_lines_between_packages_imply_all_imports_and_no_line_is_implied() -> None:
    lines = set(direct())
    assert lines <= imports().keys()

    def reached(package: str, besides: tuple[str, str] | None = None) -> set[str]:
        after = {other for origin, other in lines if origin == package and (origin, other) != besides}
        return after.union(*(reached(other) for other in after))

    assert all(other in reached(package) for package, other in imports())
    assert all(line[1] not in reached(line[0], besides=line) for line in lines)
    assert {name for row in layers() for name in row} >= {name for line in lines for name in line}


def test_a_change_without_a_line_and_a_line_without_a_change_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "STEP_LINES", states.STEP_LINES[1:])
    with pytest.raises(ValueError, match=r"without a line: \[\('R', 'S', 'reduces'\)\]"):
        states.draw_step()
    monkeypatch.undo()
    monkeypatch.setattr(states, "step_changes", lambda: set())
    with pytest.raises(ValueError, match="drawn, but not found"):
        states.draw_step()
