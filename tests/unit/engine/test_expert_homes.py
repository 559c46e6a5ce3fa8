"""Homes of experts: even at the launch, on the survivors of each crew after losses, even again when all are back.

They may also follow the measured load. Then each rank has as many experts as before, or a hot expert has replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.engine.compute.model_interface import Crew
from megatron.elastic.engine.generation.assignment import Assignment, ExpertPolicy
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.plan.model import Grid
from tests.unit.calls import calls_in

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
    after = before.balanced(load, "homes")
    assert after.balanced(load, "homes") == after and after.digest() != before.digest()
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
    even = before.balanced(skewed(before, EXPERTS // size), "homes")
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
    after = before.balanced(load, "homes")
    assert after.imbalance(load) < 1.1 < before.imbalance(load)
    assert {len(crew_of(after, rank).experts_of(rank)) for rank in (0, 1)} == {EXPERTS // 2}
    assert after.crewed({0, 1}) == before, "the next decision deals them anew"


def test_a_spare_takes_the_homes_of_the_cell_that_it_replaces() -> None:
    cuts, grid = ((0, 2),), Grid(2, 1, 2)
    before = Assignment.at_launch(LaunchTopology(1, 1, 2, cuts, grid, extra=1, experts=EXPERTS, expert_homes=2))
    even = before.balanced(skewed(before, EXPERTS // 2), "homes")
    seated = even.undamaged().seated({0, 2}).crewed({0, 2})
    assert crew_of(seated, 2).experts == crew_of(even, 0).experts and crew_of(seated, 2).ranks == (0, 2)


def test_a_cell_with_all_experts_has_nothing_to_even() -> None:
    before = launched(1, 2, 1, tensor=2, parts=1)
    load = skewed(before, EXPERTS // 2)
    assert before.balanced(load, "homes") == before and before.imbalance(load) > 1.5
    assert before.imbalance({}) == 1.0


def test_experts_move_only_if_a_rank_has_less_to_do_then() -> None:
    """Cells of two ranks, each of which has half of the cell's experts: one expert has most of the load."""
    before = launched(2, 1, 1, tensor=2)
    load = dict.fromkeys(range(2), tuple(600 if expert == 0 else 10 for expert in range(EXPERTS)))
    assert before.imbalance(load) > 2.0 and before.balanced(load, "homes") == before
    cut = launched(2, 1, 1, tensor=2, parts=2)
    load = skewed(cut, 4)
    assert cut.balanced(load, "homes").imbalance(load) == 1.0, "each cell is one home"


POLICIES: tuple[ExpertPolicy, ...] = ("replicas", "lazarus")


def with_replicas(assignment: Assignment, more: int = 2) -> Assignment:
    """The same assignment of a job whose ranks may have ``more`` experts than their share."""
    return replace(assignment, launch_topology=replace(assignment.launch_topology, expert_replicas=more))


def any_load(draw: st.DataObject, units: int) -> dict[int, tuple[int, ...]]:
    """A load of each unit by expert, mostly uneven."""
    seeds = draw.draw(st.lists(st.integers(0, 2**31), min_size=units, max_size=units))
    return {
        at: tuple(int(Random(seed + e).paretovariate(0.7) * 10) for e in range(EXPERTS))
        for at, seed in enumerate(seeds)
    }


