"""The parts of a sequence that go from each rank of one cell to each rank of the next, whatever their sizes.

Each rank holds some positions of a boundary tensor (:mod:`sequence_cut`). A receiver takes each position that it holds
from a rank that has it, all positions of one sender in one message. Where all tensor-parallel ranks of a part have the
same positions, one of them sends to a receiver, and the receivers are spread over them. Between cells of one size each
rank sends to its own position alone. Gradients go back by the same function with the cells exchanged: a rank that holds
a position has its whole gradient too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from megatron.elastic.engine.compute.sequence_cut import Run, SequenceCut

__all__ = ["Transfer", "boundary_transfers"]

Stretch = tuple[int, int, int]
"""(first position in the sender's tensor, first in the receiver's, number) of adjacent positions."""


@dataclass(frozen=True)
class Transfer:
    """One message from an index of the sending cell to one of the receiving."""

    sender: int
    receiver: int
    stretches: tuple[Stretch, ...]
    """In the order of the receiver's tensor."""


@cache
def boundary_transfers(senders: int, receivers: int, cut: SequenceCut) -> tuple[Transfer, ...]:
    """Return what a cell of ``senders`` ranks sends to one of ``receivers``, by receiver and sender.

    Asked for each message of a step; the sizes of cells are few, so results are kept.
    """
    found = []
    for receiver in range(receivers):
        wanted = cut.held(receiver, receivers)
        for sender in _senders_for(receiver, senders, receivers, cut):
            stretches = tuple(_joined(_common(cut.held(sender, senders), wanted)))
            if stretches:
                found.append(Transfer(sender, receiver, stretches))
    return tuple(found)


def _senders_for(receiver: int, senders: int, receivers: int, cut: SequenceCut) -> Iterator[int]:
    """Yield the ranks that together hold the sequence once; of ranks with the same positions, one for a receiver."""
    size, theirs = cut.size(senders), cut.size(receivers)
    for first in range(0, senders, size):
        if cut.is_shared(first, senders):
            yield first + receiver % theirs * size // theirs
        else:
            yield from range(first, first + size)


def _common(held: Sequence[Run], wanted: Sequence[Run]) -> Iterator[Stretch]:
    """Yield the positions of both, in the order of ``wanted``."""
    put_at = 0
    for first, end in wanted:
        sent_from = 0
        for begin, last in held:
            start, stop = max(first, begin), min(end, last)
            if start < stop:
                yield sent_from + start - begin, put_at + start - first, stop - start
            sent_from += last - begin
        put_at += end - first


def _joined(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Return the same positions, stretches joined that are adjacent at both ends."""
    found = list[Stretch]()
    for sent_from, put_at, number in stretches:
        if found and (sent_from, put_at) == (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]):
            found[-1] = (*found[-1][:2], found[-1][2] + number)
        else:
            found.append((sent_from, put_at, number))
    return found
