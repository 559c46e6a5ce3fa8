"""The clocks of ``overhead`` and ``watching`` are on functions that exist: a renamed one would end the benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench import overhead, watching

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import importlib, json, sys
CLOCKED = importlib.import_module(f"tools.bench.{sys.argv[1]}").CLOCKED
missing = [name for owner, name, _ in CLOCKED if not callable(vars(owner).get(name))]
print(json.dumps([missing, [clock for _, _, clock in CLOCKED if isinstance(clock, str)]]))
"""
"""In a process of its own: the worker redirects torch before Megatron is imported."""


WATCHING = {clock for clocks in watching.COSTS.values() for clock in clocks}
BY_ARGUMENTS = {"update_owned", "replay_mirrored", "scalar"}
"""Clocks that are chosen at each call."""


@pytest.mark.parametrize(
    ("worker", "costs"),
    [
        ("_overhead_worker", {*overhead.COSTS}),
        ("_overhead_plain_worker", {*overhead.REPLACED}),
        ("_watching_worker", WATCHING),
    ],
)
def test_every_clocked_function_exists_and_every_reported_cost_has_a_clock(worker: str, costs: set[str]) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, worker],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=environ,
        cwd=ROOT,
    )
    missing, clocks = json.loads(done.stdout.splitlines()[-1])
    assert missing == []
    assert costs <= {*clocks} | BY_ARGUMENTS
