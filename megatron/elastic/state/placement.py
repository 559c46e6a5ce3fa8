"""The placement of state blocks on owners and mirrors, and its instant change after a loss.

A :class:`Placement` names one owner and the mirrors of every block. It
changes only by three transitions: *add* a copy, *promote* a mirror to owner,
*drop* a copy (docs/design.md §6). A change of membership has two stages. This
file has the first, ``ownership.rebalance`` is the second:

- :func:`promote_only`, instant: for each lost owner a surviving mirror becomes
  owner. No byte is sent; balance and redundancy may be incomplete.
- ``rebalance``: adds, promotions and drops that restore both.

All are pure functions of integers: each process derives the same placement from
the same decision and compares :meth:`Placement.digest`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, takewhile
from typing import Literal

from megatron.elastic.state.layout import BlockKey, StateBlock

__all__ = [
    "Copies",
    "Ownership",
    "Placement",
    "Promotion",
    "Rules",
    "Transition",
    "UnitGroup",
    "classes_of",
    "promote_only",
    "shared_levels",
]


@dataclass(frozen=True)
class UnitGroup:
    """All ranks that compute (unit, shard), in order, and the blocks of its flat state."""

    unit: int
    shard: int
    blocks: tuple[StateBlock, ...]
    holders: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.holders or len(set(self.holders)) != len(self.holders):
            raise ValueError(f"unit {self.unit} shard {self.shard}: holders {self.holders}")


def classes_of(groups: Sequence[Iterable[int]]) -> dict[tuple[int, ...], list[int]]:
    """Return the ranks, ascending, by the numbers of the ``groups`` that they are in."""
    found: dict[int, list[int]] = {}
    for number, ranks in enumerate(groups):
        for rank in ranks:
            found.setdefault(rank, []).append(number)
    classes: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(found):
        classes.setdefault(tuple(found[rank]), []).append(rank)
    return classes


@dataclass(frozen=True)
class Copies:
    """The ranks that hold one block. Mirrors are sorted, so equal copies compare equal."""

    owner: int
    mirrors: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "mirrors", tuple(sorted(self.mirrors)))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks with a copy, the owner first."""
        return (self.owner, *self.mirrors)


Ownership = Literal["interleaved", "contiguous"]
"""Interleaved: each unit is divided over all its holders. Contiguous: the units with the same holders are concatenated
and cut once, as Megatron's distributed optimizer cuts its buffers. A unit then mostly has one owner or two, and moving
a unit moves the cuts of all (for comparison)."""


@dataclass(frozen=True)
class Rules:
    """The rules for spreading copies."""

    mirrors: int
    scatter_width: int
    domains: Mapping[int, int]
    """Every living rank → its innermost failure domain (a node)."""
    ownership: Ownership = "interleaved"
    wider: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Innermost domain → the domains around it (racks), outermost first; the same number for each. Missing: none."""

    def path(self, rank: int) -> tuple[int, ...]:
        """Return the failure domains of ``rank``, outermost first."""
        domain = self.domains[rank]
        return (*self.wider.get(domain, ()), domain)


def shared_levels(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the number of nested domains, from the outermost on, that two :meth:`Rules.path` share."""
    return sum(takewhile(bool, (mine == its for mine, its in zip(one, other, strict=True))))


@dataclass(frozen=True)
class Transition:
    """One change of one copy. ``source``: the rank that sends an added copy, else -1."""

    kind: Literal["add", "promote", "drop"]
    block: BlockKey
    rank: int
    source: int = -1


