"""Placements stay balanced and redundant with little movement, whatever comes and goes."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.state.balance import balanced_owners
from megatron.elastic.state.layout import StateBlock
from megatron.elastic.state.ownership import (
    Copies,
    Placement,
    Rules,
    Transition,
    UnitGroup,
    after,
    initial,
    promote_only,
    rebalance,
)
from megatron.elastic.state.placement import Ownership
from tests.unit.calls import calls_in


def unit_groups(units: int, blocks: int, holders: list[int], shard: int = 0) -> list[UnitGroup]:
    def flat(unit: int) -> tuple[StateBlock, ...]:
        return tuple(StateBlock(unit, shard, i, 16 * i, 16 * (i + 1)) for i in range(blocks))

    return [UnitGroup(unit, shard, flat(unit), tuple(holders)) for unit in range(units)]


def same_domain(ranks: list[int], mirrors: int = 1, scatter: int = 4) -> Rules:
    return Rules(mirrors, scatter, dict.fromkeys(ranks, 0))


def owner_loads(placement: Placement, group: UnitGroup) -> dict[int, int]:
    counts = Counter(placement.owner(block.key) for block in group.blocks)
    assert set(counts) <= set(group.holders), "every owner computes the unit"
    return {rank: counts[rank] for rank in group.holders}


def check(placement: Placement, groups: list[UnitGroup], rules: Rules) -> None:
    living = len(rules.domains)
    for group in groups:
        loads = owner_loads(placement, group).values()
        assert max(loads) - min(loads) <= 1
        for block in group.blocks:
            ranks = placement.copies[block.key].ranks
            assert len(set(ranks)) == len(ranks) == 1 + min(rules.mirrors, living - 1)
            assert set(ranks) <= set(rules.domains)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 3), st.integers(1, 6))
def test_a_fresh_placement_is_balanced_and_every_owner_is_scattered_evenly(members, blocks, mirrors, scatter):
    ranks = list(range(10, 10 + members))
    rules, groups = same_domain(ranks, mirrors, scatter), unit_groups(3, blocks, ranks)
    placement = initial(groups, rules)
    check(placement, groups, rules)
    width = min(members - 1, max(scatter, mirrors))
    for group in groups:
        for owner in ranks:
            mine = [placement.copies[b.key] for b in group.blocks if placement.owner(b.key) == owner]
            spread = Counter(rank for copies in mine for rank in copies.mirrors)
            assert len(spread) <= width
            if mine and width:
                counts = [*spread.values(), *[0] * (width - len(spread))]
                assert max(counts) - min(counts) <= 1


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 8), st.integers(1, 30), st.integers(1, 2), st.data())
def test_any_single_loss_moves_nothing_and_loses_nothing(members, blocks, mirrors, data):
    ranks = list(range(members))
    placement = initial(unit_groups(3, blocks, ranks), same_domain(ranks, mirrors))
    dead = data.draw(st.sampled_from(ranks))
    left = [rank for rank in ranks if rank != dead]
    result = promote_only(placement, left, unit_groups(3, blocks, left))
    assert not result.lost
    assert {change.kind for change in result.transitions} <= {"promote"}
    for key, copies in result.placement.copies.items():
        assert set(copies.ranks) == set(placement.copies[key].ranks) - {dead}


def test_of_the_mirrors_of_a_lost_owner_the_one_with_the_fewest_blocks_of_the_unit_becomes_owner():
    """Rank 0 is lost with six blocks, each mirrored at 1 and 2. Rank 1 owns four of the unit, rank 2 of another."""
    lost = {(0, 0, index): Copies(0, (1, 2)) for index in range(6)} | {(1, 0, 9): Copies(0, (1, 2))}
    kept = {(0, 0, index): Copies(1, ()) for index in range(6, 10)} | {(1, 0, i): Copies(2, ()) for i in range(9)}
    result = promote_only(Placement({**lost, **kept}), {1, 2})
    assert Counter((change.block[0], change.rank) for change in result.transitions) == {(0, 1): 1, (0, 2): 5, (1, 1): 1}


def test_the_order_in_which_mirrors_are_named_makes_no_other_placement():
    one, other = (Placement({(0, 0, 0): Copies(1, mirrors)}) for mirrors in ((0, 2), (2, 0)))
    assert one == other and one.digest() == other.digest()


def test_losing_every_copy_names_the_blocks():
    ranks = [0, 1, 2, 3]
    placement = initial(unit_groups(1, 8, ranks), same_domain(ranks))
    gone = {0, 1}
    expected = tuple(sorted(k for k, c in placement.copies.items() if set(c.ranks) <= gone))
    assert expected and promote_only(placement, {2, 3}).lost == expected


def least_paid_moves(copies: dict, group: UnitGroup) -> int:
    """Fewest owner changes to ranks without a copy, over all balanced layouts: assignment by shortest paths.

    Written independently of the code under test: blocks are assigned one by one to
    holders (cost 0 with a copy, else 1) by Bellman-Ford augmentation, for every choice
    of which holders own one block more.
    """
    from itertools import combinations

    keys, n, m = [b.key for b in group.blocks], len(group.blocks), len(group.holders)
    best = n
    for heavy in combinations(group.holders, n % m):
        room = {r: n // m + (r in heavy) for r in group.holders}
        best = min(best, _assignment_cost(keys, copies, room))
    return best


def _assignment_cost(keys, copies, room) -> int:
    assigned: dict = {}
    total = 0
    for key in keys:
        distance, parent = {("b", key): 0}, {}
        queue = deque([("b", key)])
        while queue:
            kind, x = queue.popleft()
            if kind == "b":
                edges = [(("r", r), int(r not in copies[x].ranks)) for r in room if assigned.get(x) != r]
            else:
                edges = [(("b", k), -int(x not in copies[k].ranks)) for k, r in assigned.items() if r == x]
            for node, cost in edges:
                if distance[kind, x] + cost < distance.get(node, 1 << 30):
                    distance[node] = distance[kind, x] + cost
                    parent[node] = (kind, x)
                    queue.append(node)
        used = Counter(assigned.values())
        end = min((r for r in room if used[r] < room[r]), key=lambda r: distance[("r", r)])
        total += distance[("r", end)]
        node = ("r", end)
        while node in parent:
            before = parent[node]
            if before[0] == "b":
                assigned[before[1]] = node[1]
            node = before
    return total


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(1, 10), st.integers(1, 2), st.integers(0, 10_000))
def test_owner_movement_is_the_least_of_all_balanced_layouts(members, blocks, mirrors, seed):
    rng = random.Random(seed)
    ranks = list(range(members + 1))
    [group] = unit_groups(1, blocks, sorted(rng.sample(ranks, members)))
    copies = {}
    for block in group.blocks:
        owner, *rest = rng.sample(ranks, 1 + min(mirrors, members))
        copies[block.key] = Copies(owner, tuple(rest))
    owners = balanced_owners(copies, [group])
    paid = sum(owners[key] not in copies[key].ranks for key in owners)
    loads = Counter(owners.values())
    assert max(loads.values()) - min(loads[r] for r in group.holders) <= 1
    assert paid == least_paid_moves(copies, group), f"seed {seed}"


def test_a_thousand_random_changes_keep_balance_redundancy_and_little_movement():
    seed, top, units, blocks = 11, 8, 2, 43
    rng, ranks = random.Random(seed), list(range(8))
    placement = initial(unit_groups(units, blocks, ranks), same_domain(ranks))
    adds = bound = 0
    alive = set(ranks)
    for step in range(1000):
        if (rng.random() < 0.5 and len(alive) > 2) or len(alive) == top:
            alive.remove(rng.choice(sorted(alive)))
        else:
            alive.add(rng.choice([r for r in ranks if r not in alive]))
        living = sorted(alive)
        groups, rules = unit_groups(units, blocks, living), same_domain(living)
        before = placement
        placement, changes, lost = after(before, groups, rules)
        assert not lost, f"seed {seed} step {step}"
        check(placement, groups, rules)
        adds += sum(change.kind == "add" for change in changes)
        bound += movement_bound(before, groups, living)
        owned = Counter(copies.owner for copies in placement.copies.values())
        spread = max(owned.values()) - min(owned[r] for r in living)
        assert spread <= max(1, 0.02 * max(owned.values())), f"seed {seed} step {step}: {owned}"
        mirrored = Counter(r for copies in placement.copies.values() for r in copies.mirrors)
        spread = max(mirrored.values()) - min(mirrored[r] for r in living)
        assert spread <= max(2, 0.02 * max(mirrored.values())), f"seed {seed} step {step}: {mirrored}"
    assert bound <= adds <= 1.15 * bound, f"moved {adds} blocks, at least {bound} are needed"


def test_the_work_after_a_loss_grows_with_the_number_of_blocks_and_no_faster():
    def after_a_loss(ranks: int) -> int:
        launched = list(range(ranks))
        living = launched[:5] + launched[6:]
        full, left = (Rules(1, 4, {rank: rank // 8 for rank in some}) for some in (launched, living))
        groups = unit_groups(8, 4 * ranks, living)
        placement = initial(unit_groups(8, 4 * ranks, launched), full)
        promoted = promote_only(placement, living, groups).placement
        return calls_in(lambda: rebalance(promoted, groups, left))

    few, many = after_a_loss(16), after_a_loss(64)
    print(f"{few} calls for 512 blocks of 16 ranks, {many} for 2048 blocks of 64")
    assert many < 6 * few


def test_the_blocks_of_other_stages_than_the_lost_rank_cost_little():
    stages, gone = [list(range(first, first + 16)) for first in range(0, 256, 16)], 5
    every, living = (
        [
            group
            for at, holders in enumerate(stages)
            for group in unit_groups(4, 32, [r for r in holders if r != lost], at)
        ]
        for lost in (None, gone)
    )
    full, left = (Rules(1, 4, {rank: rank % 32 for rank in range(256) if rank != lost}) for lost in (None, gone))
    promoted = promote_only(initial(every, full), left.domains, living).placement
    end, _ = rebalance(promoted, living, left)
    far = [key for key in end.copies if key[1] > 0]
    assert all(end.copies[key] is promoted.copies[key] for key in far)
    calls = calls_in(lambda: rebalance(promoted, living, left)) / len(end.copies)
    print(f"{calls:.0f} calls a block")
    assert calls < 85


def ragged_job(rng: random.Random, living: list[int], units: int) -> list[UnitGroup]:
    """Two shards; every unit held by one to three random ranks of its own shard's half."""
    groups = []
    for shard in (0, 1):
        half = [rank for rank in living if rank % 2 == shard] or living[:1]
        for unit in range(units):
            [group] = unit_groups(1, 7 + unit, sorted(rng.sample(half, min(len(half), rng.randint(1, 3)))), shard)
            blocks = tuple(StateBlock(unit, shard, b.index, b.start, b.stop) for b in group.blocks)
            groups.append(UnitGroup(unit, shard, blocks, group.holders))
    return groups


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 2), st.integers(1, 3))
def test_units_that_migrate_between_small_groups_with_losses_and_joins_stay_owned_by_those_who_compute_them(
    seed, mirrors, nodes
):
    rng, alive = random.Random(seed), set(range(8))
    rules = Rules(mirrors, 3, {rank: rank % nodes for rank in sorted(alive)})
    groups = ragged_job(rng, sorted(alive), 4)
    placement = initial(groups, rules)
    for step in range(12):
        check(placement, groups, rules)
        for key, copies in placement.copies.items():
            apart = any(rules.domains[r] != rules.domains[copies.owner] for r in copies.mirrors)
            one_node = len(set(rules.domains.values())) == 1
            assert apart or mirrors == 1 or one_node, f"seed {seed} step {step}: block {key} is on one node only"
        if rng.random() < 0.5 and len(alive) > 4:
            alive.remove(rng.choice(sorted(alive)))
        else:
            alive.add(rng.randrange(8))
        living = sorted(alive)
        groups = ragged_job(rng, living, 4)
        rules = Rules(mirrors, 3, {rank: rank % nodes for rank in living})
        placement, changes, lost = after(placement, groups, rules)
        assert not lost, f"seed {seed} step {step}: one loss, {mirrors} mirrors"
        assert all(change.source in alive and change.rank in alive for change in changes if change.kind == "add")


