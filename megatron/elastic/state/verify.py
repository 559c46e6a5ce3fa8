"""Rolling verification: silent corruption is located by block, tensor and rank, and repaired from another copy.

Lineages (``hashing``) prove that copies have the same history; they do not detect memory that
changed by itself. So every block's copies are fingerprinted once in N versions, a
share of the blocks at each (:func:`due`). The fingerprints are gathered, and
:func:`compare` finds the wrong copy:

- with three copies or more, the minority is wrong. Copies that were made of one since the last comparison have one
  vote with it: a wrong copy would be streamed to a new mirror, and both would outvote the right one;
- with two copies, the owner's is wrong if it differs from the parameters last gathered from
  it while the mirror's agrees with them. Otherwise the result is *undecided*, and only
  a checkpoint can replace the state. With two mirrors every single corruption is decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from megatron.elastic.state.hashing import content_hash
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.placement import Placement, Transition
from megatron.elastic.state.pool import StatePool

__all__ = ["Corruption", "Fingerprint", "compare", "compared", "due", "fingerprints", "repairs"]

TENSORS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Fingerprint:
    """Hashes of one copy at one version; ``cast``: hash of the master cast to the parameters' type."""

    version: int
    master: str
    exp_avg: str
    exp_avg_sq: str
    cast: str = ""
    origin: int = field(default=-1, compare=False)
    """:attr:`BlockCopy.origin`."""


@dataclass(frozen=True)
class Corruption:
    """A corrupted copy: ``rank``'s copy of ``block`` is wrong in ``tensors``; -1: undecided among ``suspects``."""

    block: BlockKey
    rank: int
    tensors: tuple[str, ...]
    suspects: tuple[int, ...]

    def __str__(self) -> str:
        place = f"rank {self.rank}" if self.rank >= 0 else f"one of ranks {list(self.suspects)}"
        return f"block {self.block}: {', '.join(self.tensors)} corrupted at {place}"


def due(key: BlockKey, version: int, interval: int) -> bool:
    """Return whether ``key`` is verified at ``version``: once in ``interval`` versions, a share of blocks at each."""
    unit, shard, index = key
    return interval > 0 and (version + 7 * unit + 3 * shard + index) % interval == 0


def fingerprints(
    pool: StatePool, keys: Iterable[BlockKey], model_dtype: torch.dtype = torch.float32
) -> dict[BlockKey, Fingerprint]:
    """Return fingerprints of this rank's counted copies among ``keys``."""
    table = {}
    for key in keys:
        if key in pool and pool.get(key).counted:
            copy = pool.get(key)
            master, exp_avg, exp_avg_sq = copy.store.on_host()
            table[key] = Fingerprint(
                version=copy.version,
                master=content_hash(key, master),
                exp_avg=content_hash(key, exp_avg),
                exp_avg_sq=content_hash(key, exp_avg_sq),
                cast=content_hash(key, master.to(model_dtype)),
                origin=copy.origin,
            )
    return table


def compared(pool: StatePool, version: int, interval: int) -> None:
    """Note that the blocks that were due at ``version`` have been compared: each copy has a vote of its own again."""
    keys = [key for key in pool if due(key, version, interval)]
    pool.forget_origins(keys)
    pool.doubt(keys, -1)


def compare(
    tables: Mapping[int, Mapping[BlockKey, Fingerprint]],
    placement: Placement,
    parameters: Mapping[int, Mapping[BlockKey, str]] | None = None,
) -> tuple[Corruption, ...]:
    """Return the differences among the copies of each block. ``parameters``: rank → block → hash of its parameters.

    Copies of another version than the owner's are left out: they are not due for comparison.
    """
    found = []
    for key in sorted({key for table in tables.values() for key in table}):
        held = {rank: table[key] for rank, table in tables.items() if key in table}
        owner = placement.owner(key)
        if owner not in held:
            continue
        held = {rank: mark for rank, mark in held.items() if mark.version == held[owner].version}
        if len(set(held.values())) > 1:
            witness = {table[key] for table in (parameters or {}).values() if key in table}
            found += _wrong_copies(key, owner, held, witness)
    return tuple(found)


def _wrong_copies(key: BlockKey, owner: int, held: Mapping[int, Fingerprint], witness: set[str]) -> list[Corruption]:
    marks = {(mark.origin if mark.origin >= 0 else rank, mark) for rank, mark in sorted(held.items())}
    counts = Counter(mark for _, mark in marks)
    right, votes = counts.most_common(1)[0]
    if 2 * votes <= counts.total():
        others = {rank: mark for rank, mark in held.items() if rank != owner}
        agreeing = [mark for mark in others.values() if {mark.cast} == witness]
        if not agreeing or held[owner].cast in witness:
            differing = _differing(*sorted(counts, key=repr)[:2])
            return [Corruption(key, -1, differing, tuple(sorted(held)))]
        right = agreeing[0]
    return [
        Corruption(key, rank, _differing(mark, right), tuple(sorted(held)))
        for rank, mark in sorted(held.items())
        if mark != right
    ]


def _differing(a: Fingerprint, b: Fingerprint) -> tuple[str, ...]:
    return tuple(name for name in TENSORS if getattr(a, name) != getattr(b, name))


def repairs(
    found: Iterable[Corruption], placement: Placement, groups: Mapping[tuple[int, int], Collection[int]] | None = None
) -> tuple[Transition, ...]:
    """Transitions that replace each corrupted copy from a healthy one; undecided findings have none.

    A corrupted owner hands over to a healthy mirror first, to one that computes the unit where there is one: ``groups``
    has the ranks of each (unit, shard). The dropped copy comes back as a mirror, streamed from the (new) owner.
    """
    bad: dict[BlockKey, set[int]] = {}
    for corruption in found:
        if corruption.rank >= 0:
            bad.setdefault(corruption.block, set()).add(corruption.rank)
    changes: list[Transition] = []
    for key, ranks in sorted(bad.items()):
        healthy = [rank for rank in placement.copies[key].ranks if rank not in ranks]
        if not healthy:
            continue
        group = (groups or {}).get(key[:2], ())
        owner = placement.owner(key)
        if owner in ranks:
            owner = next((rank for rank in healthy if rank in group), healthy[0])
            changes.append(Transition("promote", key, owner))
        for rank in sorted(ranks):
            changes += [Transition("drop", key, rank), Transition("add", key, rank, owner)]
    return tuple(changes)
