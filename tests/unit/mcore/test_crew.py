"""Layers with experts compute the same whichever rank of a crew has an expert, and whichever ranks have tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.compute.model_interface import Crew
from megatron.elastic.mcore.model.crew_dispatcher import CrewDispatcher
from tests.unit.own_process import result_of

SCRIPT = Path(__file__).with_name("crew_layers.py")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = result_of(SCRIPT, tmp_path_factory.mktemp("crew"))
    return found


@pytest.mark.parametrize(
    "case", ["even", "uneven", "a ghost", "a ghost, bf16", "alone", "replicas", "replicas and a ghost"]
)
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


@st.composite
def crews(draw: st.DrawFn) -> Crew:
    """Homes with any experts, each with at least one, on one or several adjacent ranks."""
    experts, homes, cut = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 2))
    found = [set(draw(st.sets(st.integers(0, experts - 1)))) for _ in range(homes)]
    for expert in range(experts):
        found[draw(st.integers(0, homes - 1))].add(expert)
    each = [tuple(sorted(mine)) for mine in found for _ in range(cut)]
    return Crew(tuple(range(len(each))), tuple(each), cut)


@given(crews(), st.integers(0, 12), st.integers(0, 1000))
def test_a_token_goes_to_one_home_of_each_of_its_experts_and_homes_have_equal_shares(
    crew: Crew, tokens: int, seed: int
) -> None:
    """To all parts of that home, and of one sender's tokens no replica has two more than another."""
    routed = torch.rand(tokens, len(crew.replicas), generator=torch.Generator().manual_seed(seed)) < 0.5
    order = torch.tensor([expert for mine in crew.experts for expert in mine])
    places = [(at // crew.cut, at % crew.cut, expert) for at, mine in enumerate(crew.experts) for expert in mine]
    for rank in crew.ranks:
        at = CrewDispatcher(crew, rank, lambda ranks: None)  # type: ignore[arg-type, return-value]
        chosen = at._chosen(routed, order)
        assert torch.equal(chosen, at._chosen(routed, order)), "the same when a layer is recomputed"
        for expert, count in crew.replicas.items():
            homes = sorted({home for home, _, of in places if of == expert})
            parts = [[chosen[:, places.index((home, part, expert))] for part in range(crew.cut)] for home in homes]
            assert all(torch.equal(one, mine[0]) for mine in parts for one in mine)
            assert torch.equal(torch.stack([mine[0] for mine in parts]).sum(0), routed[:, expert].long())
            shares = [int(mine[0].sum()) for mine in parts]
            assert len(shares) == count and max(shares) - min(shares) <= 1
