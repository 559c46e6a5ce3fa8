"""Layers with experts compute the same whichever rank of a crew has an expert, and whichever ranks have tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.elastic.engine.compute.model_interface import Crew
from megatron.elastic.mcore.model.crew_dispatcher import CrewDispatcher
from tests.unit.own_process import result_of

SCRIPT = Path(__file__).with_name("crew_layers.py")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = result_of(SCRIPT, tmp_path_factory.mktemp("crew"))
    return found


@pytest.mark.parametrize("case", ["even", "uneven", "a ghost", "a ghost, bf16", "alone"])
def test_outputs_and_gradients_are_those_of_one_rank_with_all_experts(answers: dict[str, Any], case: str) -> None:
    """Of the input, and of each expert, the sum over the micro-batches of all ranks."""
    for rank, differences in enumerate(answers[case]):
        assert max(differences.values(), default=0.0) < (2e-2 if "bf16" in case else 1e-5), (rank, differences)
    compared = {name for differences in answers[case] for name in differences}
    assert {"output", "input"} <= compared and sum("experts." in name for name in compared) == 8


def test_parts_of_a_sequence_are_routed_and_balanced_as_the_whole(answers: dict[str, Any]) -> None:
    for rank, differences in enumerate(answers["parts"]):
        assert max(differences.values()) < 1e-5, (rank, differences)
        assert {"output", "input", "router"} <= differences.keys() and len(differences) == 3 + 4


@pytest.mark.parametrize("case", ["further tokens", "further tokens, recomputed"])
def test_a_rank_without_rows_takes_part_in_layers_of_further_tokens(answers: dict[str, Any], case: str) -> None:
    for rank, differences in enumerate(answers[case]):
        assert max(differences.values()) < 1e-5, (rank, differences)
    compared = [name for differences in answers[case] for name in differences if "experts." in name]
    assert len(set(compared)) == 2 * 4 * 2, "two layers, four experts, two weights"


def test_the_crew_of_the_launch_is_megatrons_deal(answers: dict[str, Any]) -> None:
    whole, cut = answers["names"]["crews"]
    assert whole == [[3, 4, 5], [[0, 1], [2, 3], [4, 5]]]
    assert cut == [[4, 5, 6, 7], [[0, 1], [0, 1], [2, 3], [2, 3]]]


def test_a_parameter_of_an_expert_has_one_name_on_every_rank(answers: dict[str, Any]) -> None:
    expert, router = answers["names"]["names"]
    assert expert == [".mlp.experts.local_experts.5.linear_fc1.weight", 5]
    assert router == [".mlp.router.weight", None]


def test_a_rank_of_a_crew_of_one_asks_for_no_group() -> None:
    def no_group(ranks: tuple[int, ...]) -> Any:
        raise AssertionError(f"asked for {ranks}")

    at = CrewDispatcher(Crew((3,), ((0, 1),)), 3, no_group)
    hidden, routed = torch.arange(8.0).view(2, 1, 4), torch.tensor([[True, False], [True, True]])
    rows, probs = at.token_dispatch(*at.dispatch_preprocess(hidden, routed, routed.float()))
    rows, per_expert, _ = at.dispatch_postprocess(rows, probs)
    assert per_expert.tolist() == [2, 1] and rows.shape == (3, 4)
    back = at.combine_postprocess(at.token_combine(at.combine_preprocess(rows)))
    assert torch.equal(back, hidden * torch.tensor([1.0, 2.0]).view(2, 1, 1)), "each token once for each of its experts"
