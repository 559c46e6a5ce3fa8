"""A vendor's collective library (NCCL, HCCL) as something that can be edited.

Bulk data on accelerators goes through the vendor; membership, errors and
waiting stay ours. A library may be unable to do part of an edit, or hang while
aborting (both have). Hence every call that can block runs in a helper with a time limit
(:mod:`~megatron.elastic.comm.vendor.calls`). If the helper does not return, the process ends and the agent starts it
again, which is faster than any time-out above it.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, NoReturn

import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import CommError

__all__ = [
    "RESPAWN_EXIT_CODE",
    "Edit",
    "Share",
    "VendorCommunicator",
    "VendorError",
    "VendorHang",
    "VendorInterrupted",
    "exit_into_respawn",
    "never",
]

RESPAWN_EXIT_CODE = 75
"""Exit status of a worker that a vendor library has locked up (EX_TEMPFAIL: start it again)."""

Edit = Literal["kept", "shrunk", "grown", "replaced", "rebuilt"]
"""The result of an edit: nothing, dropped members, added, both, or all made anew."""

Share = Callable[[Callable[[], bytes]], bytes]
"""``share(make)`` returns on all members what ``make()`` returns on one of them, the only one that calls it."""

_log = logging.getLogger(__name__)


class VendorError(CommError):
    """The vendor library refused a call; the text names the call and its reason."""


class VendorInterrupted(VendorError):
    """Members that a call was to connect have changed: it was left to a thread that no other waits for."""


class VendorHang(CommError):
    """A vendor call did not return within its limit; its thread is lost."""


def never() -> bool:
    """Return False: nothing interrupts a communicator that no fabric uses."""
    return False


class VendorCommunicator(ABC):
    """One group of one process inside a vendor library.

    ``order`` lists global ranks by vendor rank; empty before :meth:`start` and after
    what was in flight had to be aborted. After members were added it need not be the
    group's member order: libraries append. Tensors are contiguous and on the device;
    operations are enqueued on its current stream.
    """

    order: tuple[int, ...]
    revoked: bool
    """Pending operations have been stopped: none can be begun, members can still be dropped."""
    can_shrink: bool
    can_grow: bool
    interrupted: Callable[[], bool]
    """True once the generation that the next calls are made for is over (:func:`never`, until a fabric says).

    Calls that connect members then end with :class:`VendorInterrupted`."""

    def rebuilds(self, lost: bool, joined: bool, damaged: bool) -> bool:
        """True if such a change makes all anew; the same answer on every process of a job."""
        return damaged or (lost and not self.can_shrink) or (joined and not self.can_grow)

    @abstractmethod
    def new_identity(self) -> bytes:
        """The bytes that the first member passes to the others for :meth:`start`; may be empty."""

    @abstractmethod
    def start(self, members: Sequence[int], identity: bytes) -> None:
        """Connect ``members`` anew, all of them calling this with one ``identity``; free what was connected before."""

    @abstractmethod
    def join(self, order: Sequence[int], identity: bytes) -> None:
        """Enter a communicator that survivors :meth:`edit` at the same time; free what was connected before.

        ``order``: survivors in their order, then newcomers ascending.
        """

    @abstractmethod
    def edit(self, members: Sequence[int], share: Share, damaged: bool = False) -> Edit:
        """Stop what is in flight and make ``members`` (global ranks, this one included) the members.

        Called by survivors. ``damaged``: what stands cannot be kept even
        for the same members. Raises :class:`VendorError`, :class:`VendorHang`.
        """

    @abstractmethod
    def broken(self) -> bool:
        """True if the library has noted an error, after which it refuses to change the communicator."""

    @abstractmethod
    def revoke(self) -> None:
        """End pending operations, from another thread. Idempotent. Raises :class:`VendorHang`."""

    @abstractmethod
    def close(self) -> None:
        """Free everything and abort pending operations. Idempotent."""

    # -- operations: ``root``, ``to`` and ``source`` are vendor ranks ------------

    @abstractmethod
    def takes(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType | None = None) -> bool:
        """True if the library moves (and, with ``op``, reduces) tensors of this type."""

    @abstractmethod
    def batch(self) -> AbstractContextManager[None]:
        """Operations of the block begin together: sends and receives may come in any order."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None: ...

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, root: int, op: dist.ReduceOp.RedOpType) -> None: ...

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> None: ...

    @abstractmethod
    def send(self, tensor: torch.Tensor, to: int) -> None: ...

    @abstractmethod
    def recv(self, tensor: torch.Tensor, source: int) -> None: ...


def exit_into_respawn(hang: VendorHang) -> NoReturn:
    """End this process at once: a thread stuck in the vendor library holds locks that no other thread can free."""
    _log.critical("%s; this process ends, and the launcher starts the rank again", hang)
    logging.shutdown()
    os._exit(RESPAWN_EXIT_CODE)
