"""Communication behind computation: a kill at any point of it, and any orders, end as the undisturbed run does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.inject import STEP_POINTS
from tests.cluster.checks import check
from tests.cluster.cluster import run
from tests.cluster.history import run_and_judge
from tests.cluster.test_random import LONG, QUICK, SEEDS, scripts

BEHIND = "overlap=both bucket_elements=1"
POINTS = ("mid_overlap_reduce", "mid_overlap_gather")


@pytest.mark.parametrize("layout", ["dp4", "pp2dp2", "tp2dp2"])
def test_undisturbed_the_results_have_the_bits_of_a_run_without(layout: str) -> None:
    plain, behind = run(layout), run(f"{layout} {BEHIND}")
    check(behind, settled=True)
    assert [process.results for process in behind.finished] == [process.results for process in plain.finished]
    assert [process.norm for process in behind.finished] == [process.norm for process in plain.finished]
    assert all(behind.reached[rank, point] for rank in range(4) for point in POINTS)


@pytest.mark.parametrize("point", [*POINTS, "mid_reduce", "after_vote", "mid_gather"])
@pytest.mark.parametrize("rank", range(4))
def test_a_kill_behind_computation(point: str, rank: int) -> None:
    """``nth``: when some units are through, and others not."""
    cluster = run(f"steps=3 seed={rank} back=never {BEHIND} kill:rank={rank},step=2,point={point}")
    assert {process.rank for process in cluster.finished} == set(range(4)) - {rank}
    assert all(process.recoveries for process in cluster.finished)
    check(cluster, settled=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp4", "pp2dp2", "tp2dp2", "pp4dp1", "tp2pp2dp1"])
@pytest.mark.parametrize("nth", range(1, 4))
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("point", [*POINTS, *STEP_POINTS, "between_steps", "in_evaluate"])
def test_a_kill_at_each_point_in_each_layout(layout: str, point: str, rank: int, nth: int) -> None:
    back = "soon" if layout.endswith("dp1") else "never"
    check(run(f"{layout} seed={nth} back={back} {BEHIND} kill:rank={rank},step=2,point={point},nth={nth}"))


def survives(script: str, seed: int, back: float, more: str) -> None:
    run_and_judge(f"steps=4 seed={seed} back={back} mirrors=3 migrate_after=1 {BEHIND} {more} {script}")


@QUICK
@given(scripts(most=3), SEEDS, st.sampled_from(["dp4", "pp2dp2", "heavy=on", "snapshot=state"]))
def test_kills_in_any_order(script: str, seed: int, more: str) -> None:
    survives(script, seed, 0.05, more)


@pytest.mark.slow
@LONG
@given(
    scripts(most=3),
    SEEDS,
    st.sampled_from([0.01, 0.05, 0.3]),
    st.sampled_from(["dp4", "dp3", "heavy=on", "tp2dp2", "exact=on", "snapshot=state", "spares=1"]),
)
def test_many_kills_in_any_order(script: str, seed: int, back: float, more: str) -> None:
    survives(script, seed, back, more)