def check_replicas(assignment: Assignment, ranks: Collection[int], room: int) -> None:
    """Every crew of living ranks has each expert in at least one whole home, and no rank more than its room."""
    for rank in ranks:
        crew = crew_of(assignment, rank)
        assert set(crew.replicas) == set(range(EXPERTS))
        assert all(0 < len(set(mine)) == len(mine) <= room for mine in crew.homes)
        assert all(crew.experts[at] == crew.homes[at // crew.cut] for at in range(len(crew.ranks)))


@settings(deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    size=st.sampled_from((2, 3, 4)),
    groups=st.integers(1, 2),
    stages=st.integers(1, 2),
    cell=st.sampled_from(((1, 1, 1), (2, 1, 1), (2, 1, 2))),
    draw=st.data(),
)
def test_no_loss_or_return_loses_an_expert_of_a_crew_with_replicas(
    policy: ExpertPolicy, size: int, groups: int, stages: int, cell: tuple[int, int, int], draw: st.DataObject
) -> None:
    """Loads, losses and returns in any order: every crew has all experts, in no more than its ranks' room."""
    tensor, context, parts = cell
    before = now = with_replicas(launched(size, groups, stages, tensor, parts, context=context))
    ranks = range(tensor * context * size * groups * stages)
    living, homes = set(ranks), before.deal.room(size)
    sets = tensor * context // parts
    for _ in range(draw.draw(st.integers(1, 4))):
        now = now.balanced(any_load(draw, 2 * stages), policy)
        check_replicas(now, computing(now, living), room_of(now, living, sets))
        living = draw.draw(st.sets(st.sampled_from(ranks), min_size=max(1, len(ranks) // 2)))
        now = now.crewed(living)
        check_replicas(now, computing(now, living), room_of(now, living, sets))
        assert now.crewed(living) == now or any(not mine for _, mine in now.rehomed)
    assert homes.most == EXPERTS // size + 2 * sets or homes.most == EXPERTS
    back = now.crewed(ranks).crewed(ranks)
    check_replicas(back, ranks, EXPERTS // (size * sets) + 2)


def computing(assignment: Assignment, living: Collection[int]) -> list[int]:
    return [rank for cell in assignment.whole(living) for rank in assignment.cells[cell].ranks]


def room_of(assignment: Assignment, living: Collection[int], sets: int) -> int:
    """The largest room of a rank: of the crew that has lost most cells."""
    whole = set(assignment.whole(living))
    present = min(len([cell for cell in crew if cell in whole]) or len(crew) for crew in assignment._crews)
    return -(-EXPERTS // (present * sets)) + 2


@given(size=st.sampled_from((2, 3, 4)), hot=st.integers(0, EXPERTS - 1), policy=st.sampled_from(POLICIES))
def test_an_expert_hotter_than_a_rank_has_replicas(size: int, hot: int, policy: ExpertPolicy) -> None:
    before = with_replicas(launched(size, 2, 1), 2 if policy == "replicas" else EXPERTS // size)
    load = dict.fromkeys(range(2), tuple(1000 if expert == hot else 10 for expert in range(EXPERTS)))
    after = before.balanced(load, policy)
    assert before.imbalance(load) > 1.5 and before.balanced(load, "homes") == before
    assert before.expert_replicas(0) == (1,) * EXPERTS
    if policy == "lazarus":
        assert min(after.expert_replicas(0)) >= 2, "there is room for two replicas of each"
        assert after.imbalance(load) < before.imbalance(load)
        return
    assert after.imbalance(load) < 1.1 and after.expert_replicas(0)[hot] == size
    assert after.balanced(load, policy) == after, "and stays so"
    hottest = after.state_groups()[0, after.launch_topology.expert_shard(hot)]
    assert set(hottest) == set(range(2 * size)), "all ranks hold its state's space"


def test_the_loss_of_a_replica_deals_no_expert_that_others_have() -> None:
    before = with_replicas(launched(4, 1, 1))
    load = dict.fromkeys(range(2), tuple(1000 if expert == 0 else 10 for expert in range(EXPERTS)))
    hot = before.balanced(load, "replicas")
    after = hot.crewed({1, 2, 3})
    lost = set(crew_of(hot, 0).experts_of(0))
    for rank in (1, 2, 3):
        gained = set(crew_of(after, rank).experts_of(rank)) - set(crew_of(hot, rank).experts_of(rank))
        assert 0 not in gained and gained <= lost
    last = after.crewed({3})
    assert crew_of(last, 3).experts_of(3) == tuple(range(EXPERTS)), "the last rank has every expert once"
    back = last.crewed(range(4))
    assert back == before, "replicas come back with the next review of the load"


def test_a_stage_without_experts_keeps_its_homes() -> None:
    before = with_replicas(launched(2, 1, 2), EXPERTS // 2)
    load = {2: tuple(1000 if expert == 0 else 10 for expert in range(EXPERTS))}
    for policy in POLICIES:
        after = before.balanced(load, policy)
        assert after.expert_replicas(2)[0] == 2 and max(after.expert_replicas(0)) == 1


def test_the_work_for_places_and_homes_grows_with_the_number_of_ranks_and_no_faster() -> None:
    def calls(size: int, groups: int) -> int:
        before = launched(size, groups, 1)
        load = {0: tuple(range(1, EXPERTS + 1))}
        return calls_in(lambda: (before.place(0), before.balanced(load, "lazarus")))

    few, larger, more = calls(2, 8), calls(24, 8), calls(2, 64)
    print(f"{few} calls for 8 crews of 2 ranks, {larger} for 8 of 24, {more} for 64 of 2")
    assert larger < 12 * few and more < 8.5 * few
