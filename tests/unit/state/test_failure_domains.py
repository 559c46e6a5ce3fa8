"""Copies of a block lie in as many distinct failure domains as there are, on every level, whatever comes and goes."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.state.layout import StateBlock
from megatron.elastic.state.ownership import Copies, Placement, Rules, UnitGroup, after, initial, rebalance
from megatron.elastic.state.peers import Tree, _both_sides
from tests.unit.calls import calls_in


def unit_group(unit: int, blocks: int, holders: list[int]) -> UnitGroup:
    flat = tuple(StateBlock(unit, 0, i, 16 * i, 16 * (i + 1)) for i in range(blocks))
    return UnitGroup(unit, 0, flat, tuple(holders))


def nodes_of(nodes: int, each: int) -> dict[int, int]:
    return {rank: rank // each for rank in range(nodes * each)}


def losing(placement: Placement, domains: dict[int, int], gone: set[int]) -> int:
    """Blocks that are lost with all of ``gone``."""
    return sum({domains[rank] for rank in copies.ranks} <= gone for copies in placement.copies.values())


def check_apart(placement: Placement, groups: list[UnitGroup], rules: Rules) -> None:
    """Every block: as many copies as wanted, in as many distinct domains of each level as there are."""
    paths = {rank: rules.path(rank) for rank in rules.domains}
    depth = len(next(iter(paths.values())))
    for group in groups:
        for block in group.blocks:
            ranks = placement.copies[block.key].ranks
            assert len(set(ranks)) == len(ranks) == min(1 + rules.mirrors, len(paths))
            for level in range(1, depth + 1):
                there = {path[:level] for path in paths.values()}
                found = {paths[rank][:level] for rank in ranks}
                assert len(found) == min(1 + rules.mirrors, len(there)), f"{block.key} at {ranks}, level {level}"


def topology(rng: random.Random, racks: int, ranks: int) -> tuple[dict[int, int], dict[int, tuple[int, ...]]]:
    """Ranks → nodes of random sizes, nodes → racks; ranks of a node are not always neighbours."""
    nodes = rng.randint(1, ranks)
    domains = {rank: rng.randrange(nodes) if rng.random() < 0.3 else rank * nodes // ranks for rank in range(ranks)}
    return domains, {node: (rng.randrange(racks),) for node in range(nodes)} if racks else {}


def random_groups(rng: random.Random, living: list[int], units: int) -> list[UnitGroup]:
    groups = []
    for unit in range(units):
        first, count = rng.randrange(len(living)), rng.randint(1, len(living))
        together = [living[(first + i) % len(living)] for i in range(count)]
        holders = together if rng.random() < 0.5 else rng.sample(living, count)
        groups.append(unit_group(unit, rng.randint(1, 20), sorted(holders)))
    return groups


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 16), st.integers(1, 4), st.integers(1, 6), st.integers(0, 3))
def test_copies_lie_in_as_many_domains_as_there_are(seed, ranks, mirrors, scatter, racks):
    rng = random.Random(seed)
    domains, wider = topology(rng, racks, ranks)
    rules = Rules(mirrors, scatter, domains, "interleaved", wider)
    groups = random_groups(rng, list(domains), 3)
    check_apart(initial(groups, rules), groups, rules)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(4, 14), st.integers(1, 3), st.integers(0, 3))
def test_they_stay_apart_while_ranks_and_nodes_come_and_go_and_units_move(seed, ranks, mirrors, racks):
    rng = random.Random(seed)
    domains, wider = topology(rng, racks, ranks)
    alive = set(domains)
    placement = initial(random_groups(rng, sorted(alive), 3), Rules(mirrors, 4, domains, "interleaved", wider))
    sizes = {unit: sum(key[0] == unit for key in placement.copies) for unit in range(3)}
    for step in range(8):
        node = rng.choice(sorted(set(domains.values())))
        there = {rank for rank, at in domains.items() if at == node}
        change = there if rng.random() < 0.5 else {rng.randrange(ranks)}
        left = alive - change if rng.random() < 0.5 else alive | change
        if all(left & set(copies.ranks) for copies in placement.copies.values()):
            alive = left
        living = sorted(alive)
        rules = Rules(mirrors, 4, {rank: domains[rank] for rank in living}, "interleaved", wider)
        groups = [unit_group(g.unit, sizes[g.unit], list(g.holders)) for g in random_groups(rng, living, 3)]
        placement, changes, lost = after(placement, groups, rules)
        assert not lost, f"seed {seed} step {step}"
        check_apart(placement, groups, rules)
        again = rebalance(placement, groups, rules)[1]
        assert sum(change.kind == "add" for change in again) <= sum(change.kind == "add" for change in changes)


def test_two_mirrors_on_eight_nodes_outlive_any_two_nodes():
    domains = nodes_of(8, 8)
    placement = initial([unit_group(unit, 512, list(domains)) for unit in range(2)], Rules(2, 4, domains))
    assert min(len({domains[rank] for rank in copies.ranks}) for copies in placement.copies.values()) == 3
    assert [pair for pair in combinations(range(8), 2) if losing(placement, domains, set(pair))] == []


def test_three_nodes_that_hold_all_copies_of_a_block_are_neighbours():
    """Only 8 of 56 sets of three nodes hold all copies of a block: peers lie in few domains."""
    domains = nodes_of(8, 8)
    placement = initial([unit_group(unit, 512, list(domains)) for unit in range(2)], Rules(2, 4, domains))
    fatal = [three for three in combinations(range(8), 3) if losing(placement, domains, set(three))]
    assert len(fatal) == 8
    assert all(sum((b - a) % 8 == 1 for a in three for b in three) == 2 for three in fatal)


@pytest.mark.parametrize("mirrors", [1, 2])
def test_a_group_inside_one_node_is_mirrored_to_others(mirrors: int) -> None:
    """One stage a node: whatever node dies, every block has a copy elsewhere; the nodes carry like shares."""
    domains = nodes_of(4, 4)
    groups = [unit_group(unit, 48, list(range(4 * unit, 4 * unit + 4))) for unit in range(4)]
    placement = initial(groups, Rules(mirrors, 4, domains))
    for gone in combinations(range(4), mirrors):
        assert losing(placement, domains, set(gone)) == 0
    mirrored = Counter(rank for copies in placement.copies.values() for rank in copies.mirrors)
    assert set(mirrored.values()) == {48 * mirrors // 4}


def test_a_group_that_covers_enough_nodes_keeps_its_copies():
    """At the death of an owner nothing need be moved before parameters are gathered."""
    domains = nodes_of(4, 4)
    placement = initial([unit_group(0, 48, list(range(12)))], Rules(2, 4, domains))
    assert all(set(copies.ranks) <= set(range(12)) for copies in placement.copies.values())


def test_a_group_of_two_nodes_leaves_them_with_the_second_mirror_only():
    domains = nodes_of(4, 2)
    placement = initial([unit_group(0, 48, [0, 1, 2, 3])], Rules(2, 4, domains))
    for copies in placement.copies.values():
        assert sorted(rank < 4 for rank in copies.ranks) == [False, True, True]
        assert len({domains[rank] for rank in copies.ranks}) == 3


def test_racks_come_before_nodes():
    """Two racks of four nodes: one mirror is in the other rack; of two, one is, and all three nodes differ."""
    domains = nodes_of(8, 2)
    wider = {node: (node // 4,) for node in range(8)}
    for mirrors in (1, 2):
        groups = [unit_group(0, 96, list(domains))]
        placement = initial(groups, Rules(mirrors, 4, domains, "interleaved", wider))
        for copies in placement.copies.values():
            assert {domains[rank] // 4 for rank in copies.ranks} == {0, 1}
            assert len({domains[rank] for rank in copies.ranks}) == 1 + mirrors
        mirrored = Counter(rank for copies in placement.copies.values() for rank in copies.mirrors)
        assert set(mirrored.values()) == {6 * mirrors}


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 8), st.integers(1, 6), st.integers(1, 3))
def test_ranks_of_like_nodes_mirror_alike(nodes, each, mirrors):
    """Ranks that own alike mirror alike, at the start within 2%, on whatever nodes their peers are."""
    domains = nodes_of(nodes, each)
    placement = initial(
        [unit_group(unit, 24 * nodes * each, list(domains)) for unit in range(2)], Rules(mirrors, 4, domains)
    )
    mirrored = Counter(rank for copies in placement.copies.values() for rank in copies.mirrors)
    mean = sum(mirrored.values()) / len(domains)
    assert max(mirrored.values()) - min(mirrored.values()) <= max(1, 0.02 * mean), mirrored


@pytest.mark.parametrize("mirrors", [1, 2])
@pytest.mark.parametrize("lost", [{13}, {12, 13}, {13, 14, 15}])
def test_what_is_left_of_a_node_does_not_mirror_for_its_lost_ranks(mirrors: int, lost: set[int]) -> None:
    domains = {rank: rank // 4 for rank in range(32) if rank not in lost}
    placement = initial([unit_group(unit, 560, list(domains)) for unit in range(2)], Rules(mirrors, 4, domains))
    mirrored = Counter(rank for copies in placement.copies.values() for rank in copies.mirrors)
    assert max(mirrored.values()) <= 1.3 * sum(mirrored.values()) / len(domains)


def test_a_copy_in_a_new_domain_replaces_one_that_shares_a_domain():
    """Both mirrors are on one node, as while no third lived; when one lives again, one of them moves, and no more."""
    domains = nodes_of(3, 2)
    group = unit_group(0, 6, [0, 2, 4])
    before = Placement({block.key: Copies(0, (2, 3)) for block in group.blocks})
    placement, changes = rebalance(before, [group], Rules(2, 4, domains))
    check_apart(placement, [group], Rules(2, 4, domains))
    assert sum(change.kind == "add" for change in changes) <= len(group.blocks)


@given(st.integers(0, 40), st.integers(0, 50))
def test_the_nearest_places_of_a_ring_come_first(count: int, most: int) -> None:
    nearest = sorted(range(1, count), key=lambda ahead: (min(ahead, count - ahead), ahead))
    assert _both_sides(count, most) == nearest[:most]


def test_ranks_near_an_owner_are_found_by_the_same_work_in_a_larger_job() -> None:
    few, many = (
        Tree(range(8 * nodes), Rules(1, 4, {rank: rank // 8 for rank in range(8 * nodes)})) for nodes in (16, 256)
    )
    small, large = calls_in(lambda: few.near(5, 4)), calls_in(lambda: many.near(5, 4))
    print(f"{small} calls with 16 nodes, {large} with 256")
    assert len(few.near(5, 4)) == len(many.near(5, 4)) and large < 1.5 * small
