"""Native communicator (``csrc/comm``): links, collectives, process groups edited in place."""

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import Tensor, device
from torch.distributed import ProcessGroup, Work

def hmac_sha256(key: bytes, data: bytes) -> bytes:
    """HMAC-SHA256 as the handshake computes it (32 bytes)."""

def reduce_instruction_set() -> str:
    """Instruction set the reduction kernels use here: ``avx512``, ``avx2`` or ``baseline``."""

class Peer:
    """The address of one incarnation of a rank. An empty ``unix_name`` means no shared memory there."""

    rank: int
    incarnation: int
    ip: str
    port: int
    unix_name: str
    machine: str
    def __init__(
        self,
        rank: int,
        incarnation: int,
        ip: str,
        port: int,
        unix_name: str,
        machine: str,
        broken: list[tuple[int, int]] = ...,
    ) -> None:
        """``broken``: (rank, incarnation) to which that process has found its link broken."""

class EditStats:
    """Result of an edit: seconds by phase, links opened, open ahead of it and dropped, groups placed anew."""

    quiesce: float
    drop: float
    connect: float
    publish: float
    opened: int
    ahead: int
    dropped: int
    groups: int

class Hub:
    """The communicator of one process; listening when constructed, a world of one until edited.

    ``bind``: address (IPv4 or IPv6) to listen on and be reached at. ``handshake_seconds``:
    how long a connection may take to prove itself. ``silent_seconds``: a link breaks when the peer's
    host has acknowledged nothing for so long. ``outbox_bytes``, ``ring_bytes``:
    sizes of shared memory (0: by the living ranks on the host); the same in every process of a job.
    Everything that waits releases the GIL and raises ``GenerationChanged``,
    ``PeerLost``, ``CommTimeout`` or ``CommError``.
    """

    def __init__(
        self,
        *,
        rank: int,
        slots: int,
        incarnation: int,
        run_id: str,
        secret: bytes,
        bind: str = ...,
        shared_memory: bool = ...,
        handshake_seconds: float = ...,
        silent_seconds: float = ...,
        outbox_bytes: int = ...,
        ring_bytes: int = ...,
    ) -> None: ...
    def self(self) -> Peer: ...
    def notice(self) -> str:
        """Why shared memory is not used; empty when it is, or was not asked for."""
    def edit(self, generation: int, members: list[Peer], timeout: float) -> EditStats: ...
    def prepare(self, members: list[Peer], timeout: float) -> int: ...
    def interrupt(self, generation: int) -> None: ...
    def close(self) -> None: ...
    def generation(self) -> int: ...
    def frozen(self) -> int: ...
    def alive(self) -> list[int]: ...
    def waiting_for(self) -> list[int]: ...
    def counters(self) -> dict[str, int]:
        """Connections turned away, by reason, and how many are half-way."""
    def transport(self, rank: int) -> str: ...
    def broken(self) -> list[tuple[int, int]]:
        """(rank, incarnation) to which the link is broken."""
    def lendable(self, count: int) -> Tensor | None:
        """Memory for fp32 values that may be lent; None where there is no room, or no shared memory."""
    def on_loan(self, address: int) -> bool:
        """Whether a peer has what was sent from the memory around ``address``."""
    def sever(self, rank: int, quietly: bool = ...) -> None:
        """Break the link to ``rank`` and nothing else; ``quietly``: only this end notices."""

class ElasticProcessGroup(ProcessGroup):
    """A ``c10d::ProcessGroup`` over a hub's links. ``slot_space``: the default group."""

    def __init__(self, *, hub: Hub, name: str, members: list[int], slot_space: bool, timeout: float) -> None: ...
    def sum(self, values: Sequence[float], counts: Sequence[int]) -> tuple[list[float], list[int]]:
        """The sums over all members, in member order: of ``values``, in fp64, and of ``counts``, exactly."""
    def reduce_scatter_blocks(self, flat: Tensor, blocks: list[tuple[int, int, int]]) -> None:
        """Sum ``flat`` in member order; ranges (start, stop, owner) of this rank receive it in place."""
    def all_gather_blocks(self, flat: Tensor, blocks: list[tuple[int, int, int]]) -> None:
        """Fill ranges (start, stop, owner) of ``flat`` from their owners."""
    def begin_reduce_scatter_blocks(self, flat: Tensor, blocks: list[tuple[int, int, int]]) -> Work:
        """As ``reduce_scatter_blocks``, on a thread of the hub's."""
    def begin_all_gather_blocks(self, flat: Tensor, blocks: list[tuple[int, int, int]]) -> Work:
        """As ``all_gather_blocks``, on a thread of the hub's."""
    def on_reconfigure(
        self, handle: Callable[[], str] | None, edit: Callable[[int, list[str], bool, float], None] | None
    ) -> None:
        """Set the functions that torch's reconfiguration protocol calls from C++ (torch 2.14 and later).

        ``edit``: generation, handles, whether their order counts, seconds (below 0: the default).
        """
    def monitored_barrier(self, timeout: timedelta = ..., wait_all_ranks: bool = False) -> None: ...
    def living(self) -> list[int]: ...
    def failed(self) -> bool:
        """True if a collective of this generation ended by a time-out or a loss: later ones fail until an edit."""
    def members(self) -> list[int]: ...
    def release(self) -> None:
        """Let the hub forget the group; the object must not be used afterwards."""
    def side_channel(self, number: int, piece_bytes: int, beside: int, hurried: int) -> SideChannel:
        """Messages beside the steps of this generation; ``beside``, ``hurried``: unconfirmed pieces to one peer."""
    def transfers(self, tag: int) -> Transfers:
        """Messages of this generation under one tag; ranks are global ones."""

class SideChannel:
    """See :class:`megatron.elastic.comm.side_channel.SideChannel`; waits release the GIL and sleep."""

    def send(self, peer: int, payload: Tensor) -> None: ...
    def recv(self, peer: int, out: Tensor) -> None: ...
    def drain(self, peer: int) -> None: ...
    def hurry(self) -> None: ...
    def give_up(self) -> None: ...
    def under_way(self, peer: int) -> int: ...

class Transfers:
    """See :class:`megatron.elastic.comm.transfers.Transfers`; all release the GIL."""

    def receive(self, into: Sequence[Tensor], sources: Sequence[int]) -> None: ...
    def send(self, values: Tensor, to: int) -> None: ...
    def come(self) -> list[int]: ...
    def wait(self) -> list[int]: ...
    def loan(self, number: int) -> Loan | None: ...

class DeviceEvent:
    """A point in the work of a device's stream, as ``torch.Event``; each call gives up the interpreter's lock.

    A call waits while the device's queue is full. If an operation at its head waits for a lost rank, another thread has
    to end it.
    """

    def __init__(self, device: device, timing: bool = False) -> None: ...
    def record(self) -> None:
        """Record it in the present thread's stream of the device."""

    def block(self) -> None:
        """Have the present thread's stream of the device wait for it."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: DeviceEvent) -> float:
        """Milliseconds until ``end``. Both have been reached and have ``timing``."""

class Loan:
    """See :class:`megatron.elastic.comm.transfers.Loan`."""

    @property
    def address(self) -> int: ...
    def values(self) -> Tensor: ...
    def give_back(self) -> None: ...
