"""Homes of experts: even at the launch, on the survivors of each crew after losses, even again when all are back.

They may also follow the measured load. Then each rank has as many experts as before.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.compute.model_interface import Crew
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.plan.model import Grid

EXPERTS = 24


def launched(
    size: int, groups: int, stages: int, tensor: int = 1, parts: int = 1, copies: int = 1, context: int = 1
) -> Assignment:
    """``size`` adjacent replicas share experts, each a part on ``parts`` ranks, and ``copies`` times in a cell."""
    cuts = tuple((2 * stage, 2 * stage + 2) for stage in range(stages))
    data, homes = size * groups, size * tensor * context // (parts * copies)
    sizes = LaunchTopology(tensor, stages, data, cuts, Grid(data, 1, data), context=context)
    return Assignment.at_launch(replace(sizes, experts=EXPERTS, expert_homes=homes, expert_parts=parts))


def crew_of(assignment: Assignment, rank: int) -> Crew:
    """The crew of a rank that has one."""
    place = assignment.place(rank)
    assert place is not None and place.crew is not None
    return place.crew


@given(size=st.sampled_from((2, 3)), groups=st.integers(1, 3), stages=st.integers(1, 2), draw=st.data())
def test_each_crew_has_each_expert_once_and_survivors_keep_theirs(
    size: int, groups: int, stages: int, draw: st.DataObject
) -> None:
    before = launched(size, groups, stages)
    ranks = range(size * groups * stages)
    living = draw.draw(st.sets(st.sampled_from(ranks), min_size=1))
    after = before.crewed(living)
    for rank in living:
        crew = crew_of(after, rank)
        assert set(crew.ranks) <= living
        assert sorted(expert for mine in crew.experts for expert in mine) == list(range(EXPERTS))
        counts = [len(mine) for mine in crew.experts]
        assert max(counts) - min(counts) <= 1
        kept = crew_of(before, rank).experts_of(rank)
        assert set(kept) <= set(crew.experts_of(rank)), "an expert stays where it is"
    assert after.crewed(ranks) == before, "homes are even when all ranks are back"
    assert (after.digest() == before.digest()) == (after == before)


CELLS = ((2, 1, 1), (2, 1, 2), (4, 1, 1), (4, 1, 2), (4, 1, 4), (1, 2, 1), (2, 2, 2))
"""(tensor-parallel size, parts of the sequence, ranks with a part of each expert)."""


@given(
    size=st.sampled_from((1, 2, 3)),
    groups=st.integers(1, 2),
    stages=st.integers(1, 2),
    cell=st.sampled_from(CELLS),
    draw=st.data(),
)
def test_cells_of_several_ranks_have_each_expert_cut_or_whole(
    size: int, groups: int, stages: int, cell: tuple[int, int, int], draw: st.DataObject
) -> None:
    """A cell that has lost a rank leaves its experts to the others, and its other ranks have none."""
    tensor, context, parts = cell
    before = launched(size, groups, stages, tensor, parts, context=context)
    ranks = tensor * context * size * groups * stages
    living = draw.draw(st.sets(st.sampled_from(range(ranks)), min_size=ranks // 2))
    after = before.crewed(living)
    computing = {rank for cell in after.whole(living) for rank in after.cells[cell].ranks}
    for rank in computing:
        crew = crew_of(after, rank)
        assert set(crew.ranks) <= computing
        found = Counter(expert for mine in crew.experts for expert in mine)
        assert found == Counter(dict.fromkeys(range(EXPERTS), parts))
        counts = [len(mine) for mine in crew.experts]
        assert max(counts) - min(counts) <= 1
        assert set(crew_of(before, rank).experts_of(rank)) <= set(crew.experts_of(rank)), "an expert stays where it is"
    launch = after.launch_topology
    spaces = [launch.expert_shard(expert, at) for expert in range(EXPERTS) for at in range(parts)]
    assert spaces == list(range(len(launch.shards), len(launch.shards) + parts * EXPERTS)), "behind the other spaces"


@given(cell=st.sampled_from(((4, 1, 1, 2), (4, 1, 2, 2), (4, 1, 1, 4), (2, 2, 1, 2))), groups=st.integers(1, 2))
def test_a_cell_may_have_all_experts_several_times(cell: tuple[int, int, int, int], groups: int) -> None:
    """Adjacent ranks exchange tokens, and a space of state has holders in each of their groups."""
    tensor, context, parts, copies = cell
    before = launched(1, groups, 2, tensor, parts, copies, context)
    size, launch = tensor * context // copies, before.launch_topology
    holders = Counter[int]()
    for rank in range(launch.slots // 2):
        crew = crew_of(before, rank)
        first = rank - rank % size
        assert crew.ranks == tuple(range(first, first + size))
        found = Counter(expert for mine in crew.experts for expert in mine)
        assert found == Counter(dict.fromkeys(range(EXPERTS), parts))
        assert crew.experts_of(rank) == launch.experts_of_seat(launch.expert_seat(rank))
        holders.update(launch.expert_shard(expert, rank) for expert in crew.experts_of(rank))
    assert set(holders.values()) == {copies * groups}
    spaces = before.state_groups(lambda unit, position: (0,))
    assert {len(spaces[1, shard]) for shard in holders} == {copies * groups}
    assert before.crewed(range(1, launch.slots)) == before, "other cells have all experts, so none has another home"


def test_an_expert_has_a_group_of_its_homes() -> None:
    before = launched(2, 2, 1)
    launch, covered = before.launch_topology, lambda unit, position: (0,)
    groups = before.crewed({0, 2, 3}).state_groups(covered)
    assert groups[1, launch.expert_shard(0)] == (0, 2)
    assert groups[1, launch.expert_shard(EXPERTS - 1)] == (0, 1, 3), "a missing rank counts where it was"
    assert groups[1, 0] == (0, 1, 2, 3)


def skewed(assignment: Assignment, hot: int) -> dict[int, tuple[int, ...]]:
    """A load of all units: the first ``hot`` experts receive ten times as many tokens as the others."""
    units = range(assignment.launch_topology.compute_units)
    return dict.fromkeys(units, tuple(100 if expert < hot else 10 for expert in range(EXPERTS)))


@given(size=st.sampled_from((2, 3)), groups=st.integers(1, 3), stages=st.integers(1, 2), draw=st.data())
def test_homes_that_follow_the_load_are_even_in_it(size: int, groups: int, stages: int, draw: st.DataObject) -> None:
    before = launched(size, groups, stages)
    ranks = range(size * groups * stages)
    load = skewed(before, size * draw.draw(st.integers(1, 2)))
    after = before.evened(load)
    assert after.evened(load) == after and after.digest() != before.digest()
    assert after.imbalance(load) == 1.0 and before.imbalance(load) > 1.2
    for rank in ranks:
        crew = crew_of(after, rank)
        assert crew.ranks == crew_of(before, rank).ranks
        assert sorted(expert for mine in crew.experts for expert in mine) == list(range(EXPERTS))
        assert {len(mine) for mine in crew.experts} == {EXPERTS // size}
    assert len({crew_of(after, rank).experts for rank in ranks}) == 1, "every crew of a load has the same homes"
    assert after.crewed(ranks) == after, "a change of members without a loss moves no expert"


@given(size=st.sampled_from((2, 3)), groups=st.integers(1, 2), draw=st.data())
def test_a_loss_deals_the_experts_of_homes_that_follow_the_load(size: int, groups: int, draw: st.DataObject) -> None:
    """Survivors keep theirs. When the lost rank is back its crew has the homes of the launch, the others theirs."""
    before = launched(size, groups, 1)
    even = before.evened(skewed(before, EXPERTS // size))
    ranks = range(size * groups)
    living = set(ranks) - {draw.draw(st.sampled_from(ranks))}
    after = even.crewed(living)
    for rank in living:
        crew = crew_of(after, rank)
        assert sorted(expert for mine in crew.experts for expert in mine) == list(range(EXPERTS))
        assert set(crew_of(even, rank).experts_of(rank)) <= set(crew.experts_of(rank))
    back = after.crewed(ranks)
    for rank in ranks:
        harmed = set(crew_of(before, rank).ranks) - living
        assert crew_of(back, rank) == crew_of(before if harmed else even, rank)


def test_experts_dealt_for_a_missing_rank_are_evened_among_the_others() -> None:
    before = launched(3, 1, 1).crewed({0, 1})
    load = {0: (100,) * 8 + (1,) * 16, 1: (100,) * 8 + (1,) * 16}
    after = before.evened(load)
    assert after.imbalance(load) < 1.1 < before.imbalance(load)
    assert {len(crew_of(after, rank).experts_of(rank)) for rank in (0, 1)} == {EXPERTS // 2}
    assert after.crewed({0, 1}) == before, "the next decision deals them anew"


def test_a_spare_takes_the_homes_of_the_cell_that_it_replaces() -> None:
    cuts, grid = ((0, 2),), Grid(2, 1, 2)
    before = Assignment.at_launch(LaunchTopology(1, 1, 2, cuts, grid, extra=1, experts=EXPERTS, expert_homes=2))
    even = before.evened(skewed(before, EXPERTS // 2))
    seated = even.undamaged().seated({0, 2}).crewed({0, 2})
    assert crew_of(seated, 2).experts == crew_of(even, 0).experts and crew_of(seated, 2).ranks == (0, 2)


def test_a_cell_with_all_experts_has_nothing_to_even() -> None:
    before = launched(1, 2, 1, tensor=2, parts=1)
    load = skewed(before, EXPERTS // 2)
    assert before.evened(load) == before and before.imbalance(load) > 1.5
    assert before.imbalance({}) == 1.0


def test_experts_move_only_if_a_rank_has_less_to_do_then() -> None:
    """Cells of two ranks, each of which has half of the cell's experts: one expert has most of the load."""
    before = launched(2, 1, 1, tensor=2)
    load = dict.fromkeys(range(2), tuple(600 if expert == 0 else 10 for expert in range(EXPERTS)))
    assert before.imbalance(load) > 2.0 and before.evened(load) == before
    cut = launched(2, 1, 1, tensor=2, parts=2)
    load = skewed(cut, 4)
    assert cut.evened(load).imbalance(load) == 1.0, "each cell is one home"
