"""A cell that has lost ranks goes on with its living ones in the same step, and has all its ranks as they return."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.control.membership import Decision
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.inject import KILL_POINTS, STEP_POINTS
from megatron.elastic.plan.model import Plan
from megatron.elastic.runtime import start
from megatron.elastic.runtime.assembly import EngineParts, Layouts, assemble
from megatron.elastic.runtime.connect import Links
from megatron.elastic.state.layout import BlockKey
from tests.cluster.checks import check, last_step, undisturbed
from tests.cluster.cluster import Cluster, Program, RankProcess, run
from tests.cluster.test_random import DELAYS, QUICK, SEEDS, kills

POINTS = (*STEP_POINTS, "between_steps", "in_evaluate")
COMMITTED = STEP_POINTS[STEP_POINTS.index("after_vote") :]
"""Points of a step at which it is committed: no sum of gradients is formed anew."""
RECOVERY = tuple(point for point in KILL_POINTS if point.startswith(("in_recovery", "in_migration")))
CELLS = {"tp4pp2dp1": [4, 4], "tp2pp2dp2": [2, 2, 2, 2], "tp4dp2": [4, 4]}
"""Layout → ranks of its cells. The first has no replica: the copies of a stage's state are with the other stage."""
BACK = ("soon", "never")
RANKS = range(8)
CASES = [(layout, point, rank, back) for layout in CELLS for point in POINTS for rank in RANKS for back in BACK]
SAMPLE = [(tuple(CELLS)[at % 3], point, 3 * at % 8, BACK[at % 2]) for at, point in enumerate(POINTS)]
"""Each point, with another layout and rank, returning or not."""


def sizes(plan: Plan) -> list[int]:
    """The numbers of ranks of the cells that compute, ascending."""
    computing = {piece.cell for piece in plan.pieces}
    return sorted(len(cell.ranks) for cell in plan.cells if cell.id in computing)


def engine_of(process: RankProcess) -> Engine:
    assert process.engine is not None
    return process.engine


def lives_on(scenario: str, program: Program = Program()) -> Cluster:  # noqa: B008 - immutable
    """The cluster after a run in which no committed step was lost and each sample counted once."""
    cluster = run(f"tensor=live-on heavy=on micro_batches=4 {scenario}", program)
    check(cluster)
    assert all(outcome.lost_steps == 0 for process in cluster.processes for outcome in process.recoveries)
    if last_step(cluster) == cluster.scenario.steps:
        ledger = engine_of(undisturbed(cluster.scenario, parts=program.parts)).record.ledger_hash
        assert {engine_of(process).record.ledger_hash for process in cluster.finished} == {ledger}
    return cluster


def survivor(cluster: Cluster) -> RankProcess:
    """A rank that was there all the time."""
    return next(process for process in cluster.finished if process.incarnation == 0)


def loses_a_rank(layout: str, point: str, rank: int, back: str, program: Program = Program()) -> None:  # noqa: B008
    """One cell goes on with a rank less, in the same step, until the rank is back."""
    where = f"seed={rank} back={back} kill:rank={rank},step=2,point={point}"
    plans = survivor(lives_on(f"{layout} steps={6 if back == 'soon' else 4} {where}", program)).plans
    size, *others = CELLS[layout]
    assert sizes(plans[0]) == [size - 1, *others]
    if back == "soon":
        assert sizes(plans[-1]) == CELLS[layout]


@pytest.mark.parametrize(("layout", "point", "rank", "back"), SAMPLE[::5])
def test_a_cell_goes_on_with_a_rank_less(layout: str, point: str, rank: int, back: str) -> None:
    loses_a_rank(layout, point, rank, back)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "point", "rank", "back"), CASES)
def test_at_every_point_every_rank_may_be_lost(layout: str, point: str, rank: int, back: str) -> None:
    loses_a_rank(layout, point, rank, back)


@pytest.mark.parametrize(("layout", "rank", "back"), [("tp4pp2dp1", 1, "soon"), ("tp2pp2dp2", 4, "never")])
def test_cells_that_cut_the_sequence_pass_it_to_cells_that_do_not(layout: str, rank: int, back: str) -> None:
    """Three ranks do not divide four positions: each of them has the whole sequence, as one rank alone has."""
    loses_a_rank(layout, "mid_backward", rank, back, Program(sequence=True))


