"""The order in which all ranks start the sums of units, and the action after which a gradient is final."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from megatron.elastic.plan.model import Cell, Grid, Op, Plan, Profile, Replica, Segment, Topology, UnitCost
from megatron.elastic.plan.policies.registry import choice_of, policy_named
from megatron.elastic.plan.schedule.finishing import GRADIENT_OPS, final_actions, finishing_order

UNITS = 8
PROFILE = Profile((UnitCost(100, 200, 100, 1, 1, 1, 1),) * UNITS)


def plan(stages: int, data: int, lost: Sequence[int] = (), chunks: int = 1, split: bool = False) -> Plan:
    """The plan after ``lost`` cells are gone; ``chunks`` of each stage are dealt as an interleaved schedule does.

    ``split``: weight gradients are computed apart.
    """
    cuts = list(pairwise(UNITS * part // (stages * chunks) for part in range(stages * chunks + 1)))
    replicas = tuple(
        Replica(tuple(Segment(replica * stages + part % stages, *cut) for part, cut in enumerate(cuts)))
        for replica in range(data)
    )
    cells = tuple(Cell(number, (number,)) for number in range(stages * data) if number not in lost)
    choose = choice_of(policy_named("elaswave"), split_backward=split)
    return choose(Topology(Grid(4 * data, 1, data), UNITS, cells, replicas), PROFILE)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("lost", [(), (1,), (0, 5)])
@pytest.mark.parametrize(("stages", "data", "chunks"), [(1, 6, 1), (2, 3, 1), (2, 3, 2), (3, 2, 1)])
def test_no_gradient_of_a_unit_is_computed_after_it_is_final(
    split: bool, lost: tuple[int, ...], stages: int, data: int, chunks: int
) -> None:
    found = plan(stages, data, lost, chunks, split)
    pieces = {piece.id: piece for piece in found.pieces}
    for cell, table in found.tables:
        final = final_actions(found, cell)
        done: set[int] = set()
        for index, action in enumerate(table):
            piece = pieces[action.piece]
            if action.op in GRADIENT_OPS:
                assert not done & set(range(piece.first, piece.end))
            done |= final.get(index, frozenset())
        computed = [pieces[action.piece] for action in table if action.op is Op.FORWARD]
        assert done == {unit for piece in computed for unit in range(piece.first, piece.end)}


def test_one_stage_is_finished_from_its_end_and_shared_weights_last() -> None:
    order = finishing_order(plan(1, 2), range(UNITS + 1), UNITS)
    assert order == (*reversed(range(UNITS)), UNITS)


def test_an_interleaved_stage_is_finished_chunk_by_chunk() -> None:
    order = finishing_order(plan(2, 2, chunks=2), range(UNITS), UNITS)
    first_stage = [unit for unit in order if unit in (0, 1, 4, 5)]
    assert first_stage == [5, 4, 1, 0]


def test_a_cell_that_waits_has_no_final_action() -> None:
    assert final_actions(plan(1, 2), 7) == {}


def test_a_unit_that_no_cell_computes_is_first() -> None:
    assert finishing_order(plan(1, 2), [3, UNITS - 1, UNITS + 4, 99], 100)[0] in (UNITS + 4, 99)


def test_ranks_that_start_in_one_order_never_wait_in_a_circle() -> None:
    """Each rank runs its sums one after the other, the strictest transport; any groups, gradients in any order."""
    dice = random.Random(5)
    for _ in range(200):
        ranks = range(dice.randint(2, 6))
        groups = [frozenset(dice.sample(ranks, dice.randint(2, len(ranks)))) for _ in range(dice.randint(1, 8))]
        finished = {rank: dice.sample(range(len(groups)), len(groups)) for rank in ranks}
        waiting = {rank: [number for number, members in enumerate(groups) if rank in members] for rank in ranks}
        known: dict[int, set[int]] = {rank: set() for rank in ranks}
        while any(waiting.values()):
            moved = False
            for rank in ranks:
                if finished[rank]:
                    known[rank].add(finished[rank].pop())
                    moved = True
            for number, members in enumerate(groups):
                here = all(waiting[rank][:1] == [number] and number in known[rank] for rank in members)
                if here and any(number in waiting[rank] for rank in members):
                    for rank in members:
                        waiting[rank].pop(0)
                    moved = True
            assert moved, "a circle"
