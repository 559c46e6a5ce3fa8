"""NCCL edited in place, by its C API: revoke → shrink → grow.

``libnccl.so.2`` is opened at run time; nothing here is compiled against it.
What a version lacks is found by symbol, and the edit falls back to the next
cheaper thing it has:

======================  =====================================================
library has             a loss                     a newcomer
======================  =====================================================
revoke, shrink, grow    revoke, shrink             id from the parent, grow
shrink, grow            shrink with the abort flag the same
shrink                  shrink                     abort, made anew by all
nothing of it           abort, made anew by all    abort, made anew by all
======================  =====================================================

Source: NVIDIA's ``nccl.h`` (2.27 brought shrink, later ones revoke and grow).
:data:`PROTOTYPES` is checked against the header and library of a wheel by
``tests/unit/comm/test_nccl.py``. The call sequences are tested over a stand-in library
that is really loaded; on a GPU a group of one has run (docs/gpu.md).
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.elastic.comm.vendor.calls import bounded, connected
from megatron.elastic.comm.vendor.library import Edit, Share, VendorCommunicator, VendorError, VendorInterrupted, never

__all__ = ["PROTOTYPES", "NcclCommunicator", "NcclLibrary"]

UNIQUE_ID_BYTES = 128
SHRINK_DEFAULT, SHRINK_ABORT, REVOKE_DEFAULT = 0, 1, 0
SUCCESS, IN_PROGRESS = 0, 7


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``: passed by value to init, by pointer elsewhere."""

    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


PROTOTYPES: dict[str, str] = {
    "ncclGetVersion": "int *version",
    "ncclGetUniqueId": "ncclUniqueId* uniqueId",
    "ncclCommInitRank": "ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank",
    "ncclCommAbort": "ncclComm_t comm",
    "ncclCommGetAsyncError": "ncclComm_t comm, ncclResult_t *asyncError",
    "ncclCommRevoke": "ncclComm_t comm, int revokeFlags",
    "ncclCommShrink": "ncclComm_t comm, int* excludeRanksList, int excludeRanksCount, ncclComm_t* newcomm, "
    "ncclConfig_t* config, int shrinkFlags",
    "ncclCommGetUniqueId": "ncclComm_t comm, ncclUniqueId* uniqueId",
    "ncclCommGrow": "ncclComm_t comm, int nRanks, const ncclUniqueId* uniqueId, int rank, ncclComm_t* newcomm, "
    "ncclConfig_t* config",
    "ncclAllReduce": "const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, "
    "ncclComm_t comm, cudaStream_t stream",
    "ncclReduce": "const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, "
    "int root, ncclComm_t comm, cudaStream_t stream",
    "ncclBroadcast": "const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, "
    "ncclComm_t comm, cudaStream_t stream",
    "ncclSend": "const void* sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, "
    "cudaStream_t stream",
    "ncclRecv": "void* recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream",
    "ncclGroupStart": "",
    "ncclGroupEnd": "",
}
"""Each function used → its parameters, as the header spells them."""

OPTIONAL = frozenset({"ncclCommRevoke", "ncclCommShrink", "ncclCommGetUniqueId", "ncclCommGrow"})

C_TYPES: dict[str, Any] = {
    "int": ctypes.c_int,
    "size_t": ctypes.c_size_t,
    "ncclUniqueId": UniqueId,
    "ncclDataType_t": ctypes.c_int,
    "ncclRedOp_t": ctypes.c_int,
    "ncclComm_t": ctypes.c_void_p,
    "cudaStream_t": ctypes.c_void_p,
}


def argument_types(parameters: str) -> list[Any]:
    """ctypes of a C parameter list; every pointer is an address."""
    types = []
    for parameter in filter(None, parameters.split(",")):
        words = parameter.replace("*", " * ").replace("const", " ").split()
        types.append(ctypes.c_void_p if "*" in words else C_TYPES[words[0]])
    return types


