"""Mirrors are spread over failure domains first, then over the ranks that compute the unit, then evenly over peers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.state.layout import BlockKey, StateBlock
from megatron.elastic.state.mirrors import choose_mirrors
from megatron.elastic.state.peers import Candidates, Tree
from megatron.elastic.state.placement import Rules, UnitGroup, shared_levels


@dataclass(frozen=True)
class Site:
    """Ranks in nodes in racks. ``nodes[n]``: its ranks; ``racks[r]``: its nodes."""

    nodes: tuple[tuple[int, ...], ...]
    racks: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> list[int]:
        return sorted(rank for node in self.nodes for rank in node)

    def node_of(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.nodes) if rank in ranks)

    def rack_of(self, rank: int) -> int:
        return next(number for number, nodes in enumerate(self.racks) if self.node_of(rank) in nodes)

    def rules(self, mirrors: int, width: int) -> Rules:
        wider = {node: (rack,) for rack, nodes in enumerate(self.racks) for node in nodes}
        return Rules(mirrors, width, {rank: self.node_of(rank) for rank in self.ranks}, wider=wider)


def regular_site(racks: int, nodes: int, ranks: int) -> Site:
    """Return ``racks`` of ``nodes`` each, with ``ranks`` a node, numbered in order."""
    count = racks * nodes
    return Site(
        tuple(tuple(range(ranks * node, ranks * (node + 1))) for node in range(count)),
        tuple(tuple(range(nodes * rack, nodes * (rack + 1))) for rack in range(racks)),
    )


@st.composite
def sites(draw: st.DrawFn) -> Site:
    """Racks of unequal size, nodes of unequal size, some ranks missing as after losses."""
    sizes = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4))
    nodes, racks, at = list[tuple[int, ...]](), list[tuple[int, ...]](), 0
    for rack in sizes:
        racks.append(tuple(range(len(nodes), len(nodes) + len(rack))))
        for size in rack:
            nodes.append(tuple(range(at, at + size)))
            at += size + draw(st.integers(0, 2))
    return Site(tuple(nodes), tuple(racks))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Site, Rules, list[UnitGroup], dict[BlockKey, int]]:
    """A site, its rules, and units whose owners are drawn among their holders."""
    site = draw(sites())
    rules = site.rules(draw(st.integers(0, 3)), draw(st.integers(1, 6)))
    groups, owners = list[UnitGroup](), dict[BlockKey, int]()
    for unit in range(draw(st.integers(1, 3))):
        holders = tuple(sorted(draw(st.sets(st.sampled_from(site.ranks), min_size=1))))
        blocks = tuple(StateBlock(unit, 0, i, 16 * i, 16 * (i + 1)) for i in range(draw(st.integers(1, 12))))
        groups.append(UnitGroup(unit, 0, blocks, holders))
        owners |= {block.key: holders[block.index % len(holders)] for block in blocks}
    return site, rules, groups, owners


def nothing_held(owners: dict[BlockKey, int]) -> dict[BlockKey, tuple[int, ...]]:
    return {key: (owner,) for key, owner in owners.items()}


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_owner_and_mirrors_are_in_as_many_racks_and_nodes_as_there_are(
    job: tuple[Site, Rules, list[UnitGroup], dict[BlockKey, int]],
) -> None:
    site, rules, groups, owners = job
    mirrors = choose_mirrors(groups, rules, owners, nothing_held(owners))
    assert mirrors.keys() == owners.keys()
    for key, chosen in mirrors.items():
        ranks = {owners[key], *chosen}
        assert len(ranks) == 1 + len(chosen) == min(1 + rules.mirrors, len(site.ranks)), key
        for domain_of, count in ((site.rack_of, len(site.racks)), (site.node_of, len(site.nodes))):
            assert len({domain_of(rank) for rank in ranks}) == min(len(ranks), count), key


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_no_mirror_could_be_replaced_by_a_better_one(
    job: tuple[Site, Rules, list[UnitGroup], dict[BlockKey, int]],
) -> None:
    """Better: fewer domains in common with the other copies, or as few on a rank that computes the unit."""
    site, rules, groups, owners = job
    mirrors = choose_mirrors(groups, rules, owners, nothing_held(owners))
    home = {block.key: group.holders for group in groups for block in group.blocks}

    def cost(key: BlockKey, rank: int, others: set[int]) -> tuple[int, bool]:
        shared = max(shared_levels(rules.path(rank), rules.path(other)) for other in others)
        return shared, rank not in home[key]

    for key, chosen in mirrors.items():
        for rank in chosen:
            others = {owners[key], *chosen} - {rank}
            free = [other for other in site.ranks if other not in {*others, rank}]
            least = min((cost(key, other, others) for other in free), default=(3, True))
            assert cost(key, rank, others) <= least, (key, rank, chosen)


@settings(max_examples=100, deadline=None)
@given(jobs())
def test_mirrors_that_were_chosen_stay_where_they_are(
    job: tuple[Site, Rules, list[UnitGroup], dict[BlockKey, int]],
) -> None:
    _, rules, groups, owners = job
    first = choose_mirrors(groups, rules, owners, nothing_held(owners))
    held = {key: (owners[key], *ranks) for key, ranks in first.items()}
    again = choose_mirrors(groups, rules, owners, held)
    assert {key: set(ranks) for key, ranks in again.items()} == {key: set(ranks) for key, ranks in first.items()}


def test_an_owners_blocks_are_mirrored_in_equal_shares_by_as_many_ranks_as_the_scatter_width() -> None:
    site = regular_site(racks=4, nodes=2, ranks=2)
    blocks = tuple(StateBlock(0, 0, i, 16 * i, 16 * (i + 1)) for i in range(24 * 16))
    owners = {block.key: block.index % 16 for block in blocks}
    rules = site.rules(mirrors=1, width=4)
    mirrors = choose_mirrors([UnitGroup(0, 0, blocks, tuple(site.ranks))], rules, owners, nothing_held(owners))
    for owner in site.ranks:
        shares = Counter(ranks[0] for key, ranks in mirrors.items() if owners[key] == owner)
        assert sorted(shares.values()) == [6, 6, 6, 6], f"rank {owner}: {shares}"
    assert set(Counter(ranks[0] for ranks in mirrors.values()).values()) == {24}, "each rank mirrors as much as it owns"


# -- the candidates --------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(sites(), st.integers(1, 3), st.integers(1, 6), st.data())
def test_the_candidates_have_a_cheapest_rank_whatever_is_taken(
    site: Site, mirrors: int, width: int, data: st.DataObject
) -> None:
    rules = site.rules(mirrors, width)
    holders = tuple(sorted(data.draw(st.sets(st.sampled_from(site.ranks), min_size=1))))
    candidates = Candidates(holders, rules, Tree(site.ranks, rules))
    owner = data.draw(st.sampled_from(holders))
    order, taken = candidates.order(owner), tuple[int, ...]()
    for _ in range(min(mirrors, len(site.ranks) - 1)):
        free = [rank for rank in site.ranks if rank != owner and rank not in taken]
        cost = {rank: candidates.cost(owner, rank, taken) for rank in free}
        able = [rank for rank in free if rank in order]
        assert able and min(cost[rank] for rank in able) == min(cost.values()), (owner, taken)
        cheapest = [rank for rank in able if cost[rank] == min(cost.values())]
        taken += (data.draw(st.sampled_from(cheapest)),)


@settings(max_examples=150, deadline=None)
@given(sites(), st.integers(0, 3), st.integers(1, 6))
def test_peers_are_other_ranks_and_no_more_than_the_scatter_width(site: Site, mirrors: int, width: int) -> None:
    rules = site.rules(mirrors, width)
    candidates = Candidates(tuple(site.ranks), rules, Tree(site.ranks, rules))
    for owner in site.ranks:
        order = candidates.order(owner)
        peers = [rank for rank, (outside, _) in order.items() if not outside]
        assert owner not in order
        others = len(site.ranks) - 1
        assert min(mirrors, others) <= len(peers) <= (max(width, mirrors) if mirrors else 0)
        assert all(candidates.place(owner, rank) == place for rank, place in order.items())


def peers_of(site: Site, mirrors: int = 1, width: int = 4) -> dict[int, set[int]]:
    rules = site.rules(mirrors, width)
    candidates = Candidates(tuple(site.ranks), rules, Tree(site.ranks, rules))
    orders = {owner: candidates.order(owner) for owner in site.ranks}
    return {owner: {rank for rank, (outside, _) in order.items() if not outside} for owner, order in orders.items()}


def test_the_loss_of_a_node_alters_the_peers_of_few_owners() -> None:
    """One rack of sixteen nodes: only owners near the lost node had peers there."""
    site = regular_site(racks=1, nodes=16, ranks=4)
    before = peers_of(site)
    left = Site((*site.nodes[:5], *site.nodes[6:]), (tuple(range(15)),))
    after = peers_of(left)
    affected = [owner for owner in after if before[owner] & set(site.nodes[5])]
    changed = [owner for owner in after if after[owner] != before[owner]]
    assert set(affected) <= set(changed)
    assert len(changed) <= 2 * len(affected) <= len(after) // 2, f"{len(changed)} changed, {len(affected)} had to"


def test_the_owners_of_a_node_do_not_all_choose_the_same_ranks() -> None:
    site = regular_site(racks=1, nodes=8, ranks=4)
    chosen = Counter(peer for peers in peers_of(site, width=4).values() for peer in peers)
    assert set(chosen.values()) == {4}, "every rank is the peer of as many owners as it has peers"
