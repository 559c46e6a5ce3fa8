"""What the planner thinks a stage needs is what it holds: Megatron's GPT, two cuts, five kinds of layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("stage_bytes.py")
CASES = ("dropout", "recomputed", "gated, grouped queries", "no dropout", "bf16")
TOLERANCE = 0.05
"""Left out: statistics of norms, token ids, masks; a middle stage's input."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("bytes") / "answers.json"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[3])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[dict[str, Any]]] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("case", CASES)
def test_activations_between_forward_and_backward(answers: dict[str, list[dict[str, Any]]], case: str) -> None:
    for stage in answers[case]:
        assert stage["activations predicted"] == pytest.approx(stage["activations"], rel=TOLERANCE), stage["stage"]


@pytest.mark.parametrize("case", CASES)
def test_parameters_and_gradients(answers: dict[str, list[dict[str, Any]]], case: str) -> None:
    """To the byte but for padding, tied embeddings included."""
    for stage in answers[case]:
        real = stage["parameters and gradients"]
        assert stage["parameters and gradients predicted"] == pytest.approx(real, rel=1e-3), stage["stage"]