ELEMENTS = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""torch type → ``ncclDataType_t``."""

REDUCTIONS = {
    dist.ReduceOp.SUM: 0,
    dist.ReduceOp.PRODUCT: 1,
    dist.ReduceOp.MAX: 2,
    dist.ReduceOp.MIN: 3,
    dist.ReduceOp.AVG: 4,
}
"""torch reduction → ``ncclRedOp_t``."""


class NcclLibrary:
    """An opened ``libnccl``. Raises ``OSError`` when it cannot be opened, ``VendorError`` when it is too old."""

    def __init__(self, path: str | Path = "libnccl.so.2") -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.ncclGetErrorString.argtypes = [ctypes.c_int]
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        missing = [name for name in PROTOTYPES if not hasattr(self._library, name)]
        for name in set(PROTOTYPES) - set(missing):
            function = getattr(self._library, name)
            function.argtypes, function.restype = argument_types(PROTOTYPES[name]), ctypes.c_int
        if set(missing) - OPTIONAL:
            raise VendorError(f"{path} lacks the functions {sorted(set(missing) - OPTIONAL)}: install a newer NCCL")
        self.can_revoke = "ncclCommRevoke" not in missing
        self.can_shrink = "ncclCommShrink" not in missing
        self.can_grow = not {"ncclCommGrow", "ncclCommGetUniqueId"} & set(missing)

    def version(self) -> int:
        """As ``NCCL_VERSION_CODE``: 2.32.3 is 23203."""
        number = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(number))
        return number.value

    def unique_id(self) -> bytes:
        """A new rendezvous id (128 bytes)."""
        found = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(found))
        return bytes(found)

    def call(self, name: str, *arguments: Any) -> None:
        """Run one function. Raises :class:`VendorError` unless it says success."""
        code = getattr(self._library, name)(*arguments)
        if code:
            reason = self._library.ncclGetErrorString(code)
            raise VendorError(f"{name}: {reason.decode() if reason else 'unknown error'} ({code})")


class NcclCommunicator(VendorCommunicator):
    """One ``ncclComm_t``. ``limit`` bounds each call that can block, in seconds; ``start_limit`` those that connect.

    The CUDA device must be current in the helper threads as well: ``set_device``
    is run there before each call. ``stream`` gives the ``cudaStream_t`` to enqueue on.
    """

    def __init__(
        self,
        library: NcclLibrary,
        rank: int,
        limit: float,
        set_device: Callable[[], None] = lambda: None,
        stream: Callable[[], int] = lambda: 0,
        start_limit: float | None = None,
    ) -> None:
        self.order: tuple[int, ...] = ()
        self.revoked = False
        self.can_shrink, self.can_grow = library.can_shrink, library.can_grow
        self.interrupted = never
        self._library = library
        self._rank = rank
        self._limit = limit
        self._start_limit = limit if start_limit is None else start_limit
        self._set_device = set_device
        self._stream = stream
        self._comm: int | None = None

    def new_identity(self) -> bytes:
        return self._library.unique_id()

    def start(self, members: Sequence[int], identity: bytes) -> None:
        self._drop()
        self._comm = self._new(
            "ncclCommInitRank",
            lambda out: (out, len(members), UniqueId.from_buffer_copy(identity), members.index(self._rank)),
        )
        self.order, self.revoked = tuple(members), False

    def join(self, order: Sequence[int], identity: bytes) -> None:
        if not self._library.can_grow:
            self.start(sorted(order), identity)
            return
        self._drop()
        known = UniqueId.from_buffer_copy(identity)
        place = list(order).index(self._rank)
        self._comm = self._new("ncclCommGrow", lambda out: (None, len(order), ctypes.byref(known), place, out, None))
        self.order, self.revoked = tuple(order), False

    def edit(self, members: Sequence[int], share: Share, damaged: bool = False) -> Edit:
        lost = [index for index, rank in enumerate(self.order) if rank not in members]
        joined = sorted(set(members) - set(self.order))
        if not lost and not joined and not damaged:
            return "kept"
        if self.rebuilds(bool(lost), bool(joined), damaged):
            self.start(sorted(members), share(self.new_identity))
            return "rebuilt"
        if lost:
            self._shrink(lost)
        if joined:
            self._grow(joined, share)
        return "replaced" if lost and joined else "shrunk" if lost else "grown"

    def broken(self) -> bool:
        """Ask for what the library's own threads met. A revoke does not clear it, and a shrink is refused then."""
        if self._comm is None:
            return False
        found = ctypes.c_int()
        try:
            self._library.call("ncclCommGetAsyncError", self._comm, ctypes.byref(found))
        except VendorError:
            return True
        return found.value not in (SUCCESS, IN_PROGRESS)

    def revoke(self) -> None:
        """By the library's own revoke, allowed once, else by an abort, after which nothing is left to shrink."""
        if self.revoked:
            return
        if self._library.can_revoke and self._comm is not None:
            self.revoked = True
            self._bounded("ncclCommRevoke", self._comm, REVOKE_DEFAULT)
        else:
            self.close()

    def close(self) -> None:
        comm = self._forget()
        if comm is not None:
            self._bounded("ncclCommAbort", comm)

    def _drop(self) -> None:
        """Free what another is to take the place of."""
        comm = self._forget()
        if comm is not None:
            self._free(comm)

    def _forget(self) -> int | None:
        comm, self._comm = self._comm, None
        self.order, self.revoked = (), False
        return comm

    def _free(self, comm: int) -> None:
        """Free one that is idle. This waits for all operations of the device, and they for ranks that still connect."""
        free = partial(self._call, "ncclCommAbort", comm)
        connected(free, self._start_limit, "ncclCommAbort", self.interrupted, lambda _: None)

    # -- operations ---------------------------------------------------------

    def takes(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType | None = None) -> bool:
        return tensor.dtype in ELEMENTS and (op is None or op in REDUCTIONS)

    @contextmanager
    def batch(self) -> Iterator[None]:
        self._library.call("ncclGroupStart")
        try:
            yield
        finally:
            self._library.call("ncclGroupEnd")

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        self._enqueue("ncclAllReduce", tensor, REDUCTIONS[op], both=True)

    def reduce(self, tensor: torch.Tensor, root: int, op: dist.ReduceOp.RedOpType) -> None:
        self._enqueue("ncclReduce", tensor, REDUCTIONS[op], root, both=True)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._enqueue("ncclBroadcast", tensor, root, both=True)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._enqueue("ncclSend", tensor, to)

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        self._enqueue("ncclRecv", tensor, source)

    def _enqueue(self, name: str, tensor: torch.Tensor, *rest: int, both: bool = False) -> None:
        """``both``: the function takes a source and a target, here the same memory."""
        where = (tensor.data_ptr(),) * (2 if both else 1)
        element = ELEMENTS[tensor.dtype]
        self._library.call(name, *where, tensor.numel(), element, *rest, self._comm, self._stream())

    def _shrink(self, lost: list[int]) -> None:
        old = self._comm
        flags = SHRINK_ABORT
        if self._library.can_revoke:
            if not self.revoked:
                self._bounded("ncclCommRevoke", old, REVOKE_DEFAULT)
            flags = SHRINK_DEFAULT  # nothing is in flight any more
        excluded = (ctypes.c_int * len(lost))(*lost)
        self._replace("ncclCommShrink", lambda out: (old, excluded, len(lost), out, None, flags))
        self.order, self.revoked = tuple(rank for index, rank in enumerate(self.order) if index not in lost), False

    def _grow(self, joined: list[int], share: Share) -> None:
        old, identity = self._comm, UniqueId()

        def make() -> bytes:
            self._bounded("ncclCommGetUniqueId", old, ctypes.byref(identity))
            return bytes(identity)

        leads = share(make) == bytes(identity)
        order = (*self.order, *joined)
        known = ctypes.byref(identity) if leads else None
        self._replace("ncclCommGrow", lambda out: (old, len(order), known, -1, out, None))
        self.order = order

    def _replace(self, name: str, arguments: Callable[[Any], tuple[Any, ...]]) -> None:
        """Put the communicator that ``name`` makes of the present one in its place."""
        old = self._comm
        try:
            self._comm = self._new(name, arguments, parent=old)
        except VendorInterrupted:
            self._comm = None  # the call that was left behind uses it
            raise
        if old is not None:
            self._free(old)

    def _new(self, name: str, arguments: Callable[[Any], tuple[Any, ...]], parent: int | None = None) -> int:
        def connect() -> int:
            handle = ctypes.c_void_p()
            self._call(name, *arguments(ctypes.byref(handle)))
            if handle.value is None:
                raise VendorError(f"{name}: gave no communicator")
            return handle.value

        def left(made: int | None) -> None:
            for comm in (made, parent):
                if comm is not None:
                    with suppress(VendorError):  # it is broken already
                        self._call("ncclCommAbort", comm)

        return connected(connect, self._start_limit, name, self.interrupted, left)

    def _bounded(self, name: str, *arguments: Any) -> None:
        bounded(lambda: self._call(name, *arguments), self._limit, name)

    def _call(self, name: str, *arguments: Any) -> None:
        """In a helper thread, which begins on device 0."""
        self._set_device()
        self._library.call(name, *arguments)
