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
from datetime import timedelta
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from megatron.elastic import _comm
from megatron.elastic.comm import registry
from megatron.elastic.comm.address import Address, EndpointValue
from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.fabric import BlockRange, EditReport, Fabric
from megatron.elastic.comm.monitored import in_gloos_words
from megatron.elastic.comm.reconfigure import Driven, Reconfigurable, handle_of, reconfigure
from megatron.elastic.comm.side_channel import AWAITED, BACKGROUND_ROLE, BESIDE_A_STEP, PIECE_BYTES, SideChannel
from megatron.elastic.comm.transfers import Transfers

__all__ = ["NativeFabric", "NativeGroup"]

WORLD_ROLE = "world"

_log = logging.getLogger(__name__)


class NativeGroup(Driven, _comm.ElasticProcessGroup):
    """A native group that others' managers can drive as well (:mod:`megatron.elastic.comm.reconfigure`)."""

    def __init__(
        self, fabric: Reconfigurable, hub: _comm.Hub, name: str, members: Sequence[int], *, slot_space: bool
    ) -> None:
        _comm.ElasticProcessGroup.__init__(
            self, hub=hub, name=name, members=list(members), slot_space=slot_space, timeout=fabric.timeout
        )
        self._fabric = fabric
        self._own_rank = fabric.rank

        def edit(uuid: int, handles: list[str], ordered: bool, seconds: float) -> None:
            timeout = timedelta(seconds=seconds) if seconds >= 0 else None
            reconfigure(fabric, uuid, handles if ordered else set(handles), timeout)

        self.on_reconfigure(lambda: handle_of(fabric), edit)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier. Raises ``BarrierTimeout``, at the first living member with the ranks that did not come."""
        given = {} if timeout is None else {"timeout": timeout}
        with in_gloos_words(self._own_rank, self.living()[0]):
            _comm.ElasticProcessGroup.monitored_barrier(self, wait_all_ranks=wait_all_ranks, **given)

    def get_error(self) -> ErrorType:
        """torch's word for the state of the group: an error is one that only an edit ends."""
        return ErrorType.COMM_ERROR if self.failed() else ErrorType.SUCCESS

    def forget(self) -> None:
        """Let the hub and the fabric go; the group must not be used afterwards."""
        self.on_reconfigure(None, None)
        self.release()


