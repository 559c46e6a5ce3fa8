"""Tokens reach the homes of their experts, and gradients the tokens, wherever experts and their parts are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.own_process import result_of

SCRIPT = Path(__file__).with_name("crew_exchange.py")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, list[dict[str, float]]]]:
    found: list[tuple[str, list[dict[str, float]]]] = result_of(SCRIPT, tmp_path_factory.mktemp("crew"), 60.0)
    return found


def test_four_ranks_compute_what_one_with_all_experts_computes(
    answers: list[tuple[str, list[dict[str, float]]]],
) -> None:
    assert len(answers) == 4
    for name, ranks in answers:
        for rank, deviations in enumerate(ranks):
            assert max(deviations.values()) < 1e-10, (name, rank, deviations)
