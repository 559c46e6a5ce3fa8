"""Memory for the messages that carry reduced gradients to mirrors, used by one step after another.

Both ends keep a gradient where the message has it, until it is applied: the owner copies its sums into the message and
retains them there, the mirror retains what came. On the owner's host a mirror does not even copy it: it has the message
on loan (:class:`~megatron.elastic.comm.transfers.Loan`) and reads it in the owner's memory. Then the memory is free for
the same blocks of another step. It is not allocated anew each time: the kernel provides a page when it is first
written, and for some megabytes this can take longer than sending them. For the same reason a thread prepares the
messages of the step that ends a migration, which go to other ranks than those before it.

Invariant: memory is free when everything that used it has said so, here and at the mirror. A message that was given up
is not used again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch

from megatron.elastic.comm.transfers import Loan
from megatron.elastic.state.layout import StateBlock
from megatron.elastic.state.retained import Lent

__all__ = ["BufferPool", "GradientMessage", "LoanMemory", "MessageMemory"]

Blocks = tuple[StateBlock, ...]


class LoanMemory(Protocol):
    """Gives the memory of messages that peers can have on loan. A fabric is one."""

    def lendable(self, count: int) -> torch.Tensor:
        """See :meth:`Fabric.lendable`."""

    def on_loan(self, address: int) -> bool:
        """See :meth:`Fabric.on_loan`."""


class GradientMessage:
    """The gradients of ``blocks``, one after another, and some values a block behind them. It has one user so far.

    ``whole``: fp32, all of it. ``parts``: the gradient of each block. ``checksums``: the bytes of what is behind them.
    ``free`` is called when its last user is done; it has one again then. ``elsewhere``: it is in another process.
    """

    def __init__(
        self, blocks: Blocks, whole: torch.Tensor, free: Callable[[GradientMessage], None], elsewhere: bool = False
    ) -> None:
        self.blocks = blocks
        self.whole, self.address = whole, whole.data_ptr()
        sizes = [block.numel for block in blocks]
        *self.parts, behind = whole.split([*sizes, whole.numel() - sum(sizes)])
        self.checksums = behind.view(torch.uint8).numpy().data
        self.written = False
        """False while the kernel has not provided its pages: no message has come, or is to be sent, in it."""
        self.loan: Loan | None = None
        """The loan by which a mirror has it."""
        self._lent = [Lent(part, self.let_go, elsewhere) for part in self.parts]
        self._free, self._users = free, 1

    def lend(self, number: int) -> Lent:
        """Return the memory of block ``number``, for a copy to retain its gradient there. It is one more user."""
        self._users += 1
        return self._lent[number]

    def let_go(self) -> None:
        """Note that one user is done."""
        self._users -= 1
        if not self._users:
            self._users = 1  # the next one to take it
            self._free(self)


class BufferPool:
    """The memory of one message, which has the same blocks in each step.

    ``memory``: of messages that are sent; without it, of those that are received.
    """

    def __init__(self, blocks: Blocks, extra: int, memory: LoanMemory | None) -> None:
        self.blocks = blocks
        self.free: list[GradientMessage] = []
        """Memory that nothing uses here; one thread may add to it while another takes from it."""
        self._count = sum(block.numel + extra for block in blocks)
        self._memory = memory
        self._borrowed: dict[int, GradientMessage] = {}
        """Messages that were had on loan, by their addresses: an owner has few."""

    def take(self) -> GradientMessage:
        """Return a message with arbitrary values, which no mirror has on loan any more.

        Memory to receive in takes no memory as long as all messages come on loan.
        """
        for number in reversed(range(len(self.free))):
            if self._memory is None or not self._memory.on_loan(self.free[number].address):
                return self.free.pop(number)
        return self._new()

    def borrowed(self, loan: Loan) -> GradientMessage:
        """Return the message that has come as ``loan``. The loan ends when its last user is done."""
        message = self._borrowed.pop(loan.address, None)
        if message is None:
            message = GradientMessage(self.blocks, loan.values(), self._give_back, elsewhere=True)
        message.loan = loan
        return message

    def _give_back(self, message: GradientMessage) -> None:
        loan, message.loan = message.loan, None
        self._borrowed[message.address] = message
        assert loan is not None, "a message that was borrowed has a loan"
        loan.give_back()

    def prepare(self) -> None:
        """Allocate and write memory for one more message."""
        message = self._new()
        message.whole.zero_()
        message.written = True
        self.free.append(message)

    @property
    def bytes_free(self) -> int:
        """Bytes of the memory that nothing uses here."""
        return 4 * self._count * sum(message.written for message in self.free)

    def _new(self) -> GradientMessage:
        count = self._count
        whole = torch.zeros(count) if self._memory is None else self._memory.lendable(count)
        return GradientMessage(self.blocks, whole, self.free.append)


class MessageMemory:
    """The memory of all messages. Any thread may ask for that of one and prepare it. ``extra``: values a block."""

    def __init__(self, extra: int, memory: LoanMemory) -> None:
        self._extra, self._memory = extra, memory
        self._pools: dict[tuple[Blocks, bool], BufferPool] = {}
        self._lock = threading.Lock()

    def outgoing(self, blocks: Blocks) -> BufferPool:
        """Return the memory of the message of ``blocks`` that this rank sends: the same until :meth:`clear`."""
        return self._pool(blocks, self._memory)

    def incoming(self, blocks: Blocks) -> BufferPool:
        """Return the memory of the message of ``blocks`` that this rank receives: the same until :meth:`clear`."""
        return self._pool(blocks, None)

    def _pool(self, blocks: Blocks, memory: LoanMemory | None) -> BufferPool:
        kind = blocks, memory is None
        with self._lock:
            found = self._pools.get(kind)
            if found is None:
                found = self._pools[kind] = BufferPool(blocks, self._extra, memory)
            return found

    def clear(self) -> None:
        """Forget all pools; their memory is released with the messages that still use it."""
        with self._lock:
            self._pools = {}

    @property
    def bytes_free(self) -> int:
        """Bytes of the memory that nothing uses."""
        with self._lock:
            return sum(buffers.bytes_free for buffers in self._pools.values())
