"""torch's own protocol for process groups that change (torch 2.14 and later), over ``Fabric.edit``.

There, a manager (torchft's, for one) collects ``_get_reconfigure_handle()`` of
all processes that are to take part and calls ``_reconfigure(uuid, handles)`` on each;
``torch.distributed`` hands both to the group's ``get_reconfigure_handle`` and
``reconfigure``. Here a handle is an :class:`Address` as JSON, and ``uuid`` the
generation, which must grow.

An edit concerns all groups of a process at once, whichever group it is asked of.

One difference, on purpose: the protocol numbers ranks by position in
``handles``; the default group of this runtime is the slot space, where a rank
is never renumbered. Handles must therefore name slots in ascending order.
Sub-groups hold the living only; so does the default group of a fabric made with
``dense_world``, which is what ``init_process_group(enable_reconfigure=True)`` gives:
there, ranks and size are those the protocol promises.

What newer releases of torch call is held by :mod:`megatron.elastic.comm.contract`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from megatron.elastic.comm.address import Address
from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.fabric import EditReport

__all__ = ["Driven", "Reconfigurable", "handle_of", "members_of", "reconfigure"]


class Reconfigurable(Protocol):
    """The part of a fabric that the protocol needs."""

    rank: int
    timeout: float

    def address(self) -> Address: ...

    def interrupt(self, generation: int) -> None: ...

    def edit(self, generation: int, members: Mapping[int, Address], timeout: float) -> EditReport: ...


class Options(Protocol):
    """The fields of torch's ``ReconfigureOptions`` that are read."""

    uuid: int
    handles: Collection[str]
    timeout: timedelta | None


def handle_of(fabric: Reconfigurable) -> str:
    """The address of this process for its peers, as text."""
    return msgspec.json.encode(fabric.address(), order="deterministic").decode()


def members_of(handles: Collection[str]) -> dict[int, Address]:
    """Rank → address; a set (whose order is ours to choose) is sorted.

    Raises ``CommError`` for text that is no handle, or two of one rank.
    """
    members: dict[int, Address] = {}
    for handle in handles:
        try:
            address = msgspec.json.decode(handle, type=Address)
        except (TypeError, ValueError, msgspec.DecodeError) as error:
            raise CommError(f"not a reconfigure handle of this backend: {handle!r}") from error
        if address.rank in members:
            raise CommError(f"two handles for rank {address.rank}")
        members[address.rank] = address
    if isinstance(handles, (set, frozenset)):
        members = dict(sorted(members.items()))
    if list(members) != sorted(members):
        raise CommError("handles must be in ascending order of rank: slots are never renumbered")
    return members


def reconfigure(fabric: Reconfigurable, uuid: int, handles: Collection[str], timeout: timedelta | None) -> dist.Work:
    """Void pending operations, then make the processes behind ``handles`` the living ones (generation ``uuid``)."""
    members = members_of(handles)
    fabric.interrupt(uuid)
    fabric.edit(uuid, members, timeout.total_seconds() if timeout else fabric.timeout)
    return _Done()


class Driven:
    """The protocol's methods, for a process group that knows its fabric (``_fabric``)."""

    _fabric: Reconfigurable

    def _get_backend(self, device: torch.device) -> Any:
        """A group of ours is its own backend: torch 2.14 and later ask it before a batch of sends and receives."""
        return self

    def get_backend(self, device: torch.device) -> Any:
        """The same by its name from torch 2.15 on, where ``torch.distributed.get_backend_impl`` calls it."""
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors a group always takes, which torch's checkpoints ask for."""
        return [torch.device("cpu")]

    @property
    def supports_reconfigure(self) -> bool:
        return True

    def get_reconfigure_handle(self) -> str:
        return handle_of(self._fabric)

    def reconfigure(self, opts: Options) -> dist.Work:
        """``opts`` is torch's ``ReconfigureOptions``. Raises ``CommError`` for what is no handle or an old ``uuid``."""
        return reconfigure(self._fabric, opts.uuid, opts.handles, opts.timeout)

    def _supports_reconfigure(self) -> bool:
        return True

    def _get_reconfigure_handle(self) -> str:
        return handle_of(self._fabric)

    def _reconfigure(
        self, uuid: int, handles: Collection[str], timeout: timedelta | None = None, hints: object = None
    ) -> dist.Work:
        return reconfigure(self._fabric, uuid, handles, timeout)


class _Done(dist.Work):
    """The edit is synchronous: its work is complete when it is returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future
