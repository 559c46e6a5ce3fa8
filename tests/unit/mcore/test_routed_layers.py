"""Megatron's GPT with experts gives the same losses and gradients in cells and crews of any sizes as at the launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.own_process import result_of

SCRIPT = Path(__file__).with_name("routed_layers.py")
CASES = 6


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = result_of(SCRIPT, tmp_path_factory.mktemp("routed"))
    assert len(found) == CASES
    return found


@pytest.mark.parametrize("number", range(CASES))
def test_losses_and_gradients_are_those_of_the_launch(answers: Any, number: int) -> None:
    """With shared experts, experts cut over ranks and whole ones, and losses of routers."""
    answer = answers[number]
    for rank in answer["ranks"]:
        assert rank["smallest"] > 0 and len(rank["sizes"]) == len(answer["case"]["to"])
        for sizes, run in rank["sizes"].items():
            assert run["complete"] and run["covered"], sizes
            worst = max(run["apart"], key=run["apart"].__getitem__)
            assert run["apart"][worst] <= 1e-5, f"{worst} at {sizes}"
            assert run["loss"] == pytest.approx(rank["launch"], rel=1e-6), sizes


@pytest.mark.parametrize("number", range(CASES))
def test_back_at_its_place_each_rank_has_the_launch_bits(answers: Any, number: int) -> None:
    for rank in answers[number]["ranks"]:
        assert rank["again"]["bitwise"] and rank["again"]["complete"]
