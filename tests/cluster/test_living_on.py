"""A cell that has lost ranks goes on with its living ones in the same step, and has all its ranks as they return."""

from __future__ import annotations

import pytest

from megatron.elastic.engine.inject import STEP_POINTS
from megatron.elastic.plan.model import Plan
from tests.cluster.checks import check
from tests.cluster.cluster import Cluster, RankProcess, run

POINTS = (*STEP_POINTS, "between_steps", "in_evaluate")


def sizes(plan: Plan) -> list[int]:
    """The numbers of ranks of the cells that compute, ascending."""
    computing = {piece.cell for piece in plan.pieces}
    return sorted(len(cell.ranks) for cell in plan.cells if cell.id in computing)


def lives_on(scenario: str) -> Cluster:
    """The cluster after a run in which no committed step was lost."""
    cluster = run(f"tensor=live-on {scenario}")
    check(cluster)
    assert all(outcome.lost_steps == 0 for process in cluster.processes for outcome in process.recoveries)
    return cluster


def survivor(cluster: Cluster) -> RankProcess:
    """A rank that was there all the time."""
    return next(process for process in cluster.finished if process.incarnation == 0)


@pytest.mark.parametrize("rank", range(8))
@pytest.mark.parametrize("point", POINTS)
def test_tp4dp2(point: str, rank: int) -> None:
    """Three ranks of four go on until the fourth is back."""
    cluster = lives_on(f"tp4dp2 steps=6 seed={rank} kill:rank={rank},step=2,point={point}")
    plans = survivor(cluster).plans
    assert sizes(plans[0]) == [3, 4] and sizes(plans[-1]) == [4, 4]


@pytest.mark.parametrize("rank", range(8))
@pytest.mark.parametrize("point", POINTS)
def test_tp2pp2dp2(point: str, rank: int) -> None:
    """One rank of two goes on, and exchanges activations with cells of two."""
    cluster = lives_on(f"tp2pp2dp2 steps=6 seed={rank} kill:rank={rank},step=2,point={point}")
    plans = survivor(cluster).plans
    assert sizes(plans[0]) == [1, 2, 2, 2] and sizes(plans[-1]) == [2, 2, 2, 2]