SHARED = Program(parts=True)


@pytest.mark.parametrize(("layout", "point", "rank", "back"), SAMPLE[::7])
def test_a_cell_that_shares_the_sequence_goes_on_with_a_part_less(
    layout: str, point: str, rank: int, back: str
) -> None:
    """Of four parts three, of two one: the positions are cut anew, and cells of different size exchange them."""
    loses_a_rank(layout, point, rank, back, SHARED)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "point", "rank", "back"), CASES)
def test_at_every_point_where_cells_share_the_sequence(layout: str, point: str, rank: int, back: str) -> None:
    loses_a_rank(layout, point, rank, back, SHARED)


def test_cells_that_share_the_sequence_compute_what_one_rank_computes() -> None:
    """Four parts, and one."""
    results = [run(f"{layout} steps=3 micro_batches=4", SHARED).finished[0].results for layout in ("tp4dp1", "dp1")]
    for step, shared in results[0].items():
        assert shared.losses == pytest.approx(results[1][step].losses, rel=1e-6)
        assert shared.grad_norm == pytest.approx(results[1][step].grad_norm, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("layout", CELLS)
def test_at_every_point_where_cells_cut_the_sequence(layout: str, point: str, rank: int) -> None:
    loses_a_rank(layout, point, rank, "soon", Program(sequence=True))


@pytest.mark.parametrize("layout", ["tp4dp1", "tp2pp2dp1"])
def test_the_only_replica_goes_on_without_waiting(layout: str) -> None:
    """With its cell parked, a stage would have no rank left to compute it."""
    cluster = lives_on(f"{layout} steps=4 back=never mirrors=2 kill:rank=1,step=2,point=mid_reduce")
    assert {process.rank for process in cluster.finished} == {0, 2, 3}
    assert sizes(survivor(cluster).plans[-1]) == ([3] if layout == "tp4dp1" else [1, 2])


# -- state ---------------------------------------------------------------------------------------


def masters(cluster: Cluster) -> dict[BlockKey, torch.Tensor]:
    """Master and moments of each block, from its owner."""
    engines = [engine_of(process) for process in cluster.finished]
    return {block.key: engine.tools.pool.get(block.key).state for engine in engines for block in engine.view.owned}


@pytest.mark.parametrize("second", ["", pytest.param("kill:rank=2,point=in_recovery_edit", marks=pytest.mark.slow)])
@pytest.mark.parametrize("point", COMMITTED)
def test_state_has_the_bits_of_the_undisturbed_run(point: str, second: str) -> None:
    """The last step is committed before the loss: the survivors finish it, and form no sum anew."""
    scenario = f"tp4pp2dp1 steps=3 back=never mirrors=2 evaluate=0 kill:rank=1,step=3,point={point} {second}"
    cluster = lives_on(scenario)
    reference = masters(undisturbed(cluster.scenario).cluster)
    found = masters(cluster)
    assert found.keys() == reference.keys()
    assert all(torch.equal(found[key], reference[key]) for key in reference)


# -- several losses ------------------------------------------------------------------------------


@pytest.mark.parametrize("point", RECOVERY)
@pytest.mark.parametrize("layout", ["tp4pp2dp1", pytest.param("tp4dp2", marks=pytest.mark.slow)])
def test_a_second_rank_of_the_cell_is_lost_in_the_recovery(layout: str, point: str) -> None:
    """Four ranks, three, two."""
    first = "kill:rank=5,step=2,point=after_reduce"
    cluster = lives_on(f"{layout} steps=5 back=never mirrors=2 migrate_after=1 {first} kill:rank=7,point={point}")
    lost = {process.rank for process in cluster.processes} - {process.rank for process in cluster.finished}
    assert 5 in lost and (7 in lost or point == "in_migration_switch")
    assert sizes(survivor(cluster).plans[-1]) == [4 - len(lost), 4]


@pytest.mark.parametrize("layout", ["tp4pp2dp1", "tp4dp2"])
def test_a_cell_shrinks_grows_and_shrinks_again(layout: str) -> None:
    losses = "kill:rank=1,step=2,point=mid_backward kill:rank=3,step=6,point=after_vote"
    plans = survivor(lives_on(f"{layout} steps=12 seed=3 back=0.01 mirrors=2 {losses}")).plans
    seen = [sizes(plan) for plan in plans]
    assert seen[-1] == [4, 4] and seen.count([3, 4]) >= 2 and [4, 4] in seen[1 : seen.index([3, 4], 1)]


def test_a_newcomer_whose_admission_is_repeated_has_the_costs_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss cut its first admission short: its model is still that of the cell of three that it was to be in."""

    def assembled(
        links: Links, job: EngineParts, decision: Decision, layouts: Layouts, arena: Arena, *at: Any
    ) -> Engine:
        if links.decision is None:
            smaller = replace(job.launched, formed=((0, (0, 1, 2)),))
            arena.hold(smaller.held_by(links.fabric.rank, job.interface.covered))
        return assemble(links, job, decision, layouts, arena, *at)

    monkeypatch.setattr(start, assemble.__name__, assembled)
    scenario = "tp4dp2 steps=6 back=soon mirrors=2 kill:rank=1,step=2,point=before_vote"
    cluster = lives_on(scenario, Program(sequence=True))
    assert {process.incarnation for process in cluster.finished} == {0, 1}
    assert len({engine_of(process).views.profile for process in cluster.finished}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp4pp2dp1", "tp4dp2"])
def test_a_rank_of_a_cell_is_drained(layout: str) -> None:
    """Its state moves to the rest of its cell beside steps, also where no replica has it. Another rank is lost."""
    cluster = lives_on(f"{layout} steps=8 back=never mirrors=1 drain:rank=6,step=2 kill:rank=0,step=6,point=mid_update")
    assert {process.rank for process in cluster.finished} == {1, 2, 3, 4, 5, 7}
    assert sizes(survivor(cluster).plans[-1]) == [3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("layout", CELLS)
def test_a_rank_is_lost_again_while_it_is_let_in(layout: str, seed: int) -> None:
    """The cell had all its ranks for the time of a gather: the others need their larger parts again."""
    rank = f"rank={seed % 3 * 3}"
    again = f"kill:{rank},losses=0,point=mid_backward kill:{rank},rejoin=1,point=in_join"
    cluster = lives_on(f"{layout} steps=9 seed={seed} back={0.01 * (1 + seed % 3)} mirrors=2 {again}")
    assert max(process.incarnation for process in cluster.processes) == 2


@pytest.mark.slow
def test_a_spare_completes_a_damaged_cell() -> None:
    """Of four spares one has arrived when a rank is lost: it is no cell of its own."""
    scenario = "tp4pp2dp1 steps=6 back=never mirrors=2 spares=4 kill:rank=1,step=2,point=mid_reduce"
    last = survivor(lives_on(scenario)).plans[-1]
    assert {cell.ranks for cell in last.cells} == {(0, 2, 3, 8), (4, 5, 6, 7)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_losses_while_layers_move(seed: int) -> None:
    """Units cost so much that they are dealt anew to cells of unequal size."""
    point, second = POINTS[seed % len(POINTS)], RECOVERY[seed % len(RECOVERY)]
    layout = list(CELLS)[seed % len(CELLS)]
    ranks = f"kill:rank={seed % 8},step=2,point={point} kill:rank={(seed + 3) % 8},step=4,point={second}"
    lives_on(f"{layout} steps=7 seed={seed} mirrors=2 heavy=on migrate_after=1 back={BACK[seed % 2]} {ranks}")


@QUICK
@given(st.lists(kills(), min_size=1, max_size=3).map(" ".join), SEEDS, DELAYS, st.sampled_from(["tp2dp2", "tp4dp1"]))
def test_scripts_of_kills_and_returns(script: str, seed: int, back: float, layout: str) -> None:
    lives_on(f"{layout} steps=4 seed={seed} back={back} mirrors=3 migrate_after=1 {script}")