class NativeFabric(Fabric):
    """See the module docstring and :class:`~megatron.elastic.comm.fabric.Fabric`.

    The processes of the job share ``secret``, which is never sent. ``host`` is the name or the address (IPv4 or
    IPv6) at which this process listens and its peers reach it; of a name, an IPv4 address is preferred.
    ``transport`` is the one between ranks of one host: ``shm`` (raises ``CommError`` if shared memory is full),
    ``tcp``, or ``auto`` (shared memory; if that is full, TCP and one line in the log). ``timeout`` bounds every
    wait, in seconds. With ``dense_world`` the default group counts the living ranks, as sub-groups do. A link over TCP
    breaks when the peer's host has acknowledged nothing for ``silent`` seconds. A peer that only does not read stays.
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
        dense_world: bool = False,
        silent: float = 20.0,
    ) -> None:
        self.rank = rank
        self.slots = slots
        self.generation = 0
        self.timeout = timeout
        self._host = host
        self._dense_world = dense_world
        self._hub = _comm.Hub(
            rank=rank,
            slots=slots,
            incarnation=incarnation,
            run_id=run_id,
            secret=secret,
            bind=_numeric(host),
            shared_memory=transport != "tcp",
            silent_seconds=silent,
        )
        notice = self._hub.notice()
        if notice and transport == "shm":
            self._hub.close()
            raise CommError(f"{notice} (--elastic-transport shm)")
        if notice:
            _log.warning("%s", notice)
        self._groups: dict[tuple[str, tuple[int, ...]], NativeGroup] = {}
        self._incarnation = incarnation
        self._copies = False  # it was said that memory cannot be lent
        self._peers: dict[int, tuple[int, _comm.Peer]] = {}  # incarnation and peer, by rank
        self._living = registry.Living(frozenset(range(slots)))  # as torch's tables have it
        self._world = self._make(WORLD_ROLE, tuple(range(slots)), slot_space=not dense_world)

    # -- membership ---------------------------------------------------------

    def address(self) -> Address:
        own = self._hub.self()
        endpoint: dict[str, EndpointValue] = {
            "ip": own.ip,
            "port": own.port,
            "unix": own.unix_name,
            "machine": own.machine,
            "broken": [list(end) for end in self._hub.broken()],
        }
        return Address(self.rank, own.incarnation, self._host, endpoint)

    def edit(self, generation: int, members: Mapping[int, Address], timeout: float) -> EditReport:
        if self.rank not in members:
            raise CommError(f"rank {self.rank} is not a member of generation {generation}")
        stats = self._hub.edit(generation, self._peers_of(members), timeout)
        began = time.monotonic()
        self.generation = generation
        self._living.ranks = frozenset(members)
        if self._dense_world:
            registry.set_ranks(self._world, range(len(members)), registry.Living(range(len(members))))
        seconds = {
            "quiesce": stats.quiesce,
            "drop": stats.drop,
            "connect": stats.connect,
            "publish": stats.publish,
            "torch": time.monotonic() - began,
        }
        return EditReport(generation, seconds, len(self._groups) + 1, stats.opened, stats.dropped, stats.ahead)

    def _peers_of(self, members: Mapping[int, Address]) -> list[_comm.Peer]:
        """``members`` as the native part has them; all but broken links is fixed for an incarnation, and kept."""
        me = [self.rank, self._incarnation]
        peers = []
        for rank, address in members.items():
            incarnation, peer = self._peers.get(rank, (-1, None))
            if peer is None or incarnation != address.incarnation:
                peer = _peer(address)
                self._peers[rank] = address.incarnation, peer
            broken = address.endpoint.get("broken")
            if broken and me in cast("Sequence[Sequence[int]]", broken):
                peer = _peer(address, [(self.rank, self._incarnation)])
            peers.append(peer)
        return peers

    def prepare(self, members: Mapping[int, Address], timeout: float) -> int:
        return self._hub.prepare(self._peers_of(members), timeout)

    def sever(self, rank: int, quietly: bool = False) -> None:
        """Break the link to ``rank`` and nothing else (an injected fault); ``quietly``: only this end notices.

        Raises ``CommError`` where there is no link.
        """
        self._hub.sever(rank, quietly)

    def interrupt(self, generation: int) -> None:
        if generation > self._hub.generation():
            self._hub.interrupt(generation)

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(self._hub.alive())

    def waiting_for(self) -> tuple[int, ...]:
        return tuple(self._hub.waiting_for())

    def refused(self) -> dict[str, int]:
        """Number of refused connections by reason (wrong secret, stale incarnation, malformed data, …)."""
        return self._hub.counters()

    def transport(self, rank: int) -> str:
        """``"shm"``, ``"tcp"``, ``"self"`` or ``"none"``: how ``rank`` is linked now."""
        return self._hub.transport(rank)

    # -- groups -------------------------------------------------------------

    @property
    def world(self) -> NativeGroup:
        return self._world

    def group(self, role: str, members: Sequence[int]) -> NativeGroup:
        key = (role, tuple(members))
        if key == (WORLD_ROLE, tuple(range(self.slots))):
            return self._world
        if self.rank not in key[1]:
            raise ValueError(f"rank {self.rank} is not in group {registry.group_name(*key)}")
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = self._make(role, key[1], slot_space=False)
            registry.register(group, registry.group_name(*key), dist.HashStore(), key[1], self._living)
        return group

    def group_apart(self, role: str, members: Sequence[int]) -> NativeGroup:
        """Return a new group that ``torch.distributed`` does not list; its ``forget`` ends it."""
        return self._make(role, tuple(members), slot_space=False)

    def _make(self, role: str, members: tuple[int, ...], *, slot_space: bool) -> NativeGroup:
        return NativeGroup(self, self._hub, registry.group_name(role, members), members, slot_space=slot_space)

    def release(self, role_prefix: str) -> None:
        for key in [key for key in self._groups if key[0].startswith(role_prefix)]:
            group = self._groups.pop(key)
            registry.unregister(group)
            group.forget()

    def side_channel(self, number: int) -> SideChannel:
        group = self.group(BACKGROUND_ROLE, range(self.slots))
        return group.side_channel(number, PIECE_BYTES, BESIDE_A_STEP, AWAITED)

    def transfers(self, group: dist.ProcessGroup, tag: int) -> Transfers:
        return _ours(group).transfers(tag)

    def sum_over_ranks(self, values: Sequence[float], counts: Sequence[int]) -> tuple[list[float], list[int]]:
        """See :meth:`Fabric.sum_over_ranks`. One native call: on a busy rank each layer on the way is in no cache."""
        return self._world.sum(values, counts)

    def lendable(self, count: int) -> torch.Tensor:
        memory = self._hub.lendable(count)
        if memory is not None:
            return memory
        if self._hub.self().unix_name and not self._copies:
            self._copies = True
            _log.warning("mirrors on this host copy gradients: shared memory is short, or limited by ulimit -f or -v")
        return super().lendable(count)

    def on_loan(self, address: int) -> bool:
        return self._hub.on_loan(address)

    # -- blocks -------------------------------------------------------------

    def reduce_scatter_blocks(self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]) -> None:
        _ours(group).reduce_scatter_blocks(flat, _triples(blocks))

    def all_gather_blocks(self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]) -> None:
        _ours(group).all_gather_blocks(flat, _triples(blocks))

    def begin_reduce_scatter_blocks(
        self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]
    ) -> dist.Work:
        return _ours(group).begin_reduce_scatter_blocks(
            flat, [(block.start, block.stop, block.owner) for block in blocks]
        )

    def begin_all_gather_blocks(
        self, group: dist.ProcessGroup, flat: torch.Tensor, blocks: Sequence[BlockRange]
    ) -> dist.Work:
        return _ours(group).begin_all_gather_blocks(flat, _triples(blocks))

    def close(self) -> None:
        for group in self._groups.values():
            registry.unregister(group)
            group.on_reconfigure(None, None)
        self._groups.clear()
        self._world.on_reconfigure(None, None)
        self._hub.close()


def _numeric(host: str) -> str:
    """The address of ``host``. Raises ``CommError`` where it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise CommError(f"host name {host} cannot be resolved: {error}") from error
    return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])


def _triples(blocks: Sequence[BlockRange]) -> list[tuple[int, int, int]]:
    return [(block.start, block.stop, block.owner) for block in blocks]


def _ours(group: dist.ProcessGroup) -> _comm.ElasticProcessGroup:
    if not isinstance(group, _comm.ElasticProcessGroup):
        raise CommError(f"block lists need a group of this fabric, not {type(group).__name__}")
    return group


def _peer(address: Address, broken: Sequence[tuple[int, int]] = ()) -> _comm.Peer:
    """``broken``: (rank, incarnation) to which it has found its link broken."""
    endpoint = address.endpoint
    return _comm.Peer(
        rank=address.rank,
        incarnation=address.incarnation,
        ip=str(endpoint["ip"]),
        port=int(str(endpoint["port"])),
        unix_name=str(endpoint["unix"]),
        machine=str(endpoint["machine"]),
        broken=list(broken),
    )
