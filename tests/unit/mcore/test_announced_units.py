"""Megatron's GPT announces a unit before it reads its parameters; a gradient that autograd has filled is final."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.own_process import result_of

SCRIPT = Path(__file__).with_name("announced_gpt.py")
UNITS = 6


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Per case, rank and cut: the answer of a plain run, and of one whose parameters are NaN until announced."""
    found = result_of(SCRIPT, tmp_path_factory.mktemp("announced"))
    return [{**answer, "case": one["case"]} for one in found for rank in one["ranks"] for answer in rank]


def test_no_parameter_is_read_before_its_unit_is_announced(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        plain, watched = answer["plain"], answer["watched"]
        assert (watched["loss"], watched["grads"]) == (plain["loss"], plain["grads"]), answer["case"]
        assert [unit for _, unit in watched["announced"]] == list(range(UNITS)), answer["case"]


def test_a_gradient_that_autograd_has_filled_does_not_change(answers: list[dict[str, Any]]) -> None:
    """Under sequence parallelism, some are summed over the cell afterwards."""
    for answer in answers:
        watched, case = answer["watched"], answer["case"]
        units = [unit for _, unit in watched["finished"]]
        assert units == list(reversed(range(UNITS))) or (case["tied"] and units == list(reversed(range(1, UNITS)))), (
            case
        )
        assert case["sequence_parallel"] or not watched["later"], (case, watched["later"])