def movement_bound(before: Placement, groups: list[UnitGroup], living: list[int]) -> int:
    """No balanced layout (owners and mirrors per unit within one block) can be reached with fewer adds."""
    needed = 0
    for group in groups:
        held = {b.key: [r for r in before.copies[b.key].ranks if r in living] for b in group.blocks}
        have = Counter(r for ranks in held.values() for r in ranks)
        short = sum(max(0, 2 - len(ranks)) for ranks in held.values())
        share = 2 * (len(group.blocks) // len(living))
        needed += max(short, sum(max(0, share - have[r]) for r in living))
    return needed


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 6), st.integers(1, 20), st.integers(1, 2), st.integers(0, 10_000))
def test_transitions_lead_from_the_old_placement_to_the_new_one(members, blocks, mirrors, seed):
    rng = random.Random(seed)
    ranks = list(range(members))
    start = initial(unit_groups(2, blocks, ranks), same_domain(ranks, mirrors))
    living = sorted(rng.sample(range(members + 3), members))
    survivors = [r for r in ranks if r in living]
    first = promote_only(start, survivors)
    if first.lost or not survivors:
        return
    rules, groups = same_domain(living, mirrors), unit_groups(2, blocks, living)
    end, changes = rebalance(first.placement, groups, rules)
    placement = first.placement
    for change in changes:
        placement = placement.apply([change])
    assert placement.copies == end.copies and placement.digest() == end.digest()
    order = [["add", "promote", "drop"].index(change.kind) for change in changes]
    assert order == sorted(order), "a block never has fewer copies on the way than before or after"
    assert all(c.source in first.placement.copies[c.block].ranks for c in changes if c.kind == "add")
    assert rebalance(end, groups, rules)[1] == (), "a balanced placement stays"


