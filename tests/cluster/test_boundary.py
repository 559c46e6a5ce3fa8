"""What users ask for is done at a boundary, by all ranks alike (``engine/transaction/boundary.py``)."""

from __future__ import annotations

import pytest

from megatron.elastic.control.events import Wanted
from megatron.elastic.control.requests import Drain, SaveCheckpoint
from megatron.elastic.engine.transaction.boundary import Boundary
from tests.cluster.checks import check
from tests.cluster.cluster import RankProcess, Scenario, run


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


def test_a_boundary_that_is_crossed_again_changes_nothing() -> None:
    """What a vote has agreed on is done once: the same generations, the same migrations, the same end."""

    def cross_again(rank: RankProcess, step: int) -> None:
        engine = rank.engine
        assert engine is not None
        boundary: Boundary = engine._boundary
        if step > 1:
            boundary.cross()
            settled = (engine.view, engine.context.acted_on, engine._migrator.under_way)
            boundary.cross()
            assert settled == (engine.view, engine.context.acted_on, engine._migrator.under_way)

    wishes = ((2, Wanted(SaveCheckpoint())), (3, Wanted(Drain((3,)))))
    once = run(Scenario(wishes=wishes, steps=9, seed=1))
    often = run(Scenario(wishes=wishes, steps=9, seed=1, fenced=cross_again))
    for cluster in (once, often):
        check(cluster, settled=True)
        assert {process.rank for process in cluster.finished} == {0, 1, 2}
    ends = [{process.engine.view.generation for process in c.finished if process.engine} for c in (once, often)]
    assert ends[0] == ends[1] and len(ends[0]) == 1


@pytest.mark.parametrize(("patience", "moves"), [(1, True), (4, True), (50, False), (-1, False)])
def test_layers_move_only_after_so_many_steps_as_the_user_waits_for_lost_ranks(patience: int, moves: bool) -> None:
    """``--elastic-migrate-after``: counted from the step in which the loss was settled."""
    changed: set[int] = set()

    def note(rank: RankProcess, step: int) -> None:
        assert rank.engine is not None
        if not rank.engine.view.assignment.is_nominal:
            changed.add(step)

    faults = "kill:rank=1,step=2,point=after_reduce"
    settings = {"migrate_after": patience}
    cluster = run(Scenario(faults, 1, steps=10, heavy=True, respawn_after=None, fenced=note, settings=settings))
    check(cluster)
    assert bool(changed) == moves
    assert not changed or 2 + patience < min(changed) <= 2 + patience + 4
