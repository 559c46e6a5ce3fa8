"""Megatron's GPT gives the same losses and gradients on any number of ranks as on those of the launch."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.unit.own_process import result_of

SCRIPT = Path(__file__).with_name("tensor_layers.py")
CASES, SIZES, COLUMNS = 13, ("1", "2", "3", "4"), 40
VALUES = {
    "tensor_parallel": (2, 4),
    "groups": (2, 4, 8),
    "sequence": ("whole", "16", "12"),
    "recompute": ("no", "full", "selective"),
    **dict.fromkeys(("gated", "bias", "qk_norm", "tied", "bf16", "rotary", "rms", "fused", "split"), (False, True)),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = result_of(SCRIPT, tmp_path_factory.mktemp("tensor"))
    assert len(found) == CASES
    return found


def cells(answer: dict[str, Any], size: str) -> list[dict[str, Any]]:
    """The results of the ranks of a cell of this size."""
    found = [rank["cells"][size] for rank in answer["ranks"] if size in rank["cells"]]
    assert len(found) == int(size)
    return found


def assert_close(run: dict[str, Any], answer: dict[str, Any]) -> None:
    """Loss and gradients are those of the launch within rounding.

    The fused cross entropy rounds some elements of its gradient to another bf16 number. In bf16 each gradient is about
    as far from that of fp32 as the launch's is.
    """
    case, apart = answer["case"], run["apart"]
    bound = 5 if case["bf16"] else 2e-3 if case["fused"] else 1e-5
    worst = max(apart, key=apart.__getitem__)
    assert apart[worst] <= bound, f"{worst} of {case}"
    assert run["loss"] == pytest.approx(answer["ranks"][0]["launch"], rel=5e-3 if case["bf16"] else 1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("number", range(CASES))
def test_losses_and_gradients_are_those_of_the_launch(answers: Any, number: int, size: str) -> None:
    answer = answers[number]
    for rank in cells(answer, size):
        assert rank["complete"], "some shard has no gradient"
        assert rank["covered"], "patches name other shards than those that the interface says are covered"
        assert_close(rank, answer)
        assert answer["ranks"][0]["smallest"] > 0


@pytest.mark.parametrize("number", range(CASES))
def test_a_pipeline_of_two_cells_of_different_size_gives_them_too(answers: Any, number: int) -> None:
    answer = answers[number]
    for run in answer["ranks"][0]["pipelines"]:
        assert_close(run, answer)
    assert len(answer["ranks"][0]["pipelines"]) == 2


@pytest.mark.parametrize("number", range(CASES))
def test_a_cell_of_the_launch_size_has_the_launch_bits(answers: Any, number: int) -> None:
    answer = answers[number]
    for rank in cells(answer, str(answer["case"]["tensor_parallel"])):
        assert rank["bitwise"], max(rank["apart"].items(), key=lambda item: item[1])


@pytest.mark.parametrize("number", range(CASES))
def test_back_at_its_place_each_rank_has_the_launch_bits(answers: Any, number: int) -> None:
    for rank in answers[number]["ranks"]:
        assert rank["again"]["bitwise"] and rank["again"]["complete"]
        assert rank["random state kept"], "building layers drew random numbers"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("number", range(CASES))
def test_each_rank_computes_only_its_share_of_the_columns(answers: Any, number: int, size: str) -> None:
    columns = [rank["shapes"]["mlp.linear_fc2.weight"][1] for rank in cells(answers[number], size)]
    assert sum(columns) == COLUMNS and max(columns) - min(columns) <= 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("number", range(CASES))
def test_sequence_parallelism_is_off_where_it_does_not_divide(answers: Any, number: int, size: str) -> None:
    case = answers[number]["case"]
    length = 16 if case["sequence"] == "whole" else int(case["sequence"])
    divides = length % int(size) == 0 and size != "1"
    for rank in cells(answers[number], size):
        on = case["sequence"] != "whole" and divides
        assert rank["boundary"] == (length // int(size) if on else length)


def test_each_pair_of_values_occurs_in_a_case(answers: Any) -> None:
    for a, b in combinations(VALUES, 2):
        found = {(answer["case"][a], answer["case"][b]) for answer in answers[:-1]}
        assert found == {(x, y) for x in VALUES[a] for y in VALUES[b]}, f"{a}, {b}"
