"""A cell that has lost ranks goes on with its living ones in the same step, and has all its ranks as they return."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.inject import STEP_POINTS
from megatron.elastic.plan.model import Plan
from tests.cluster.checks import check
from tests.cluster.cluster import Cluster, RankProcess, run
from tests.cluster.test_random import DELAYS, QUICK, SEEDS, kills

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


@pytest.mark.parametrize("layout", ["tp4dp1", "tp2pp2dp1"])
def test_the_only_replica_goes_on_without_waiting(layout: str) -> None:
    """With its cell parked, a stage would have no rank left to compute it."""
    cluster = lives_on(f"{layout} steps=4 back=never mirrors=2 kill:rank=1,step=2,point=mid_reduce")
    assert {process.rank for process in cluster.finished} == {0, 2, 3}
    assert sizes(survivor(cluster).plans[-1]) == ([3] if layout == "tp4dp1" else [1, 2])


@QUICK
@given(st.lists(kills(), min_size=1, max_size=3).map(" ".join), SEEDS, DELAYS, st.sampled_from(["tp2dp2", "tp4dp1"]))
def test_scripts_of_kills_and_returns(script: str, seed: int, back: float, layout: str) -> None:
    lives_on(f"{layout} steps=4 seed={seed} back={back} mirrors=3 migrate_after=1 {script}")
