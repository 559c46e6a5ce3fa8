"""The transfer of activations and their gradients between the cells of a pipeline.

At most one message per :class:`~megatron.elastic.plan.model.Edge`, direction and pair of
ranks: the rows of the edge, ``[s, rows, h]``, contiguous, or the part of the sequence that
the receiver holds and the sender has (:mod:`sequence_transfers`). Tags are a pure function
of (step, edge, direction), so the order of posting does not matter and messages
of two consecutive steps cannot be confused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron.elastic.engine.compute.sequence_cut import Run, length_of

__all__ = ["BoundaryTransport", "Receipt", "Unanswered", "started"]

_FORWARD, _BACKWARD = 0, 1


@dataclass(frozen=True)
class _Arrival:
    """The message of one sender: ``arrived`` is the place of its positions in the buffer, or is copied there."""

    work: dist.Work
    peer: int
    runs: tuple[Run, ...]
    arrived: torch.Tensor


@dataclass
class Receipt:
    """A posted receive: ``wait`` returns the rows of one edge."""

    buffer: torch.Tensor
    parts: tuple[_Arrival, ...]
    blocking: Callable[[int], None]

    def wait(self) -> torch.Tensor:
        """Wait for and return ``[s, rows, h]``; raises the communicator's typed errors."""
        for part in self.parts:
            if not part.work.is_completed():
                self.blocking(part.peer)
            part.work.wait()
            if len(part.runs) > 1:
                sizes = [stop - start for start, stop in part.runs]
                for (start, stop), positions in zip(part.runs, part.arrived.split(sizes), strict=True):
                    self.buffer[start:stop] = positions
        return self.buffer


@dataclass
class BoundaryTransport:
    """Point-to-point messages over ``group``. Calls ``blocking(peer)`` before a wait that may last."""

    group: dist.ProcessGroup
    blocking: Callable[[int], None]
    _sent: list[tuple[dist.Work, torch.Tensor, int]] = field(default_factory=list)

    def send(self, rows: torch.Tensor, peer: int, step: int, edge: int, backward: bool) -> None:
        """Start sending; the tensor is kept until it is sent."""
        self._forget_sent()
        tensor = rows.detach().contiguous()
        work = started(dist.isend(tensor, dst=peer, group=self.group, tag=_tag(step, edge, backward)))
        self._sent.append((work, tensor, peer))

    def receive(
        self, buffer: torch.Tensor, parts: Iterable[tuple[int, tuple[Run, ...]]], step: int, edge: int, backward: bool
    ) -> Receipt:
        """Post the receives of one edge's rows into ``buffer``.

        ``parts``: (peer, positions ``[start, stop)`` of dimension 0 that it sends); together the whole buffer.
        """
        tag, posted = _tag(step, edge, backward), []
        for peer, runs in parts:
            one = len(runs) == 1
            target = buffer[slice(*runs[0])] if one else buffer.new_empty((length_of(runs), *buffer.shape[1:]))
            work = started(dist.irecv(target, src=peer, group=self.group, tag=tag))
            posted.append(_Arrival(work, peer, runs, target))
        return Receipt(buffer, tuple(posted), self.blocking)

    def _forget_sent(self) -> None:
        """Forget the messages that are sent: a step has as many as micro-batches. Raises the errors of failed ones."""
        under_way = []
        for message in self._sent:
            if message[0].is_completed():
                message[0].wait()
            else:
                under_way.append(message)
        self._sent = under_way

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


class Unanswered(BoundaryTransport):
    """The transport of a rank without peers: what it sends is dropped, what it receives are zeros."""

    def send(self, rows: torch.Tensor, peer: int, step: int, edge: int, backward: bool) -> None:
        """Send nothing."""

    def receive(
        self, buffer: torch.Tensor, parts: Iterable[tuple[int, tuple[Run, ...]]], step: int, edge: int, backward: bool
    ) -> Receipt:
        """Return a receipt for zeros."""
        return Receipt(buffer.zero_(), (), self.blocking)


def _tag(step: int, edge: int, backward: bool) -> int:
    """Return a tag of 31 bits: 4 of step, 26 of edge, 1 of direction.

    It is never 0, the tag by which a vendor's library matches messages in their order instead.
    """
    return ((step & 0xF) << 27) | (((edge + 1) & 0x3FFFFFF) << 1) | (_BACKWARD if backward else _FORWARD)


def started(work: dist.Work | None) -> dist.Work:
    """Return the work of an ``isend`` or ``irecv``; raises ``RuntimeError`` if this rank is not in the group."""
    if work is None:
        raise RuntimeError("a message for a rank that is not part of its group")
    return work
