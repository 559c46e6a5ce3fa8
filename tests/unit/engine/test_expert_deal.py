"""The deal of experts over adjacent ranks: each is dealt once a crew, its parts to adjacent ranks, evenly."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.elastic.engine.generation.expert_deal import ExpertDeal

POWERS = st.sampled_from([1, 2, 4])


@given(homes=POWERS, parts=POWERS, cell=POWERS, each=st.integers(1, 3), replicas=st.integers(1, 4))
def test_each_part_of_an_expert_is_on_as_many_ranks_of_a_crew(
    homes: int, parts: int, cell: int, each: int, replicas: int
) -> None:
    deal = ExpertDeal(homes * each, homes, parts, cell)
    assume(cell % parts == 0 and not deal.refusal(deal.crew_size * replicas))
    ranks = [rank for index in range(deal.crew_size) for rank in deal.on_ranks(index, deal.at(index))]
    assert len(ranks) == deal.crew_size * cell
    holders = Counter(expert for rank in ranks for expert in rank)
    assert holders == dict.fromkeys(range(deal.experts), len(ranks) // homes)
    assert all(ranks[at] == ranks[at - at % parts] for at in range(len(ranks)))


def test_experts_of_a_missing_cell_go_to_the_ranks_with_the_fewest() -> None:
    deal = ExpertDeal(experts=8, homes=4, parts=1, cell=2)
    assert deal.on_ranks(0, (0, 1, 2, 3)) == ((0, 1), (2, 3))
    assert deal.on_ranks(0, (0, 1, 2, 3, 4, 6)) == ((0, 1, 4), (2, 3, 6))
    assert deal.on_ranks(0, (0, 2, 3, 5)) == ((0, 5), (2, 3))


@pytest.mark.parametrize(
    ("deal", "replicas", "words"),
    [
        (ExpertDeal(6, 4, 1, 1), 4, "EP 4 does not divide 6 experts"),
        (ExpertDeal(6, 3, 1, 2), 3, "EP 3: 3 ranks .* divisor of 2"),
        (ExpertDeal(8, 4, 1, 1), 6, "a multiple of 4"),
        (ExpertDeal(8, 4, 1, 2), 4, "^$"),
    ],
)
def test_what_cannot_be_dealt_is_refused(deal: ExpertDeal, replicas: int, words: str) -> None:
    assert re.search(words, deal.refusal(replicas))
