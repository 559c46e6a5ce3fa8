"""The interleaved table is the order Megatron's own schedule goes in, and cannot wait for itself."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

from hypothesis import assume, given
from hypothesis import strategies as st
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.mcore.parallel_state.stage import GroupStandIn
from megatron.elastic.plan.model import Grid, Op, Plan
from megatron.elastic.plan.planner import instant_plan
from megatron.elastic.plan.schedule.validate import validate_plan

Pass = tuple[bool, int, int]
"""(backward, micro-batch of the replica, model chunk)."""


def launch(stages: int, chunks: int, groups: int, data: int) -> LaunchTopology:
    """One layer a chunk, ``groups`` times as many micro-batches as stages, of two rows."""
    depth = stages * chunks
    ends = [0, *range(2, depth + 1), depth + 2]
    return LaunchTopology(1, stages, data, tuple(pairwise(ends)), Grid(2 * groups * stages * data, 2, data))


def megatrons(stage: int, stages: int, chunks: int, count: int) -> list[Pass]:
    """One rank's forwards and backwards in the order of ``forward_backward_pipelining_with_interleaving``."""
    links = SimpleNamespace(pp_group=GroupStandIn(stage, stages), virtual_pipeline_model_parallel_size=chunks)
    total, _, warm_up, left = get_pp_rank_microbatches(count, chunks, stages, p2p_communicator=links)
    table = get_schedule_table(count, chunks, stages)
    forwards = [(False, microbatch, chunk) for microbatch, chunk in table]
    backwards = [(True, microbatch, chunks - 1 - chunk) for microbatch, chunk in table]
    steady = [each for k in range(left) for each in (forwards[warm_up + k], backwards[k])]
    assert total == len(table) == warm_up + left
    return [*forwards[:warm_up], *steady, *backwards[left:]]


def ours(plan: Plan, nominal: LaunchTopology, replica: int, stage: int) -> list[Pass]:
    chunk_of = {first: number // nominal.pipeline for number, (first, _) in enumerate(nominal.chunks)}
    found = []
    for action in plan.table(nominal.cell(replica, stage).id):
        if action.op in (Op.FORWARD, Op.BACKWARD):
            piece = plan.pieces[action.piece]
            microbatch = nominal.grid.nominal_microbatch(piece.rows[0]) // nominal.data
            found.append((action.op is Op.BACKWARD, microbatch, chunk_of[piece.first]))
    return found


SIZES = st.tuples(st.integers(2, 5), st.integers(2, 4), st.integers(1, 3), st.integers(1, 3))


@given(SIZES)
def test_the_launch_runs_in_megatrons_order(sizes: tuple[int, int, int, int]) -> None:
    stages, chunks, groups, data = sizes
    nominal = launch(*sizes)
    everybody = range(nominal.slots)
    plan = instant_plan(Assignment.at_launch(nominal).topology(everybody))
    validate_plan(plan, nominal.compute_units)
    for replica in range(data):
        for stage in range(stages):
            assert ours(plan, nominal, replica, stage) == megatrons(stage, stages, chunks, groups * stages)


@given(SIZES, st.booleans(), st.data())
def test_no_table_after_losses_waits_for_itself(
    sizes: tuple[int, int, int, int], split: bool, draw: st.DataObject
) -> None:
    """As long as each stage has a living cell. The validator runs the tables: all end, within memory, units once."""
    nominal = launch(*sizes)
    assignment = Assignment.at_launch(nominal)
    lost = draw.draw(st.sets(st.sampled_from(range(nominal.slots))))
    living = [rank for rank in range(nominal.slots) if rank not in lost]
    assume(not assignment.uncovered(living))
    validate_plan(instant_plan(assignment.topology(living), split_backward=split), nominal.compute_units)
