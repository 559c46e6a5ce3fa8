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
``tests/unit/comm/test_nccl.py``. No GPU has run this file yet: the call
sequences are tested over a stand-in library that is really loaded.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.elastic.comm.vendor import Edit, VendorCommunicator, VendorError, bounded

__all__ = ["PROTOTYPES", "NcclCommunicator", "NcclLibrary"]

UNIQUE_ID_BYTES = 128
SHRINK_DEFAULT, SHRINK_ABORT, REVOKE_DEFAULT = 0, 1, 0


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``: passed by value to init, by pointer elsewhere."""

    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


PROTOTYPES: dict[str, str] = {
    "ncclGetVersion": "int *version",
    "ncclGetUniqueId": "ncclUniqueId* uniqueId",
    "ncclCommInitRank": "ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank",
    "ncclCommAbort": "ncclComm_t comm",
    "ncclCommRevoke": "ncclComm_t comm, int revokeFlags",
    "ncclCommShrink": "ncclComm_t comm, int* excludeRanksList, int excludeRanksCount, ncclComm_t* newcomm, "
    "ncclConfig_t* config, int shrinkFlags",
    "ncclCommGetUniqueId": "ncclComm_t comm, ncclUniqueId* uniqueId",
    "ncclCommGrow": "ncclComm_t comm, int nRanks, const ncclUniqueId* uniqueId, int rank, ncclComm_t* newcomm, "
    "ncclConfig_t* config",
    "ncclAllReduce": "const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, "
    "ncclComm_t comm, cudaStream_t stream",
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
    for parameter in parameters.split(","):
        words = parameter.replace("*", " * ").replace("const", " ").split()
        types.append(ctypes.c_void_p if "*" in words else C_TYPES[words[0]])
    return types


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
            raise VendorError(f"{path}: no {sorted(set(missing) - OPTIONAL)}")
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
    """One ``ncclComm_t``. ``limit`` bounds each call that can block, in seconds.

    The CUDA device must be current in the helper threads as well:
    ``set_device`` is run there before each call.
    """

    def __init__(
        self,
        library: NcclLibrary,
        rank: int,
        limit: float,
        set_device: Callable[[], None] = lambda: None,
    ) -> None:
        self.order: tuple[int, ...] = ()
        self._library = library
        self._rank = rank
        self._limit = limit
        self._set_device = set_device
        self._comm: int | None = None

    def start(self, members: Sequence[int], unique_id: bytes) -> None:
        """Connect ``members`` anew, all of them calling this with one ``unique_id``."""
        self._comm = self._new(
            "ncclCommInitRank",
            lambda out: (out, len(members), UniqueId.from_buffer_copy(unique_id), members.index(self._rank)),
        )
        self.order = tuple(members)

    def join(self, order: Sequence[int], unique_id: bytes) -> None:
        """Enter a communicator that survivors :meth:`edit` at the same time.

        ``order``: survivors in their order, then newcomers ascending.
        """
        if not self._library.can_grow:
            self.start(sorted(order), unique_id)
            return
        identity = UniqueId.from_buffer_copy(unique_id)
        place = list(order).index(self._rank)
        self._comm = self._new("ncclCommGrow", lambda out: (None, len(order), ctypes.byref(identity), place, out, None))
        self.order = tuple(order)

    def edit(self, members: Sequence[int], share: Callable[[bytes | None], bytes]) -> Edit:
        lost = [index for index, rank in enumerate(self.order) if rank not in members]
        joined = sorted(set(members) - set(self.order))
        if not lost and not joined:
            return "kept"
        leader = next(rank for rank in self.order if rank in members) == self._rank
        if (lost and not self._library.can_shrink) or (joined and not self._library.can_grow):
            self.close()
            self.start(sorted(members), share(self._library.unique_id() if leader else None))
            return "rebuilt"
        if lost:
            self._shrink(lost)
        if joined:
            self._grow(joined, leader, share)
        return "replaced" if lost and joined else "shrunk" if lost else "grown"

    def all_reduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        """Enqueue a reduction of ``count`` elements between device addresses on a CUDA stream."""
        self._library.call("ncclAllReduce", source, target, count, dtype, op, self._comm, stream)

    def close(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            self._bounded("ncclCommAbort", comm)

    def _shrink(self, lost: list[int]) -> None:
        old = self._comm
        flags = SHRINK_ABORT
        if self._library.can_revoke:
            self._bounded("ncclCommRevoke", old, REVOKE_DEFAULT)
            flags = SHRINK_DEFAULT  # nothing is in flight any more
        excluded = (ctypes.c_int * len(lost))(*lost)
        self._comm = self._new("ncclCommShrink", lambda out: (old, excluded, len(lost), out, None, flags))
        self._bounded("ncclCommAbort", old)
        self.order = tuple(rank for index, rank in enumerate(self.order) if index not in lost)

    def _grow(self, joined: list[int], leader: bool, share: Callable[[bytes | None], bytes]) -> None:
        old = self._comm
        identity = UniqueId()
        if leader:
            self._bounded("ncclCommGetUniqueId", old, ctypes.byref(identity))
        share(bytes(identity) if leader else None)
        order = (*self.order, *joined)
        known = ctypes.byref(identity) if leader else None
        self._comm = self._new("ncclCommGrow", lambda out: (old, len(order), known, -1, out, None))
        self._bounded("ncclCommAbort", old)
        self.order = order

    def _new(self, name: str, arguments: Callable[[Any], tuple[Any, ...]]) -> int:
        handle = ctypes.c_void_p()
        self._bounded(name, *arguments(ctypes.byref(handle)))
        if handle.value is None:
            raise VendorError(f"{name}: gave no communicator")
        return handle.value

    def _bounded(self, name: str, *arguments: Any) -> None:
        def run() -> None:
            self._set_device()
            self._library.call(name, *arguments)

        bounded(run, self._limit, name)
