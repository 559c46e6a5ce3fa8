"""The fabric over native links: groups edited in place, no process waits for another's rebuild.

A thin layer: links, collectives, waits and the edit live in ``csrc/comm``
(extension ``megatron.elastic._comm``); here are the address of a process, the
groups by (role, members), and what ``torch.distributed`` is told after an edit.

Invariants: every :class:`~megatron.elastic._comm.ElasticProcessGroup` keeps its
identity from first use to ``release``; before the first edit each is a world of
one at nominal size; links to survivors are never touched by an edit.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from megatron.elastic import _comm
from megatron.elastic.comm import registry
from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.fabric import Address, BlockRange, EditReport, Fabric

__all__ = ["NativeFabric"]

WORLD_ROLE = "world"

_log = logging.getLogger(__name__)


class NativeFabric(Fabric):
    """See the module docstring and :class:`~megatron.elastic.comm.fabric.Fabric`.

    ``secret`` is shared by the processes of the job and never travels; ``host``
    is the name or IPv4 address this process listens on and is reached at;
    ``transport`` chooses between ranks of one host: ``shm`` (raises ``CommError``
    when there is no room), ``tcp``, or ``auto`` (shared memory, TCP with one line
    in the log otherwise). ``timeout`` bounds every wait, in seconds.
    """

    def __init__(
        self,
        rank: int,
        slots: int,
        incarnation: int,
        *,
        run_id: str,
        secret: bytes,
        transport: Literal["auto", "shm", "tcp"] = "auto",
        host: str = "127.0.0.1",
        timeout: float = 60.0,
    ) -> None:
        self.rank = rank
        self.slots = slots
        self.generation = 0
        self.timeout = timeout
        self._host = host
        self._hub = _comm.Hub(
            rank=rank,
            slots=slots,
            incarnation=incarnation,
            run_id=run_id,
            secret=secret,
            bind=socket.gethostbyname(host),
            shared_memory=transport != "tcp",
        )
        notice = self._hub.notice()
        if notice and transport == "shm":
            self._hub.close()
            raise CommError(f"{notice} (--elastic-transport shm)")
        if notice:
            _log.warning("%s", notice)
        self._groups: dict[tuple[str, tuple[int, ...]], _comm.ElasticProcessGroup] = {}
        self._world = self._make(WORLD_ROLE, tuple(range(slots)), slot_space=True)

    # -- membership ---------------------------------------------------------

    def address(self) -> Address:
        own = self._hub.self()
        endpoint = {"ip": own.ip, "port": own.port, "unix": own.unix_name, "machine": own.machine}
        return Address(self.rank, own.incarnation, self._host, endpoint)

    def edit(self, generation: int, members: Mapping[int, Address], timeout: float) -> EditReport:
        if self.rank not in members:
            raise CommError(f"rank {self.rank} is not a member of generation {generation}")
        stats = self._hub.edit(generation, [_peer(address) for address in members.values()], timeout)
        began = time.monotonic()
        self.generation = generation
        for (_, everyone), group in self._groups.items():
            registry.set_ranks(group, everyone, [rank for rank in everyone if rank in members])
        seconds = {
            "quiesce": stats.quiesce,
            "drop": stats.drop,
            "connect": stats.connect,
            "publish": stats.publish,
            "torch": time.monotonic() - began,
        }
        return EditReport(generation, seconds, len(self._groups) + 1, stats.opened, stats.dropped)

    def prepare(self, members: Mapping[int, Address], timeout: float) -> int:
        """Open links ahead of the edit that may admit this process; how many stand now.

        For a spare or a newcomer, while ``members`` train: they notice nothing.
        Never raises for a peer that does not answer; the edit opens the rest.
        """
        return self._hub.prepare([_peer(address) for address in members.values()], timeout)

    def interrupt(self, generation: int) -> None:
        if generation > self._hub.generation():
            self._hub.interrupt(generation)

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(self._hub.alive())

    def waiting_for(self) -> tuple[int, ...]:
        return tuple(self._hub.waiting_for())

    def refused(self) -> dict[str, int]:
        """Connections turned away so far, by reason (strangers, stale incarnations, garbage, …)."""
        return self._hub.counters()

    def transport(self, rank: int) -> str:
        """``"shm"``, ``"tcp"``, ``"self"`` or ``"none"``: how ``rank`` is linked now."""
        return self._hub.transport(rank)

    # -- groups -------------------------------------------------------------

    @property
    def world(self) -> _comm.ElasticProcessGroup:
        return self._world

    def group(self, role: str, members: Sequence[int]) -> _comm.ElasticProcessGroup:
        key = (role, tuple(members))
        if key == (WORLD_ROLE, tuple(range(self.slots))):
            return self._world
        if self.rank not in key[1]:
            raise ValueError(f"rank {self.rank} is not in group {registry.group_name(*key)}")
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = self._make(role, key[1], slot_space=False)
            registry.register(group, registry.group_name(*key), dist.HashStore(), key[1])
            if self.generation > 0:
                alive = set(self.alive)
                registry.set_ranks(group, key[1], [rank for rank in key[1] if rank in alive])
        return group

    def _make(self, role: str, members: tuple[int, ...], *, slot_space: bool) -> _comm.ElasticProcessGroup:
        name = registry.group_name(role, members)
        return _comm.ElasticProcessGroup(
            hub=self._hub, name=name, members=list(members), slot_space=slot_space, timeout=self.timeout
        )

    def release(self, role_prefix: str) -> None:
        for key in [key for key in self._groups if key[0].startswith(role_prefix)]:
            group = self._groups.pop(key)
            registry.unregister(group)
            group.release()

    # -- blocks -------------------------------------------------------------

    def reduce_scatter_blocks(self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]) -> None:
        _ours(group).reduce_scatter_blocks(flat, [(block.start, block.stop, block.owner) for block in blocks])

    def all_gather_blocks(self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]) -> None:
        _ours(group).all_gather_blocks(flat, [(block.start, block.stop, block.owner) for block in blocks])

    def close(self) -> None:
        for group in self._groups.values():
            registry.unregister(group)
        self._groups.clear()
        self._hub.close()


def _ours(group: dist.ProcessGroup) -> _comm.ElasticProcessGroup:
    if not isinstance(group, _comm.ElasticProcessGroup):
        raise CommError(f"block lists need a group of this fabric, not {type(group).__name__}")
    return group


def _peer(address: Address) -> _comm.Peer:
    endpoint = address.endpoint
    return _comm.Peer(
        rank=address.rank,
        incarnation=address.incarnation,
        ip=str(endpoint["ip"]),
        port=int(str(endpoint["port"])),
        unix_name=str(endpoint["unix"]),
        machine=str(endpoint["machine"]),
    )
