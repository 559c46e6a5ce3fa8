"""On one rank: units given up are freed, a resumed Adam counts right, batches and the default group are Megatron's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.own_process import result_of

SCRIPT = Path(__file__).with_name("one_rank.py")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], dict[str, Any]]:
    return {(check, tied): answer for check, tied, answer in result_of(SCRIPT, tmp_path_factory.mktemp("one"))}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_units_given_up_are_freed_and_come_back_as_they_were(answers: Any, tied: bool) -> None:
    found = answers["units", tied]
    assert found["is the model"] and found["same"], "a segment of all units computes what Megatron's model computes"
    assert found["kept"] == found["after"] == found["two layers"], "only the held units have memory"
    assert found["as launched"] == found["whole"], "inside the context a save sees every shape"
    assert found["missing"] == "0", "a segment with a unit that is not held names it"
    assert found["held"] == [0, 1, 2, 3, 4] and found["names kept"] and found["built"] == 0
    assert found["same again"] and found["tied gone"]


def test_a_resumed_optimizer_counts_one_step_a_step(answers: Any) -> None:
    """Without the replacements, Megatron's optimizer asserts on its own state before the first step."""
    found = answers["adam", False]
    assert found["replaced"]["early"] == 0
    assert set(found["replaced"]["steps"]) == {5.0}, "two before the save and three after it, for every parameter"
    assert found["plain"] == {"error": "AssertionError"}


def test_a_batch_is_the_loaders_and_pretrain_gets_the_scripts_functions(answers: Any) -> None:
    found = answers["batches", False]
    assert all(found["same"].values()) and found["mask"]
    assert found["calls"] == [{"model": "model", "step": "step", "defaults": {"lr": 1}}]


def test_a_save_by_the_living_has_a_default_group_of_the_living(answers: Any) -> None:
    """Ranks beyond the launch are no part of it; also after an error the default group is the job's again."""
    found = answers["default group", False]
    assert found["asked"] == [["checkpoint", [0]]]
    assert found["inside"] and found["after"] and found["untouched"]


def test_local_attention_takes_keys_and_values_of_two_widths(answers: Any) -> None:
    found = answers["latent", False]
    assert found["shape"] and found["apart"] < 1e-5
    assert found["configured"] and found["one width"], "nothing else of Megatron's is changed"


def test_a_packed_row_is_computed_as_its_sequences_are_alone(answers: Any) -> None:
    found = answers["packed", False]
    assert found["apart"] < 1e-5 and found["gradients apart"] < 1e-4
    assert found["as one sequence"] > 1e-2, "without the mask they see each other"