def test_new_mirrors_are_sent_by_all_ranks_with_copies_alike():
    """Ten blocks of rank 0 with mirrors at rank 1; rank 2 comes."""
    start = Placement({(0, 0, index): Copies(0, (1,)) for index in range(10)})
    _, changes = rebalance(start, unit_groups(1, 10, [0, 1, 2]), same_domain([0, 1, 2], 2))
    assert Counter(change.source for change in changes if change.kind == "add") == {0: 5, 1: 5}


def test_mirrors_lie_in_other_failure_domains_where_there_are_any():
    domains = {rank: rank // 2 for rank in range(4)}
    groups = unit_groups(2, 12, [0, 1, 2, 3])
    placement = initial(groups, Rules(1, 4, domains))
    for copies in placement.copies.values():
        assert domains[copies.owner] != domains[copies.mirrors[0]]


def test_two_mirrors_of_a_group_on_one_node_leave_the_node_with_the_second():
    """Stage 0 on node 0, stage 1 on node 1: the first mirror stays in the group, the second leaves the node."""
    domains = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1}
    stage0 = unit_groups(1, 9, [0, 1, 2])
    placement = initial(stage0, Rules(2, 4, domains))
    for copies in placement.copies.values():
        assert [domains[r] for r in copies.mirrors] == [0, 1]


