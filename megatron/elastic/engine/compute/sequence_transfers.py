"""The parts of a sequence that go from each rank of one cell to each rank of the next, whatever their sizes.

Under sequence parallelism (Korthikanti et al., arXiv 2205.05198, §4.2.2) each rank of a cell holds one slice of a
boundary tensor; slices are equal and adjacent. A cell whose size does not divide the sequence, or that has one rank,
holds the whole sequence on every rank. A receiver takes what it holds from as few senders as possible; where all
senders hold the whole, the receivers are spread over them. Between cells of one size each rank sends to its own
position alone. Gradients go back by the same function with the cells exchanged: a rank that holds the whole sequence
has the whole gradient too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

__all__ = ["Transfer", "boundary_transfers", "held_slice", "is_sliced"]


@dataclass(frozen=True)
class Transfer:
    """Positions ``[start, stop)`` of the sequence, from one index of the sending cell to one of the receiving."""

    sender: int
    receiver: int
    start: int
    stop: int
    sent_from: int
    """Their first position in the sender's tensor."""
    put_at: int
    """Their first position in the receiver's tensor."""


def is_sliced(count: int, length: int) -> bool:
    """Return whether a cell of ``count`` ranks can cut a sequence of ``length`` positions into equal slices."""
    return count > 1 and length % count == 0


def held_slice(index: int, count: int, length: int, sequence_parallel: bool) -> tuple[int, int]:
    """Return the positions ``[start, stop)`` that rank ``index`` of a cell of ``count`` ranks holds."""
    if not (sequence_parallel and is_sliced(count, length)):
        return 0, length
    size = length // count
    return index * size, (index + 1) * size


@cache
def boundary_transfers(senders: int, receivers: int, length: int, sequence_parallel: bool) -> tuple[Transfer, ...]:
    """Return what a cell of ``senders`` ranks sends to one of ``receivers``, by receiver and position.

    ``sequence_parallel``: the launch's setting; each cell uses it where its size allows. Asked for each message of a
    step; the sizes of cells are few, so results are kept.
    """
    held = [held_slice(index, senders, length, sequence_parallel) for index in range(senders)]
    whole = held[0] == (0, length)
    found = []
    for receiver in range(receivers):
        first, end = held_slice(receiver, receivers, length, sequence_parallel)
        for sender in [receiver * senders // receivers] if whole else range(senders):
            begin, last = held[sender]
            start, stop = max(first, begin), min(end, last)
            if start < stop:
                found.append(Transfer(sender, receiver, start, stop, start - begin, start - first))
    return tuple(found)
