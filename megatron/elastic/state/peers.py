"""The candidates for mirrors of an owner's blocks, and its peers: the few preferred ones.

Failure domains form a tree: a rack holds nodes, a node holds ranks. The cost of a mirror grows with the number of
domains that it shares with another copy of its block (:meth:`Candidates.cost`). At equal sharing a rank that does not
compute the unit costs more: after a loss of the owner its copies must move before parameters can be gathered.

The peers of an owner are found by placing blocks one after the other on the cheapest ranks, preferring unused ranks at
equal cost, until the scatter width is reached. So the peers cover enough distinct domains for every block, in equal
parts if the tree allows, and few further domains. The copies of blocks are then in few different sets of nodes, of
which few can be lost together (Cidon et al., "Copysets", ATC 2013).

At equal cost the nearest ranks come first. Between sibling domains, nearness is the distance on a ring, on both sides:
adjacent domains are peers of each other, and a change of membership alters few peer sets. Within a domain the order
begins with the rank that corresponds to the owner's, so the owners of a domain do not all choose the same ranks. If
that rank is lost, the corresponding rank of a further domain comes before the others of the same domain. So the
remaining ranks of a node do not take over the mirrors of its lost ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from megatron.elastic.state.placement import Rules, shared_levels

__all__ = ["Candidates", "Tree"]

Path = tuple[int, ...]


class Tree:
    """The failure domains of ``ranks``, in their order, and the distances between the ranks."""

    def __init__(self, ranks: Sequence[int], rules: Rules) -> None:
        self._reach = -(-max(rules.scatter_width, rules.mirrors) // max(2, rules.mirrors))
        """Number of ranks of an adjacent domain that an owner uses, if all are there."""
        self.paths: dict[int, Path] = {rank: (*rules.path(rank), rank) for rank in ranks}
        self._inside: dict[Path, dict[int, int]] = {}
        """Domain → its parts, numbered in order of their first rank."""
        self._ends: dict[Path, tuple[int, int]] = {}
        """Domain → its lowest and its highest rank."""
        for rank, path in self.paths.items():
            for level in range(len(path)):
                siblings = self._inside.setdefault(path[:level], {})
                siblings.setdefault(path[level], len(siblings))
                low, high = self._ends.get(path[: level + 1], (rank, rank))
                self._ends[path[: level + 1]] = min(low, rank), max(high, rank)
        self._siblings = {domain: tuple(parts) for domain, parts in self._inside.items()}
        """Domain → its parts, in that order."""
        self._span = {
            domain: max(high - low + 1 for low, high in (self._ends[*domain, child] for child in children))
            for domain, children in self._inside.items()
        }
        """Domain → span of rank numbers of its widest part."""
        self._stride = self._gaps()
        self.domains = {rank: path[:-1] for rank, path in self.paths.items()}
        """Rank → its failure domains, outermost first."""
        depth = max(map(len, self.paths.values()), default=1) - 1
        self.widths = tuple(len({path[: level + 1] for path in self.paths.values()}) for level in range(depth))
        """The number of domains at each level, the outermost first."""

    def _gaps(self) -> dict[Path, int]:
        """Return domain → the least distance between two ranks of one of its parts; 1 if no part has two."""
        gaps, before = dict[Path, int](), dict[Path, int]()
        for rank, path in sorted(self.paths.items()):
            for level in range(len(path) - 1):
                parent, part = path[:level], path[: level + 1]
                if part in before:
                    gaps[parent] = min(gaps.get(parent, rank), rank - before[part])
                before[part] = rank
        return {domain: gaps.get(domain, 1) for domain in self._inside}

    def near(self, owner: int, breadth: int) -> list[int]:
        """Return ranks near ``owner``, the nearest first: ``breadth`` from each of ``breadth`` domains next to its own.

        At each level they cover ``breadth`` domains besides the owner's, or all that exist.
        """
        path, found = self.paths[owner], list[int]()
        for level in range(len(path)):
            parent = path[:level]
            siblings = self._siblings[parent]
            at, count = self._inside[parent][path[level]], len(siblings)
            for ahead in _both_sides(count, breadth):
                found += self._first((*parent, siblings[(at + ahead) % count]), owner, breadth, self._span[parent])
        return sorted(found, key=lambda rank: self._distance(owner, rank))

    def _first(self, domain: Path, owner: int, breadth: int, span: int) -> Iterator[int]:
        """Yield ranks of ``domain``, beginning with the one that corresponds to ``owner``."""
        if domain not in self._inside:
            yield domain[-1]
            return
        parts = [(*domain, part) for part in self._inside[domain]]
        for part in sorted(parts, key=lambda part: (self._ends[part][1] - owner) % span)[:breadth]:
            yield from self._first(part, owner, breadth, span)

    def _distance(self, owner: int, rank: int) -> tuple[int, ...]:
        """Return a sort key of ``rank`` relative to ``owner``: ranks in other domains first, near ones first."""
        here, there = self.paths[owner], self.paths[rank]
        level = next(i for i, (mine, its) in enumerate(zip(here, there, strict=True)) if mine != its)
        parent = here[:level]
        siblings = self._inside[parent]
        ahead = (siblings[there[level]] - siblings[here[level]]) % len(siblings)
        turn = (rank - owner) % self._span[parent] // self._stride[parent]
        # A domain that lost ranks gets no more mirrors: the corresponding rank of a further domain comes first.
        return level, int(turn >= self._reach), min(ahead, len(siblings) - ahead), turn, ahead


def _both_sides(count: int, most: int) -> list[int]:
    """Return the steps forward to the ``most`` nearest other places on a ring of ``count``, the nearest first."""
    steps = ((ahead, count - ahead) for ahead in range(1, min(most, count // 2) + 1))
    return list(dict.fromkeys(chain.from_iterable(steps)))[:most]


class Candidates:
    """Candidates for the blocks of one unit. ``holders``: the ranks that compute it; ``living``: all living ranks."""

    def __init__(self, holders: tuple[int, ...], rules: Rules, living: Tree) -> None:
        self.home = frozenset(holders)
        self._living = living
        self._group = Tree(holders, rules)
        self._mirrors, self._width = rules.mirrors, max(rules.scatter_width, rules.mirrors)
        self._domains = living.domains
        self._shared: dict[tuple[Path, Path], int] = {}
        enough = (min(rules.mirrors + 1, width) for width in living.widths)
        self._alone = len(holders) > rules.mirrors and all(
            width >= least for width, least in zip(self._group.widths, enough, strict=True)
        )
        """True if the holders are in as many domains as a block needs, so that no other rank has to mirror."""
        self._orders: dict[int, dict[int, tuple[int, int]]] = {}
        self._peers: dict[int, frozenset[int]] = {}
        self._least: dict[int, int] = {}
        self._nearest: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}

    def cost(self, owner: int, rank: int, taken: tuple[int, ...]) -> int:
        """Return the cost of a mirror on ``rank`` in addition to those on ``taken``."""
        shared = self._sharing(rank, owner)
        for copy in taken:
            shared = max(shared, self._sharing(rank, copy))
        return 2 * shared + (rank not in self.home)

    def _sharing(self, one: int, other: int) -> int:
        """Return the number of nested domains, from the outermost on, that contain both ranks."""
        pair = self._domains[one], self._domains[other]
        found = self._shared.get(pair)
        if found is None:
            found = self._shared[pair] = shared_levels(*pair)
        return found

    def order(self, owner: int) -> dict[int, tuple[int, int]]:
        """Return rank → (0 for a peer, else 1; place), the nearest first. For any ``taken`` it has a cheapest rank."""
        if owner not in self._orders:
            self._orders[owner] = self._ordered(owner)
        return self._orders[owner]

    def place(self, owner: int, rank: int) -> tuple[int, int] | None:
        """Return the entry of :meth:`order`, also for more distant ranks; None for a rank that cannot mirror."""
        found = self.order(owner).get(rank)
        if found is not None or rank == owner or self._mirrors == 0:
            return found
        able = rank in self.home or (not self._is_enough(owner) and rank in self._domains)
        return (1, len(self._domains) + rank) if able else None

    def peers(self, owner: int) -> frozenset[int]:
        """Return the peers of ``owner``."""
        found = self._peers.get(owner)
        if found is None:
            found = frozenset(rank for rank, (other, _) in self.order(owner).items() if other == 0)
            self._peers[owner] = found
        return found

    def least(self, owner: int) -> int:
        """Return a lower bound of the cost of any mirror of the blocks of ``owner``."""
        found = self._least.get(owner)
        if found is None:
            costs = (self.cost(owner, rank, ()) for rank in self.order(owner))
            found = self._least[owner] = min(costs, default=0)
        return found

    def nearest(self, owner: int, held: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks of ``held`` that can have the first mirror of a block of ``owner`` at the least cost."""
        found = self._nearest.get((owner, held))
        if found is None:
            able = (rank for rank in held if self.place(owner, rank))
            found = tuple(rank for rank in able if self.cost(owner, rank, ()) == self.least(owner))
            self._nearest[owner, held] = found
        return found

    def _is_enough(self, owner: int) -> bool:
        return self._alone and owner in self.home

    def _ordered(self, owner: int) -> dict[int, tuple[int, int]]:
        if self._mirrors == 0:
            return {}
        breadth = max(self._width, self._mirrors + 1)
        ranked = self._group.near(owner, breadth) if owner in self.home else sorted(self.home)
        if not self._is_enough(owner):
            ranked += [rank for rank in self._living.near(owner, breadth) if rank not in self.home]
        peers = self._chosen(owner, ranked)
        return {rank: (0 if rank in peers else 1, place) for place, rank in enumerate(ranked)}

    def _chosen(self, owner: int, ranked: Sequence[int]) -> set[int]:
        """Return the ranks that successive blocks take: the cheapest ones, unused ones at equal cost."""
        peers = set[int]()
        while True:
            taken: tuple[int, ...] = ()
            for _ in range(min(self._mirrors, len(ranked))):
                free = [rank for rank in ranked if rank not in taken]
                costs = [(self.cost(owner, rank, taken), rank in peers) for rank in free]
                taken += (free[costs.index(min(costs))],)
            fresh = [rank for rank in taken if rank not in peers][: self._width - len(peers)]
            if not fresh:
                return peers
            peers |= set(fresh)
