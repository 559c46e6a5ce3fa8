"""Cells of any number of parts of the sequence give the losses and gradients of one rank that has all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.own_process import result_of

SCRIPT = Path(__file__).with_name("context_layers.py")
CASES = range(8)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = result_of(SCRIPT, tmp_path_factory.mktemp("context"))
    assert len(found) == len(CASES)
    return found


def assert_close(run: dict[str, Any], answer: dict[str, Any]) -> None:
    """Loss and gradients are Megatron's within rounding; in bf16 about as far from those of fp32 as Megatron's."""
    case, apart = answer["case"], run["apart"]
    worst = max(apart, key=apart.__getitem__)
    assert apart[worst] <= (5 if case["bf16"] else 1e-5), f"{worst} of {case}"
    assert run["loss"] == pytest.approx(answer["ranks"][0]["launch"], rel=5e-3 if case["bf16"] else 1e-6)
    assert run["complete"]


@pytest.mark.parametrize("number", CASES)
def test_losses_and_gradients_are_megatrons(answers: Any, number: int) -> None:
    answer = answers[number]
    assert answer["ranks"][0]["smallest"] > 0
    tensor = answer["case"]["tensor_parallel"]
    for parts in range(1, 4 // tensor + 1):
        runs = [rank["cells"][str(parts)] for rank in answer["ranks"] if str(parts) in rank["cells"]]
        assert len(runs) == parts * tensor
        for run in runs:
            assert_close(run, answer)


@pytest.mark.parametrize("number", CASES)
def test_each_position_is_computed_once(answers: Any, number: int) -> None:
    answer = answers[number]
    tensor, length = answer["case"]["tensor_parallel"], answer["case"]["length"]
    for parts in range(1, 4 // tensor + 1):
        ranks = [rank["cells"][str(parts)]["runs"] for rank in answer["ranks"] if str(parts) in rank["cells"]]
        held = sorted(at for runs in ranks[::tensor] for start, stop in runs for at in range(start, stop))
        assert held == list(range(length))


@pytest.mark.parametrize("number", CASES)
def test_a_pipeline_of_cells_with_different_numbers_of_parts_gives_them_too(answers: Any, number: int) -> None:
    answer = answers[number]
    for run in answer["ranks"][0]["pipelines"]:
        assert_close(run, answer)
    assert len(answer["ranks"][0]["pipelines"]) == (2 if answer["case"]["tensor_parallel"] == 1 else 0)
