"""Links that outlive the quorums of a manager which numbers its members anew each time, as torchft's does.

A quorum has ranks 0 to n - 1 and a store of its own. A slot of a fabric is never renumbered. So a process keeps its
slot and its links, and each quorum gets a group that lists the slots in the order of its ranks. Members meet in the
quorum's store: each says which slot it has (:class:`QuorumMember`). All derive the same :class:`QuorumDecision` from
these words, and an edit makes the members the living ones.

Invariants
- The generation of a quorum is greater than any that a member has used or tried. It is also the incarnation of those
  that get a slot in it, so a slot that changes hands is never mistaken for the process that had it before.
- Members without a slot, or with one of another lineage (a run name and its secret), begin anew in that of the first
  rank that has one. A reader of the quorum's store can join, as with any other backend.
"""

from __future__ import annotations

import atexit
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch.distributed as dist

from megatron.elastic.comm.entry_point import address_towards
from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.native import NativeFabric, NativeGroup
from megatron.elastic.comm.reconfigure import handle_of, members_of

__all__ = ["QuorumDecision", "QuorumLinks", "QuorumMember", "agree"]

NO_SLOT = -1


@dataclass(frozen=True)
class QuorumMember:
    """A member's word at the start of a quorum. ``generation`` is the last one that it used or tried."""

    run_id: str
    secret: str
    slot: int
    generation: int


@dataclass(frozen=True)
class QuorumDecision:
    """The lineage and generation of a quorum, and its slots in the order of its ranks."""

    run_id: str
    secret: str
    generation: int
    slots: tuple[int, ...]


def agree(present: Sequence[QuorumMember], slots: int) -> QuorumDecision:
    """Derive the decision of a quorum from all its members' words. Raises ``CommError`` beyond ``slots`` members."""
    if len(present) > slots:
        raise CommError(f"a quorum of {len(present)} does not fit {slots} slots: raise slots=")
    first = next((one for one in present if one.slot != NO_SLOT), present[0])
    kept: list[int] = []
    for one in present:
        keeps = one.run_id == first.run_id and one.slot not in kept
        kept.append(one.slot if keeps else NO_SLOT)
    free = iter(sorted(set(range(slots)) - set(kept)))
    return QuorumDecision(
        first.run_id,
        first.secret,
        1 + max(one.generation for one in present),
        tuple(next(free) if slot == NO_SLOT else slot for slot in kept),
    )


class QuorumLinks:
    """One process's links, and its group in the present quorum.

    ``host`` is the address at which peers reach this process (default: that of the way to the store). ``slots``
    bounds the members of a quorum and is the same everywhere.
    """

    def __init__(self, host: str | None = None, slots: int = 64) -> None:
        self._host = host
        self._slots = slots
        self._fabric: NativeFabric | None = None
        self._lineage = (secrets.token_hex(8), secrets.token_hex(16))
        self._generation = 0
        self._group: NativeGroup | None = None

    def meet(self, store: dist.Store, rank: int, size: int, timeout: float) -> NativeGroup:
        """Return the group of a quorum in whose ``store`` no other has met. Collective.

        Raises ``CommError``, or an error of the store, if a member is missing after ``timeout`` seconds; the next
        quorum is met all the same.
        """
        self.interrupt()
        slot = NO_SLOT if self._fabric is None else self._fabric.rank
        mine = QuorumMember(*self._lineage, slot, self._generation)
        words = _exchanged(store, "here", rank, size, msgspec.json.encode(mine))
        found = agree([msgspec.json.decode(word, type=QuorumMember) for word in words], self._slots)
        self._generation = found.generation
        fabric = self._take_place(store, found, found.slots[rank], timeout)
        handles = _exchanged(store, "address", rank, size, handle_of(fabric).encode())
        members = members_of({handle.decode() for handle in handles})
        fabric.edit(found.generation, members, timeout)
        self._group = fabric.group_apart(f"quorum{found.generation}", found.slots)
        return self._group

    def _take_place(self, store: dist.Store, found: QuorumDecision, slot: int, timeout: float) -> NativeFabric:
        """Return this process's fabric, with its links if it keeps its slot."""
        if self._fabric is not None and (self._lineage[0], self._fabric.rank) == (found.run_id, slot):
            self._drop_group()
            self._fabric.timeout = timeout
            return self._fabric
        self.close()
        self._lineage = (found.run_id, found.secret)
        self._fabric = NativeFabric(
            slot,
            self._slots,
            found.generation,
            run_id=found.run_id,
            secret=bytes.fromhex(found.secret),
            host=self._host or address_towards(store),
            timeout=timeout,
        )
        atexit.register(self.close)  # threads must not outlive the interpreter
        return self._fabric

    def interrupt(self) -> None:
        """End all that is pending with ``GenerationChanged``. What is asked for before the next quorum fails, too."""
        if self._fabric is not None:
            self._generation += 1
            self._fabric.interrupt(self._generation)

    def close(self) -> None:
        """End links and threads. The next quorum begins without them."""
        atexit.unregister(self.close)
        self._drop_group()
        if self._fabric is not None:
            self._fabric.close()
            self._fabric = None

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.forget()
            self._group = None


def _exchanged(store: dist.Store, topic: str, rank: int, size: int, value: bytes) -> list[bytes]:
    """Return the values of all ranks, in their order."""
    store.set(f"elastic/{topic}/{rank}", value.decode())
    return [store.get(f"elastic/{topic}/{other}") for other in range(size)]
