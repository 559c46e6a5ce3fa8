"""Tokens reach every part of one home of each expert, and what comes back adds up to the whole.

With even and uneven homes, and with replicas, whose gradients add up to that of the expert.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.own_process import result_of

SCRIPT = Path(__file__).with_name("crew_exchange.py")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, list[dict[str, float]]]]:
    found: list[tuple[str, list[dict[str, float]]]] = result_of(SCRIPT, tmp_path_factory.mktemp("crew"), 60.0)
    return found


def test_parts_and_replicas_of_experts_compute_what_whole_ones_compute(
    answers: list[tuple[str, list[dict[str, float]]]],
) -> None:
    assert len(answers) == 4
    for name, ranks in answers:
        for rank, deviations in enumerate(ranks):
            assert max(deviations.values()) < 1e-10, (name, rank, deviations)
