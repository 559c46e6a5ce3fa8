"""Communication behind computation: a kill at any point of it, and any orders, end as the undisturbed run does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.inject import STEP_POINTS
from megatron.elastic.engine.transaction.background_gather import BackgroundGather
from megatron.elastic.engine.transaction.background_reduce import BackgroundReduce
from megatron.elastic.engine.transaction.shipment import Shipment
from megatron.elastic.engine.transaction.tools import Tools
from megatron.elastic.state.pool import StatePool
from tests.cluster.checks import check
from tests.cluster.cluster import run
from tests.cluster.fabric import ClusterFabric
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


def rank_of(tools: Tools) -> int:
    return tools.fabric.rank


@dataclass
class Calls:
    """Calls of methods in the order in which each rank made them."""

    patch: pytest.MonkeyPatch
    of: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))

    def watch(self, owner: type, method: str, rank_of: Callable[[Any], int]) -> None:
        """Note each call of ``owner.method`` as ``Owner.method``."""
        called = getattr(owner, method)

        def noted(one: Any, *args: Any, **kwargs: Any) -> Any:
            self.of[rank_of(one)].append(f"{owner.__name__}.{method}")
            return called(one, *args, **kwargs)

        self.patch.setattr(owner, method, noted)

    def each(self) -> Iterator[str]:
        """Yield the calls of one rank after the other as text."""
        for calls in self.of.values():
            yield " ".join(calls)


@pytest.mark.parametrize("layout", ["dp4", "pp2dp2"])
def test_sums_begin_and_leave_before_the_backward_is_over(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    calls.watch(ClusterFabric, "begin_reduce_scatter_blocks", lambda fabric: fabric.rank)
    calls.watch(BackgroundReduce, "complete", lambda reduce: rank_of(reduce._tools))
    calls.watch(Shipment, "advance", lambda shipment: rank_of(shipment._tools))
    calls.watch(Shipment, "complete", lambda shipment: rank_of(shipment._tools))
    run(f"{layout} {BEHIND}")
    assert len(calls.of) == 4
    for told in calls.each():
        *steps, after = told.split("BackgroundReduce.complete")
        assert len(steps) > 1
        assert all("ClusterFabric.begin_reduce_scatter_blocks Shipment.advance" in step for step in steps)
        assert "ClusterFabric.begin_reduce_scatter_blocks" not in after, "nothing was left to begin behind a backward"


def test_a_forward_waits_for_the_parameters_of_its_units_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    calls.watch(BackgroundGather, "wait_for", lambda gather: rank_of(gather._tools))
    calls.watch(BackgroundGather, "complete", lambda gather: rank_of(gather._tools))
    calls.watch(BackgroundReduce, "begin", lambda reduce: rank_of(reduce._tools))
    cluster = run(f"dp4 {BEHIND}")
    assert cluster.finished
    for told in calls.each():
        assert " ".join(["BackgroundReduce.begin", *["BackgroundGather.wait_for"] * 2]) in told


def test_blocks_that_were_not_reduced_are_not_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatePool, "retain_all", lambda pool, key, gradients, lender: None)
    with pytest.raises(BaseException, match="blocks are to be shipped that were not reduced"):
        run(f"dp4 steps=1 {BEHIND}")
