"""What users ask for is done at a boundary, by all ranks alike (``engine/transaction/boundary.py``)."""

from __future__ import annotations

from megatron.elastic.control.events import Wanted
from megatron.elastic.control.requests import Drain
from tests.cluster.checks import check
from tests.cluster.cluster import Scenario, run


def test_a_job_that_is_to_end_ends_at_one_boundary() -> None:
    cluster = run(Scenario(wishes=((2, Wanted(Drain())),), steps=50, seed=2))
    last = {max(process.results) for process in cluster.finished}
    assert len(cluster.finished) == 4 and len(last) == 1 and 3 <= last.pop() < 50


def test_a_rank_leaves_when_its_state_is_elsewhere() -> None:
    cluster = run(Scenario(wishes=((1, Wanted(Drain((3,)))),), steps=9, seed=1))
    check(cluster, settled=True)
    assert {process.rank for process in cluster.finished} == {0, 1, 2}
    left = next(process for process in cluster.processes if process.rank == 3)
    assert left.error is None and 1 < max(left.results) < 9


def test_ranks_that_are_needed_do_not_leave() -> None:
    cluster = run(Scenario(wishes=((1, Wanted(Drain((0, 1)))),), steps=6, seed=1, settings={"migrate_after": -1}))
    check(cluster, settled=True)
    assert len(cluster.finished) == 4
    assert all(any("cannot leave" in line for line in process.notices) for process in cluster.finished)


def test_a_rank_is_killed_while_another_leaves() -> None:
    """Two mirrors: what the one that leaves has handed on, and what it has not, outlives the other."""
    faults = "kill:rank=1,step=3,point=after_ship"
    scenario = Scenario(faults, 4, wishes=((1, Wanted(Drain((2,)))),), steps=12, settings={"mirrors": 2})
    cluster = run(scenario)
    check(cluster)
    assert 2 not in {process.rank for process in cluster.finished}


def test_a_rank_comes_and_one_leaves_at_the_same_boundary() -> None:
    """Both were agreed in one vote. The newcomer begins behind that boundary, and cannot ask there for the leaving."""
    wishes = ((2, Wanted(Drain((3,)))),)
    faults = "kill:rank=3,step=2,point=before_reduce"
    settings = {"migrate_after": 0, "verify_interval": 1}
    scenario = Scenario(
        faults, 600012, steps=9, pipeline=3, respawn_after=0.03, settings=settings, heavy=True, wishes=wishes
    )
    cluster = run(scenario)
    check(cluster)
    assert 3 not in {process.rank for process in cluster.finished}