def test_a_group_of_one_mirrors_to_other_stages_away_from_its_host_and_evenly():
    domains = {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}
    [group] = unit_groups(1, 30, [0])
    placement = initial([group], Rules(1, 4, domains))
    spread = Counter(copies.mirrors[0] for copies in placement.copies.values())
    assert set(spread) == {2, 3, 4} and max(spread.values()) == 10


def test_mirrors_come_home_when_a_group_grows_from_one_to_two():
    domains = dict.fromkeys(range(4), 0)
    [alone], [both] = unit_groups(1, 10, [0]), unit_groups(1, 10, [0, 1])
    placement, changes = rebalance(initial([alone], Rules(1, 4, domains)), [both], Rules(1, 4, domains))
    assert all(set(copies.ranks) == {0, 1} for copies in placement.copies.values())
    assert sum(change.kind == "add" and change.rank != 1 for change in changes) == 0


def test_a_parked_rank_keeps_its_copies_until_the_others_have_theirs():
    """Rank 1 stops computing but lives: its blocks are streamed from it, nothing is lost."""
    ranks = [0, 1, 2]
    placement = initial(unit_groups(1, 9, ranks), Rules(0, 1, dict.fromkeys(ranks, 0)))
    groups = unit_groups(1, 9, [0, 2])
    first = promote_only(placement, ranks, groups)
    assert not first.lost and not first.transitions
    end, changes = rebalance(first.placement, groups, Rules(0, 1, dict.fromkeys(ranks, 0)))
    assert {c.source for c in changes if c.kind == "add"} == {1}
    assert set(owner_loads(end, groups[0]).values()) == {4, 5}


