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
from collections.abc import Iterable

import torch

from megatron.elastic.state.block_copy import Lent
from megatron.elastic.state.layout import StateBlock

__all__ = ["GradientMessage", "MessageMemory"]

Blocks = tuple[StateBlock, ...]


class GradientMessage:
    """The gradients of ``blocks``, one after another, and ``extra`` values a block behind them. It has one user so far.

    ``whole``: fp32, all of it. ``parts``: the gradient of each block. ``checksums``: the bytes of what is behind them.
    """

    def __init__(self, blocks: Blocks, extra: int, home: list[GradientMessage]) -> None:
        self.blocks = blocks
        sizes = [*(block.numel for block in blocks), extra * len(blocks)]
        self.whole = torch.zeros(sum(sizes), dtype=torch.float32)
        *self.parts, behind = self.whole.split(sizes)
        self.checksums = behind.view(torch.uint8).numpy().data
        self._lent = [Lent(part, self.let_go) for part in self.parts]
        self._home, self._users = home, 1

    def lend(self, number: int) -> Lent:
        """Return the memory of block ``number``, for a copy to retain its gradient there. It is one more user."""
        self._users += 1
        return self._lent[number]

    def let_go(self) -> None:
        """Note that one user is done."""
        self._users -= 1
        if not self._users:
            self._users = 1  # the next one to take it
            self._home.append(self)


class MessageMemory:
    """See the module docstring. Any thread may prepare while the training thread takes. ``extra``: values a block."""

    def __init__(self, extra: int) -> None:
        self._extra = extra
        self._free: dict[Blocks, list[GradientMessage]] = {}
        self._lock = threading.Lock()

    def prepare(self, messages: Iterable[Blocks]) -> None:
        """Allocate and write one message for each of ``messages``."""
        for blocks in messages:
            self._home_of(blocks).append(self._new(blocks))

    def take(self, blocks: Blocks) -> GradientMessage:
        """Return a message of ``blocks`` with arbitrary values."""
        home = self._home_of(blocks)
        try:
            return home.pop()
        except IndexError:
            return self._new(blocks)

    def clear(self) -> None:
        """Release all memory that is free, and that in use when it becomes free."""
        with self._lock:
            self._free = {}

    @property
    def free(self) -> list[Blocks]:
        """The messages whose memory is free."""
        with self._lock:
            return [blocks for blocks, home in self._free.items() for _ in home]

    @property
    def bytes_free(self) -> int:
        """Bytes of the memory that is free."""
        return sum(4 * (block.numel + self._extra) for blocks in self.free for block in blocks)

    def _home_of(self, blocks: Blocks) -> list[GradientMessage]:
        with self._lock:
            return self._free.setdefault(blocks, [])

    def _new(self, blocks: Blocks) -> GradientMessage:
        return GradientMessage(blocks, self._extra, self._home_of(blocks))
