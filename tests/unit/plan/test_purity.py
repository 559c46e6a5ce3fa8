"""The planner imports neither torch nor Megatron, and reads no clock, environment or random numbers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import megatron.elastic.plan as package

FOLDER = Path(package.__path__[0])
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__" and path.stem != "rng")
FORBIDDEN = {"torch", "megatron.core", "megatron.training", "numpy", "random", "time", "os"}


def test_importing_all_of_plan_loads_no_framework() -> None:
    names = ", ".join(f"megatron.elastic.plan.{name}" for name in MODULES)
    code = f"import sys; import {names}; print([m for m in ('torch', 'megatron.core') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


def test_no_module_of_plan_can_depend_on_when_or_where_it_runs() -> None:
    for name in MODULES:
        tree = ast.parse((FOLDER / f"{name}.py").read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        bad = {i for i in imported if any(i == f or i.startswith(f + ".") for f in FORBIDDEN)}
        assert not bad, f"{name} imports {bad}"
        floats = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, float)]
        allowed = {"policy", "timing"}
        assert not floats or name in allowed, f"{name} computes with floating-point constants"