def test_a_parked_owner_hands_over_to_a_mirror_that_computes_the_unit_for_free():
    """Two replicas of TP 2; rank 0 dies, so rank 1 is parked: shard 1 is computed by rank 3 alone."""
    shard1 = unit_groups(2, 10, [1, 3], shard=1)
    placement = initial(shard1, same_domain([0, 1, 2, 3]))
    result = promote_only(placement, {1, 2, 3}, unit_groups(2, 10, [3], shard=1))
    assert not result.lost
    assert {copies.owner for copies in result.placement.copies.values()} == {3}
    assert all(copies.mirrors == (1,) for copies in result.placement.copies.values()), "its copies count still"


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 2))
def test_text_round_trip_and_digest(members, blocks, mirrors):
    ranks = list(range(members))
    placement = initial(unit_groups(2, blocks, ranks), same_domain(ranks, mirrors))
    again = Placement.from_json(placement.to_json())
    assert again.copies == placement.copies and again.digest() == placement.digest()
    assert {k for r in ranks for k in placement.owned_by(r)} == set(placement.copies)


def test_transitions_that_make_no_sense_are_refused():
    placement = Placement({(0, 0, 0): Copies(1, (2,))})
    for wrong in (("add", 2), ("promote", 3), ("drop", 1)):
        with pytest.raises(ValueError, match="cannot"):
            placement.apply([Transition(wrong[0], (0, 0, 0), wrong[1])])


@pytest.mark.parametrize("ownership", ["interleaved", "contiguous"])
def test_a_layer_that_moves_takes_its_own_state_along_and_little_else(ownership: Ownership) -> None:
    """Stages of 8 and 8 units over 4 ranks each; unit 8 moves to the first stage.

    Interleaved, its blocks go from four owners to four others and nothing else changes owner;
    contiguous, every cut of both stages moves (the distributed optimizer's 4.0 units at 4 ranks).
    """
    stages, blocks = ((0, 1, 2, 3), (4, 5, 6, 7)), 12
    rules = Rules(0, 4, dict.fromkeys(range(8), 0), ownership)

    def groups(first: int) -> list[UnitGroup]:
        both = unit_groups(first, blocks, list(stages[0])) + unit_groups(16, blocks, list(stages[1]))[first:]
        return [replace(group, unit=unit) for unit, group in enumerate(both)]

    start = initial(groups(8), rules)
    for group in groups(8):
        owners = {start.owner(block.key) for block in group.blocks}
        assert len(owners) == 4 if ownership == "interleaved" else len(owners) <= 2
    target, _ = rebalance(start, groups(9), rules)
    moved = sum(start.owner(key) != target.owner(key) for key in start.copies)
    assert moved == blocks if ownership == "interleaved" else moved >= 3 * blocks
