"""Cells go on with other numbers of ranks than at the launch, and state stays what it was.

The ranks are told which cells to form: between two steps all begin the migration to the same assignment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.state.layout import BlockKey
from tests.cluster.checks import check
from tests.cluster.cluster import Cluster, Program, RankProcess, run

Formed = tuple[tuple[int, tuple[int, ...]], ...]

FORMED: Mapping[str, Formed] = {
    "one rank less": ((1, (2,)),),
    "the second rank alone": ((1, (3,)),),
    "one rank each": ((0, (1,)), (1, (3,))),
    "three and one": ((0, (0, 1, 2)), (1, (3,))),
    "one cell of all ranks": ((0, (2, 0, 3, 1)), (1, ())),
    "ranks exchanged": ((0, (3, 1)), (1, (0, 2))),
}
"""Cells over the ranks of tp2dp2, whose launch has cells (0, 1) and (2, 3)."""


def engine_of(rank: RankProcess) -> Engine:
    assert rank.engine is not None
    return rank.engine


def launched(engine: Engine, formed: Formed) -> Assignment:
    """The units of the launch on the cells ``formed``."""
    return replace(Assignment.at_launch(engine.views.launch_topology), formed=formed)


def move_to(engine: Engine, target: Assignment) -> None:
    """Take ``target`` into force between two steps, on all ranks."""
    at, migrator = engine.context, engine._migrator
    if migrator.begin(at.views.migration(at.view, target)):
        migrator.conclude()
        migrator.arrive()
        dist.barrier(group=at.tools.fabric.world)
        migrator.confirm()
        at.body.gather(at.record.version)
        at.parameters = at.record.version
        migrator.prove()


def masters(engine: Engine) -> dict[BlockKey, torch.Tensor]:
    pool = engine.tools.pool
    return {block.key: pool.get(block.key).state.clone() for block in engine.view.owned}


def parameters(engine: Engine) -> torch.Tensor:
    arena = engine.tools.arena
    return arena.parameters[: arena.state_stop].clone()


@pytest.mark.parametrize("formed", FORMED.values(), ids=FORMED.keys())
def test_training_goes_on_in_other_cells_and_back(formed: Formed) -> None:
    """Losses and norms are those of the undisturbed job, but for the order of additions."""
    computing: dict[int, set[tuple[tuple[int, ...], ...]]] = {}
    back: set[int] = set()
    """Ranks that have begun the way back."""

    def fenced(rank: RankProcess, step: int) -> None:
        engine = engine_of(rank)
        if step == 2:
            assert engine._migrator.begin(engine.views.migration(engine.view, launched(engine, formed)))
        elif step >= 5 and rank.rank not in back and not engine._migrator.under_way:
            assert engine._migrator.begin(engine.views.migration(engine.view, launched(engine, ())))
            back.add(rank.rank)
        computing.setdefault(step, set()).add(tuple(cell.ranks for cell in engine.view.plan.cells))

    # A cell of one rank never waits while it computes, so its streams get few turns: in three of ten orders they never
    # catch up with the steps.
    cluster = run("tp2dp2 steps=40 seed=4", Program(fenced=fenced))
    check(cluster, settled=True)
    assert all(len(cells) == 1 for cells in computing.values()), f"ranks differ: {computing}"
    regular = ((0, 1), (2, 3))
    other = tuple(ranks for _, ranks in sorted({**dict(enumerate(regular)), **dict(formed)}.items()) if ranks)
    seen = [cells.pop() for _, cells in sorted(computing.items())]
    assert other in seen[2:8] and set(seen) == {regular, other} and seen[-1] == regular


@pytest.mark.parametrize("layout", ["tp2dp2", "tp4dp2", "tp2pp2dp2"])
def test_replicated_parameters_count_once_whatever_the_tensor_parallel_size(layout: str) -> None:
    """Losses and norms are those of the same model on one rank a replica."""
    whole = run("dp2 steps=5 seed=3", Program(cut=True)).finished[0]
    for process in run(f"{layout} steps=5 seed=4").finished:
        for step, result in process.results.items():
            wanted = whole.results[step]
            assert math.isclose(result.losses["loss"], wanted.losses["loss"], rel_tol=1e-6), step
            assert math.isclose(result.grad_norm, wanted.grad_norm, rel_tol=1e-5), step


@pytest.mark.parametrize("victim", [1, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (0, 2, 3))])
@pytest.mark.parametrize("formed", ["one rank less", "three and one"])
def test_a_rank_is_lost_and_comes_back_while_cells_are_formed(formed: str, victim: int) -> None:
    """A cell of two launch shards goes on alone; the newcomer takes the lost rank's place in its cell.

    No recovery forms the cells anew (``tensor=park``).
    """

    def fenced(rank: RankProcess, step: int) -> None:
        engine = engine_of(rank)
        if step == 2:
            assert engine._migrator.begin(engine.views.migration(engine.view, launched(engine, FORMED[formed])))

    scenario = f"tp2dp2 tensor=park steps=18 seed={victim} kill:rank={victim},step=8,point=before_vote"
    cluster = run(scenario, Program(fenced=fenced))
    check(cluster)
    assert {process.incarnation for process in cluster.finished if process.rank == victim} == {1}
    for process in cluster.finished:
        assert engine_of(process).view.assignment.formed == FORMED[formed]


def unchanged(layout: str, formed: tuple[Formed, ...], seed: int) -> Cluster:
    """Between two steps go through the cells ``formed`` and back to those of the launch."""

    def fenced(rank: RankProcess, step: int) -> None:
        if step != 2:
            return
        engine = engine_of(rank)
        before, values = masters(engine), parameters(engine)
        for cells in (*formed, ()):
            move_to(engine, launched(engine, cells))
        assert torch.equal(parameters(engine), values), f"rank {rank.rank}: other parameters"
        for key, state in masters(engine).items():
            held[key] = state
        wanted.update(before)

    wanted, held = dict[BlockKey, torch.Tensor](), dict[BlockKey, torch.Tensor]()
    cluster = run(f"{layout} steps=4 seed={seed} evaluate=0", Program(fenced=fenced))
    assert wanted.keys() == held.keys()
    assert all(torch.equal(wanted[key], held[key]) for key in wanted), "masters or moments differ"
    check(cluster)
    return cluster


@settings(max_examples=6, deadline=None)
@given(st.lists(st.sampled_from(sorted(FORMED.values())), min_size=1, max_size=3), st.integers(0, 1000))
def test_state_is_bitwise_unchanged_by_changes_of_cells_without_steps_between(formed: list[Formed], seed: int) -> None:
    unchanged("tp2dp2", tuple(formed), seed)


@pytest.mark.parametrize(
    "formed",
    [
        (((0, (0, 1, 3)),), ((0, (3, 0)),)),
        (((0, (2,)),), ((0, (1, 2, 3)),)),
    ],
    ids=["4, 3, 2, 4", "4, 1, 3, 4"],
)
def test_state_of_four_shards_is_bitwise_unchanged(formed: tuple[Formed, ...]) -> None:
    """Three ranks cover one shard and a third each, two ranks cover two."""
    unchanged("tp4dp1", formed, 5)
