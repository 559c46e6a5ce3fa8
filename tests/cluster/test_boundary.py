"""A user's request is carried out at a boundary, by all ranks alike (``engine/transaction/boundary.py``)."""

from __future__ import annotations

import pytest

from megatron.elastic.engine.transaction.boundary import Boundary
from tests.cluster.checks import check
from tests.cluster.cluster import Program, RankProcess, run


def test_a_job_that_is_to_end_ends_at_one_boundary() -> None:
    cluster = run("steps=50 seed=2 drain:step=2")
    last = {max(process.results) for process in cluster.finished}
    assert len(cluster.finished) == 4 and len(last) == 1 and 3 <= last.pop() < 50


def test_a_rank_leaves_when_its_state_is_elsewhere() -> None:
    cluster = run("steps=9 seed=1 drain:rank=3,step=1")
    check(cluster, settled=True)
    assert {process.rank for process in cluster.finished} == {0, 1, 2}
    left = next(process for process in cluster.processes if process.rank == 3)
    assert left.error is None and 1 < max(left.results) < 9


def test_ranks_that_are_needed_do_not_leave() -> None:
    cluster = run("steps=6 seed=1 migrate_after=-1 drain:rank=0|1,step=1")
    check(cluster, settled=True)
    assert len(cluster.finished) == 4
    assert all(any("cannot leave" in line for line in process.notices) for process in cluster.finished)


def test_a_rank_is_killed_while_another_leaves() -> None:
    """Two mirrors: what the one that leaves has handed on, and what it has not, outlives the other."""
    cluster = run("steps=12 seed=4 mirrors=2 kill:rank=1,step=3,point=after_ship drain:rank=2,step=1")
    check(cluster)
    assert 2 not in {process.rank for process in cluster.finished}


def test_a_rank_comes_and_one_leaves_at_the_same_boundary() -> None:
    """Both were agreed in one vote. The newcomer begins behind that boundary, and cannot ask there for the leaving."""
    cluster = run(
        "pp3dp2 steps=9 seed=600012 back=0.03 heavy=on migrate_after=0 verify_interval=1 "
        "kill:rank=3,step=2,point=before_reduce drain:rank=3,step=2"
    )
    check(cluster)
    assert 3 not in {process.rank for process in cluster.finished}


def test_a_boundary_that_is_crossed_again_changes_nothing() -> None:
    """Requests that a vote agreed on are carried out once: the same generations, the same migrations, the same end."""

    def cross_again(rank: RankProcess, step: int) -> None:
        engine = rank.engine
        assert engine is not None
        boundary: Boundary = engine._boundary
        if step > 1:
            boundary.cross()
            settled = (engine.view, engine.context.acted_on, engine._migrator.under_way)
            boundary.cross()
            assert settled == (engine.view, engine.context.acted_on, engine._migrator.under_way)

    scenario = "steps=9 seed=1 checkpoint:step=2 drain:rank=3,step=3"
    once, often = run(scenario), run(scenario, Program(fenced=cross_again))
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

    fault = "kill:rank=1,step=2,point=after_reduce"
    cluster = run(f"steps=10 seed=1 back=never heavy=on migrate_after={patience} {fault}", Program(fenced=note))
    check(cluster)
    assert bool(changed) == moves
    assert not changed or 2 + patience < min(changed) <= 2 + patience + 4
