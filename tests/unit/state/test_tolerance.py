"""The losses that can be survived are those that a search finds, at about the cost of a promotion."""

from __future__ import annotations

import random
import time
from itertools import combinations
from math import comb

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.state.domains import FailureDomains
from megatron.elastic.state.layout import StateBlock
from megatron.elastic.state.ownership import Copies, Placement, Rules, UnitGroup, initial, promote_only
from megatron.elastic.state.tolerance import Level, Tolerance, tolerance


def fatal_sets(placement: Placement, domain: dict[int, int]) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """(how many of any domains may go, the smallest sets that may not), by trying all."""
    there = sorted(set(domain.values()))
    for size in range(1, len(there) + 1):
        fatal = [
            gone
            for gone in combinations(there, size)
            if any(all(domain[rank] in gone for rank in copies.ranks) for copies in placement.copies.values())
        ]
        if fatal:
            return size - 1, tuple(fatal)
    raise AssertionError("with all of them everything is lost")


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(0, 3), st.integers(1, 3))
def test_it_is_exactly_what_may_be_lost(seed, ranks, mirrors, racks):
    rng = random.Random(seed)
    labels = {rank: f"rack{rng.randrange(racks)}/host{rng.randrange(4)}" for rank in range(ranks)}
    domains = FailureDomains.of(labels, labels)
    copies = {}
    for block in range(rng.randint(1, 12)):
        owner, *rest = rng.sample(range(ranks), min(ranks, rng.randint(1, 1 + mirrors)))
        copies[0, 0, block] = Copies(owner, tuple(rest))
    placement = Placement(copies)
    found = tolerance(placement, domains, mirrors)
    rack = {rank: domains.wider[node][0] for rank, node in domains.nodes.items()}
    for level, domain in zip(found.levels, ({r: r for r in labels}, dict(domains.nodes), rack), strict=True):
        assert (level.any, level.fatal) == fatal_sets(placement, domain), f"seed {seed}"
        assert level.count == len(set(domain.values())) and level.possible == comb(level.count, level.any + 1)
    assert found.short == sum(len(c.ranks) < min(1 + mirrors, ranks) for c in copies.values())


def job(nodes: int, each: int, units: int, blocks: int, mirrors: int) -> tuple[Placement, FailureDomains]:
    labels = {rank: f"n{rank // each}" for rank in range(nodes * each)}
    domains = FailureDomains.of(labels, labels)
    groups = [
        UnitGroup(unit, 0, tuple(StateBlock(unit, 0, i, 16 * i, 16 * i + 16) for i in range(blocks)), tuple(labels))
        for unit in range(units)
    ]
    return initial(groups, Rules(mirrors, 4, domains.nodes)), domains


def test_a_loss_lowers_it_until_copies_are_made_again():
    placement, domains = job(4, 2, 2, 48, 2)
    before = tolerance(placement, domains, 2)
    assert [level.any for level in before.levels] == [2, 2] and before.short == 0
    left = {rank: label for rank, label in domains.names.items() if rank != 3}
    survivors = [rank for rank in domains.nodes if rank != 3]
    after = promote_only(placement, survivors).placement
    there = FailureDomains({rank: domains.nodes[rank] for rank in survivors}, domains.wider, left)
    found = tolerance(after, there, 2)
    assert [level.any for level in found.levels] == [1, 1]
    assert 0 < found.short == sum(len(copies.mirrors) < 2 for copies in after.copies.values())


def test_a_dead_ranks_copies_do_not_count():
    domains = FailureDomains.of({0: "a", 1: "b"}, {0: "a", 1: "b"})
    found = tolerance(Placement({(0, 0, 0): Copies(0, (1, 2))}), domains, 2)
    assert found.levels[0] == Level(2, 1, ((0, 1),))


def test_nothing_to_lose():
    assert tolerance(Placement({}), FailureDomains.of({0: "a"}, {0: "a"}), 1) == Tolerance(
        (Level(1, 0, ()), Level(1, 0, ())), 0, 0
    )


def test_it_costs_about_as_much_as_a_promotion_at_a_thousand_ranks():
    placement, domains = job(128, 8, 4, 4096, 2)

    def seconds(work) -> float:
        times = []
        for _ in range(3):
            started = time.process_time()
            work()
            times.append(time.process_time() - started)
        return min(times)

    survivors = [rank for rank in domains.nodes if rank != 7]
    looked = seconds(lambda: tolerance(placement, domains, 2))
    promoted = seconds(lambda: promote_only(placement, survivors))
    assert looked < 3 * promoted, f"{looked:.3f} s, a promotion takes {promoted:.3f} s"
