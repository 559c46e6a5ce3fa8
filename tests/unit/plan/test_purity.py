"""The planner computes with integers: every rank gets the same bytes from the same input.

That it imports no framework, clock, environment or random numbers is a contract of import-linter (``pyproject.toml``).
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import megatron.elastic.plan as package

FOLDER = Path(package.__path__[0])
FILES = sorted(path.relative_to(FOLDER) for path in FOLDER.rglob("*.py"))
WITH_FLOATS = {Path("policies/base.py"), Path("schedule/timing.py")}
"""Figures for people to read, no plans."""


@pytest.mark.parametrize("file", FILES, ids=str)
def test_no_module_of_plan_has_a_floating_point_constant(file: Path) -> None:
    nodes = ast.walk(ast.parse((FOLDER / file).read_text()))
    floats = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, float)]
    assert file in WITH_FLOATS or floats == []
