"""Memory for the messages that carry reduced gradients to mirrors, used by one step after another.

Both ends keep a gradient where the message has it, until it is applied: the owner copies its sums into the message and
retains them there, the mirror retains what came. Then the memory is free for the same blocks of another step. It is not
allocated anew each time: the kernel provides a page when it is first written, and for some megabytes this can take
longer than sending them. For the same reason a thread prepares the messages of the step that ends a migration, which
go to other ranks than those before it.

Invariant: memory is free when everything that used it has said so. A message that was given up is not used again.
"""

from __future__ import annotations

import threading

import torch

from megatron.elastic.state.layout import StateBlock
from megatron.elastic.state.retained import Lent

__all__ = ["BufferPool", "GradientMessage", "MessageMemory"]

Blocks = tuple[StateBlock, ...]


class GradientMessage:
    """The gradients of ``blocks``, one after another, and ``extra`` values a block behind them. It has one user so far.

    ``whole``: fp32, all of it. ``parts``: the gradient of each block. ``checksums``: the bytes of what is behind them.
    """

    def __init__(self, blocks: Blocks, extra: int, free: list[GradientMessage]) -> None:
        self.blocks = blocks
        sizes = [*(block.numel for block in blocks), extra * len(blocks)]
        self.whole = torch.zeros(sum(sizes), dtype=torch.float32)
        *self.parts, behind = self.whole.split(sizes)
        self.checksums = behind.view(torch.uint8).numpy().data
        self._lent = [Lent(part, self.let_go) for part in self.parts]
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
            self._free.append(self)


class BufferPool:
    """The memory of one message, which has the same blocks in each step."""

    def __init__(self, blocks: Blocks, extra: int) -> None:
        self.blocks = blocks
        self.free: list[GradientMessage] = []
        """Memory that nothing uses; one thread may add to it while another takes from it."""
        self._extra = extra

    def take(self) -> GradientMessage:
        """Return a message with arbitrary values."""
        try:
            return self.free.pop()
        except IndexError:
            return self._new()

    def prepare(self) -> None:
        """Allocate and write memory for one more message."""
        self.free.append(self._new())

    @property
    def bytes_free(self) -> int:
        """Bytes of the memory that nothing uses."""
        return 4 * len(self.free) * sum(block.numel + self._extra for block in self.blocks)

    def _new(self) -> GradientMessage:
        return GradientMessage(self.blocks, self._extra, self.free)


class MessageMemory:
    """The memory of all messages. Any thread may ask for that of one and prepare it. ``extra``: values a block."""

    def __init__(self, extra: int) -> None:
        self._extra = extra
        self._pools: dict[Blocks, BufferPool] = {}
        self._lock = threading.Lock()

    def buffers(self, blocks: Blocks) -> BufferPool:
        """Return the memory of the message of ``blocks``: the same until :meth:`clear`."""
        with self._lock:
            found = self._pools.get(blocks)
            if found is None:
                found = self._pools[blocks] = BufferPool(blocks, self._extra)
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
