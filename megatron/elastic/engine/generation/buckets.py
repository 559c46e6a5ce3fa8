"""Gradients cut for a transfer beside the backward: buckets to reduce, messages to mirrors.

A *bucket* is a part of a :class:`GroupSpan`, whole (unit, shard)s that are adjacent in the arena; its sum is one
collective. Spans are cut at the same places on all their members (:func:`~view.shared_runs`), and so are buckets: by
the sizes of the spaces and the order of units, which all members know. A *message* has blocks that one owner sends to
one mirror, in that order of units; both ends cut alike, though a mirror need not compute the units.

Invariant: buckets of all ranks, and the messages between two ranks, have one order (:mod:`finishing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist

from megatron.elastic.comm.fabric import BlockRange
from megatron.elastic.engine.compute.buffers import UnitSlice
from megatron.elastic.engine.generation.view import GroupSpan
from megatron.elastic.state.layout import StateBlock, UnitShard

__all__ = ["Bucket", "Cut", "buckets_of", "messages_of"]


@dataclass(frozen=True)
class Cut:
    """What decides the buckets and messages of all ranks."""

    order: tuple[int, ...]
    """All units, in the order in which they are transferred (:func:`finishing_order`)."""
    least: int
    """Elements of a bucket or message, at least where there are as many."""

    @cached_property
    def position(self) -> Mapping[int, int]:
        """Unit → its place in the order."""
        return {unit: place for place, unit in enumerate(self.order)}


@dataclass(frozen=True)
class Bucket:
    """Elements ``[start, stop)`` of the arena; ``blocks`` are relative to ``start``."""

    group: dist.ProcessGroup
    members: tuple[int, ...]
    start: int
    stop: int
    blocks: tuple[BlockRange, ...]
    spaces: tuple[UnitShard, ...]

    @property
    def units(self) -> frozenset[int]:
        """The units of which it has a part."""
        return frozenset(unit for unit, _ in self.spaces)


def buckets_of(
    spans: Iterable[GroupSpan], slices: Mapping[UnitShard, UnitSlice], cut: Cut, computed: int
) -> tuple[Bucket, ...]:
    """Return the buckets of ``spans`` in their order.

    Units below ``computed`` are compute units. A bucket never has both kinds, nor more than one shard.
    """
    found = []
    for span in spans:
        inside = [key for key, where in slices.items() if span.start <= where.start < span.stop]
        for spaces in _runs(inside, slices, cut.least, computed):
            start, stop = slices[spaces[0]].start, slices[spaces[-1]].stop
            shift = start - span.start
            blocks = tuple(
                BlockRange(block.start - shift, block.stop - shift, block.owner)
                for block in span.blocks
                if shift <= block.start < stop - span.start
            )
            found.append(Bucket(span.group, span.members, start, stop, blocks, spaces))
    return tuple(sorted(found, key=lambda one: (max(cut.position[unit] for unit in one.units), one.spaces[0])))


def _runs(
    spaces: Sequence[UnitShard], slices: Mapping[UnitShard, UnitSlice], least: int, computed: int
) -> Iterator[tuple[UnitShard, ...]]:
    """Yield runs of ``spaces``, from the last one to the first: the backward finishes later units first."""
    run: list[UnitShard] = []
    for key in reversed(spaces):
        if run:
            full = slices[run[0]].stop - slices[run[-1]].start >= least
            other = key[1] != run[-1][1] or (key[0] < computed) != (run[-1][0] < computed)
            if full or other:
                yield tuple(reversed(run))
                run = []
        run.append(key)
    if run:
        yield tuple(reversed(run))


def messages_of(blocks: Iterable[StateBlock], cut: Cut) -> tuple[tuple[StateBlock, ...], ...]:
    """Return ``blocks`` of one owner for one mirror, cut into messages, each before the next in the order of units."""
    messages: list[list[StateBlock]] = []
    elements = cut.least
    for block in sorted(blocks, key=lambda one: (cut.position[one.unit], one)):
        if elements >= cut.least:
            messages.append([])
            elements = 0
        messages[-1].append(block)
        elements += block.numel
    return tuple(map(tuple, messages))
