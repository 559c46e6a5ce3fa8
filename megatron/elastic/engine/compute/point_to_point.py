"""The transfer of activations and their gradients between the cells of a pipeline.

One message per :class:`~megatron.elastic.plan.model.Edge` and direction: the
rows of the edge, ``[s, rows, h]``, contiguous. All ranks of a cell have the same tensor.
Position ``j`` of a cell receives from position ``j mod a`` of a cell of ``a`` ranks: from
its own position if both have as many ranks. Tags are a pure function
of (step, edge, direction), so the order of posting does not matter and messages
of two consecutive steps cannot be confused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

__all__ = ["BoundaryTransport", "Receipt", "receivers", "sender", "started"]

_FORWARD, _BACKWARD = 0, 1


def sender(position: int, ranks: Sequence[int]) -> int:
    """Return which of the sending cell's ``ranks`` sends to ``position`` of the receiving cell."""
    return ranks[position % len(ranks)]


def receivers(position: int, count: int, ranks: Sequence[int]) -> Sequence[int]:
    """Return which of the receiving cell's ``ranks`` receive from ``position`` of a cell of ``count`` ranks."""
    return ranks[position::count]


@dataclass
class Receipt:
    """A posted receive: ``wait`` returns the rows of one edge."""

    buffer: torch.Tensor
    peer: int
    work: dist.Work
    blocking: Callable[[int], None]

    def wait(self) -> torch.Tensor:
        """Wait for and return ``[s, rows, h]``; raises the communicator's typed errors."""
        if not self.work.is_completed():
            self.blocking(self.peer)
        self.work.wait()
        return self.buffer


@dataclass
class BoundaryTransport:
    """Point-to-point messages over ``group``. Calls ``blocking(peer)`` before a wait that may last."""

    group: dist.ProcessGroup
    blocking: Callable[[int], None]
    _sent: list[tuple[dist.Work, torch.Tensor, int]] = field(default_factory=list)

    def send(self, rows: torch.Tensor, peer: int, step: int, edge: int, backward: bool) -> None:
        """Start sending; the tensor is kept until :meth:`flush`."""
        tensor = rows.detach().contiguous()
        work = started(dist.isend(tensor, dst=peer, group=self.group, tag=_tag(step, edge, backward)))
        self._sent.append((work, tensor, peer))

    def receive(self, buffer: torch.Tensor, peer: int, step: int, edge: int, backward: bool) -> Receipt:
        """Post a receive of one edge's rows into ``buffer``."""
        work = started(dist.irecv(buffer, src=peer, group=self.group, tag=_tag(step, edge, backward)))
        return Receipt(buffer, peer, work, self.blocking)

    def flush(self) -> None:
        """Wait until every message of the step is sent; its storage may be reused afterwards."""
        for work, _, peer in self._sent:
            if not work.is_completed():
                self.blocking(peer)
            work.wait()
        self._sent.clear()

    def abandon(self) -> None:
        """Forget messages in flight, because their generation is void."""
        self._sent.clear()


def _tag(step: int, edge: int, backward: bool) -> int:
    """Return a tag of 31 bits: 1 of direction, 26 of edge, 4 of step."""
    return ((step & 0xF) << 27) | ((edge & 0x3FFFFFF) << 1) | (_BACKWARD if backward else _FORWARD)


def started(work: dist.Work | None) -> dist.Work:
    """Return the work of an ``isend`` or ``irecv``; raises ``RuntimeError`` if this rank is not in the group."""
    if work is None:
        raise RuntimeError("a message for a rank that is not part of its group")
    return work
