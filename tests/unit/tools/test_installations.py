"""The record of installations keeps one row a Python; what was not measured stays as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import installations
from tools.installations import Installation

ROW = Installation("3.12.1", "2.13.0+cpu", "0.19.2", 2.5, 1.5, 311, 1300, 2)


def test_a_wheel_tells_its_python(tmp_path: Path) -> None:
    wheel = tmp_path / "megatron_elastic-0.1.0-cp312-cp312-manylinux_2_28_x86_64.whl"
    wheel.touch()
    assert installations.python_of(wheel) == "3.12"


@pytest.mark.parametrize("name", ["x-1.0-py3-none-any.whl", "x-1.0-cp311-cp312-linux_x86_64.whl", "x-1.0.tar.gz"])
def test_what_is_no_wheel_for_one_python_is_refused_and_nothing_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).touch()
    record, page = tmp_path / "install.json", tmp_path / "README.md"
    assert installations.main([str(tmp_path / name), "--record", str(record), "--readme", str(page)]) == 1
    assert "no wheel for one CPython; build one with scripts/build_packages.sh" in capsys.readouterr().err
    assert not record.exists() and not page.exists()


def test_a_wheel_that_does_not_install_is_not_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No Python is as new as this wheel says, so the measurement itself ends at its first step."""
    wheel = tmp_path / "megatron_elastic-0.1.0-cp399-cp399-linux_x86_64.whl"
    wheel.touch()
    record = tmp_path / "install.json"
    assert installations.main([str(wheel), "--record", str(record), "--readme", str(tmp_path / "README.md")]) == 1
    assert f"{wheel.name}: bash scripts/measure_install.sh --wheel ended with exit status" in capsys.readouterr().err
    assert not record.exists()


def test_a_new_row_replaces_that_of_the_same_python_only() -> None:
    older, other = (
        Installation("3.12.0", "2.13.0+cpu", "0.19.2", 9.0, 1.0, 1, 1, 2),
        Installation("3.9.1", "2.13.0+cpu", "0.17.1", 1.0, 1.0, 1, 1, 2),
    )
    before = {"rows": installations.merged({"rows": installations.merged({}, older)}, other)}
    after = [Installation(**row) for row in installations.merged(before, ROW)]
    assert after == [other, ROW], "in ascending order of releases, not of text"


def test_table_and_sentence_have_the_recorded_figures() -> None:
    figures = {"rows": installations.merged({}, ROW)}
    (line,) = installations.table(figures).splitlines()[2:]
    assert line == "| 3.12.1 | 2.13.0+cpu | 0.19.2 | 2.5 | 1.5 | 311 | 1300 | 2 |"
    page = installations.readme("a\n\n<!-- begin install -->\nold\n<!-- end -->\n\nb\n", figures)
    assert "processor minutes: 0.3, 1.3 and 1.5 (Python 3.12, torch 2.13.0+cpu) (" in page
    assert "old" not in page and page.startswith("a\n") and page.endswith("\nb\n")


def test_the_readme_has_the_installations_that_were_measured() -> None:
    root = Path(installations.__file__).parents[1]
    figures = json.loads((root / "docs" / "measured" / "install.json").read_text(encoding="utf-8"))
    page = (root / "README.md").read_text(encoding="utf-8")
    assert installations.readme(page, figures) == page, "run python -m tools.installations"
    assert all(row["trained_steps"] == 2 for row in figures["rows"])