@dataclass(frozen=True)
class Placement:
    """Owner and mirrors of every block of the job."""

    copies: Mapping[BlockKey, Copies]

    @cached_property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        """Sets of ranks of which each holds all copies of some block; ascending, without repetition."""
        return tuple(sorted({tuple(sorted(ranks)) for ranks in {copies.ranks for copies in self.copies.values()}}))

    def owner(self, key: BlockKey) -> int:
        """Return the rank that updates the block and contributes it to all-gathers."""
        return self.copies[key].owner

    def owned_by(self, rank: int) -> tuple[BlockKey, ...]:
        """Return the blocks that ``rank`` owns, ascending."""
        return tuple(sorted(key for key, copies in self.copies.items() if copies.owner == rank))

    def mirrored_by(self, rank: int) -> tuple[BlockKey, ...]:
        """Return the blocks that ``rank`` mirrors, ascending."""
        return tuple(sorted(key for key, copies in self.copies.items() if rank in copies.mirrors))

    def held_by(self, rank: int) -> tuple[BlockKey, ...]:
        """Return the blocks of which ``rank`` has a copy, ascending."""
        return tuple(sorted(key for key, copies in self.copies.items() if rank in copies.ranks))

    def owners_only(self) -> Placement:
        """Return the placement without mirrors."""
        return Placement({key: Copies(copies.owner) for key, copies in self.copies.items()})

    def apply(self, transitions: Iterable[Transition]) -> Placement:
        """Return the placement after ``transitions``, in order. Raises ``ValueError`` on an impossible one."""
        copies = dict(self.copies)
        for change in transitions:
            copies[change.block] = _applied(copies[change.block], change)
        return Placement(copies)

    def with_copies(self, copies: Mapping[BlockKey, Sequence[int]]) -> Placement:
        """Return the placement with the same owners, and all other ranks of ``copies`` as mirrors."""
        return Placement(
            {
                key: held if held.ranks == tuple(copies[key]) else Copies(held.owner, _others(copies[key], held.owner))
                for key, held in self.copies.items()
            }
        )

    def to_json(self) -> str:
        """Return compact JSON: per (unit, shard) the copies of its blocks, ascending."""
        ordered = sorted(self.copies.items())
        rows = [
            [unit, shard, [copies.ranks for _, copies in items]]
            for (unit, shard), items in groupby(ordered, key=lambda item: item[0][:2])
        ]
        return json.dumps(rows, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Placement:
        """Inverse of :meth:`to_json`."""
        return cls(
            {
                (unit, shard, index): Copies(ranks[0], tuple(ranks[1:]))
                for unit, shard, blocks in json.loads(text)
                for index, ranks in enumerate(blocks)
            }
        )

    def digest(self) -> str:
        """Return a hash to compare between processes."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]


def _others(ranks: Iterable[int], owner: int) -> tuple[int, ...]:
    return tuple(rank for rank in ranks if rank != owner)


def _applied(copies: Copies, change: Transition) -> Copies:
    rank = change.rank
    if change.kind == "add" and rank not in copies.ranks:
        return Copies(copies.owner, (*copies.mirrors, rank))
    if change.kind == "promote" and rank in copies.mirrors:
        return Copies(rank, tuple(copies.owner if r == rank else r for r in copies.mirrors))
    if change.kind == "drop" and rank in copies.mirrors:
        return Copies(copies.owner, tuple(r for r in copies.mirrors if r != rank))
    raise ValueError(f"cannot {change.kind} block {change.block} at rank {rank}: copies are {copies.ranks}")


@dataclass(frozen=True)
class Promotion:
    """Result of the instant stage. ``lost`` blocks have no copy left; only a checkpoint on disk has them."""

    placement: Placement
    transitions: tuple[Transition, ...]
    lost: tuple[BlockKey, ...]


def promote_only(
    placement: Placement,
    survivors: Collection[int],
    groups: Sequence[UnitGroup] = (),
    gone: Collection[tuple[BlockKey, int]] = (),
) -> Promotion:
    """Make a surviving mirror the owner of each block whose owner is lost, and drop lost copies. Sends nothing.

    With ``groups`` (those of the new topology) an owner that no longer computes the
    unit (parked) is replaced by a mirror that does, if there is one. Of several candidates
    the one that owns the fewest blocks of the unit is chosen. ``gone``: copies (block, rank)
    that no longer count although their ranks survive.
    """
    alive, unusable = frozenset(survivors), frozenset(gone)
    holders = {(g.unit, g.shard): frozenset(g.holders) for g in groups}
    copies: dict[BlockKey, Copies] = {}
    orphans: list[tuple[int, BlockKey, tuple[int, ...], tuple[int, ...]]] = []
    lost: list[BlockKey] = []
    for key, held in placement.copies.items():
        home = holders.get(key[:2])
        if unusable and any((key, rank) in unusable for rank in held.ranks):
            held = Copies(*_usable(key, held, unusable))
        if held.owner in alive and (home is None or held.owner in home):
            whole = alive.issuperset(held.mirrors)
            copies[key] = held if whole else Copies(held.owner, tuple(r for r in held.mirrors if r in alive))
            continue
        left = tuple(r for r in held.ranks if r in alive)
        able = left if home is None else tuple(r for r in left if r in home) or left
        if held.owner in able:
            copies[key] = Copies(held.owner, left[1:])
        elif able:
            orphans.append((len(able), key, able, left))
        else:
            lost.append(key)
    load = _loads(copies, {key[:2] for _, key, _, _ in orphans})
    changes: list[Transition] = []
    for _, key, able, left in sorted(orphans):  # blocks with the fewest candidates first
        unit, shard, _ = key
        chosen = min(able, key=lambda r: (load.get((unit, shard, r), 0), r))
        load[unit, shard, chosen] = load.get((unit, shard, chosen), 0) + 1
        copies[key] = Copies(chosen, tuple(r for r in left if r != chosen))
        changes.append(Transition("promote", key, chosen))
    return Promotion(Placement(copies), tuple(changes), tuple(sorted(lost)))


_NO_RANK = -1


def _usable(key: BlockKey, held: Copies, gone: Collection[tuple[BlockKey, int]]) -> tuple[int, tuple[int, ...]]:
    """Return (owner or :data:`_NO_RANK`, mirrors) without the copies that are ``gone``."""
    owner = _NO_RANK if (key, held.owner) in gone else held.owner
    return owner, tuple(rank for rank in held.mirrors if (key, rank) not in gone)


def _loads(copies: Mapping[BlockKey, Copies], units: Collection[tuple[int, int]]) -> dict[tuple[int, int, int], int]:
    """Return (unit, shard, rank) → number of its owned blocks, for ``units``."""
    load: dict[tuple[int, int, int], int] = {}
    for key, held in copies.items():
        if key[:2] in units:
            place = (key[0], key[1], held.owner)
            load[place] = load.get(place, 0) + 1
    return load
