"""A stage holds the memory that the planner expects: Megatron's GPT, two cuts, five kinds of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.own_process import result_of

SCRIPT = Path(__file__).with_name("stage_bytes.py")
CASES = ("dropout", "recomputed", "gated, grouped queries", "no dropout", "bf16")
TOLERANCE = 0.05
"""Left out: statistics of norms, token ids, masks; a middle stage's input."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = result_of(SCRIPT, tmp_path_factory.mktemp("bytes"))
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
