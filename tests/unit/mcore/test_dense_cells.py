"""The cells that a GPT allows: a damaged cell of any size that leaves each rank a head, a whole one as Megatron's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.elastic.mcore.model.cell_limits import CellLimits
from megatron.elastic.mcore.model.tensor_cut import Sizes
from megatron.elastic.plan.profile import PPM

SIZES = Sizes(
    tensor=4,
    heads=8,
    groups=4,
    channels=4,
    columns=32,
    gated=False,
    output_gate=False,
    vocabulary=64,
    sequence=16,
    sequence_parallel=False,
)


def limits(shares: bool = True, **given: Any) -> CellLimits:
    """Of a dense model of Megatron's own layers, whose ranks each have the whole sequence."""
    config = {
        "num_moe_experts": None,
        "multi_latent_attention": False,
        "heterogeneous_block_specs": False,
        "mtp_num_layers": None,
        "cross_entropy_loss_fusion": False,
        "context_parallel_size": 1,
        "window_size": None,
    }
    args = {"transformer_impl": "local", "position_embedding_type": "rope"}
    for name, value in given.items():
        (args if name in args else config)[name] = value
    return CellLimits(SIZES, SimpleNamespace(**config), SimpleNamespace(**args), True, shares)


@pytest.mark.parametrize(("tensor", "heads"), [(4, 2), (3, 4), (2, 4), (1, 8)])
def test_a_rank_of_a_smaller_group_computes_its_share_of_the_heads(tensor: int, heads: int) -> None:
    assert limits().largest_part(tensor, 1, ()) == PPM * heads // 8


@pytest.mark.parametrize("parts", [2, 3])
def test_ranks_that_share_the_sequence_compute_the_longest_part_at_most(parts: int) -> None:
    assert limits().largest_part(4, parts, ()) == -(-PPM * -(-16 // parts) // (16 * 4))


@pytest.mark.parametrize("given", [{"transformer_impl": "transformer_engine"}, {"multi_latent_attention": True}])
def test_some_models_are_computed_by_the_launchs_cells_alone(given: dict[str, Any]) -> None:
    fixed = limits(**given)
    assert fixed.largest_part(4, 1, ()) == PPM // 4
    assert fixed.largest_part(3, 1, ()) is None


@pytest.mark.parametrize(
    ("shares", "given", "words"),
    [
        (True, {}, ""),
        (False, {}, "no rank has a context-parallel group"),
        (True, {"window_size": (4, 0)}, "--window-size"),
        (True, {"position_embedding_type": "mrope"}, "--position-embedding-type mrope"),
    ],
)
def test_a_whole_cell_shares_the_sequence_where_nothing_speaks_against_it(
    shares: bool, given: dict[str, Any], words: str
) -> None:
    said = limits(shares, **given).refusal(4, 2, 1)
    assert said.startswith(words) and bool(said) == bool(words)


def test_a_whole_cell_cuts_the_sequence_as_megatron_would() -> None:
    assert "multiple of 6" in limits().refusal(4, 3, 1)
    assert limits().refusal(4, 1, 1) == ""
