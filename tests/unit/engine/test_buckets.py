"""Buckets and messages: every element once, whole units, and the same cuts on all ranks that share them."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
import torch.distributed as dist

from megatron.elastic.comm.fabric import BlockRange
from megatron.elastic.engine.compute.buffers import UnitSlice
from megatron.elastic.engine.generation.buckets import Cut, buckets_of, messages_of
from megatron.elastic.engine.generation.view import GroupSpan
from megatron.elastic.state.layout import ParamSpec, UnitLayout, UnitShard

UNITS, COMPUTE = 7, 6
"""The last unit is a shared weight."""


def layouts() -> dict[UnitShard, UnitLayout]:
    sizes = {unit: 300 * (1 + unit % 3) for unit in range(UNITS)}
    return {
        (unit, shard): UnitLayout.build(unit, shard, [ParamSpec("weight", size, (size,), True)], 1024)
        for shard in range(2)
        for unit, size in sizes.items()
    }


@dataclass(frozen=True)
class Holder:
    """A rank's arena: its spaces side by side."""

    slices: dict[UnitShard, UnitSlice]

    @classmethod
    def of(cls, keys: list[UnitShard]) -> Holder:
        found, start = {}, 0
        for key in keys:
            found[key] = UnitSlice(start, layouts()[key])
            start += layouts()[key].numel
        return cls(found)

    def span(self, keys: list[UnitShard]) -> GroupSpan:
        first = self.slices[keys[0]].start
        blocks = tuple(
            BlockRange(self.slices[key].start - first + block.start, self.slices[key].start - first + block.stop, 0)
            for key in keys
            for block in self.slices[key].layout.blocks
        )
        group: dist.ProcessGroup = None  # type: ignore[assignment]
        return GroupSpan(group, (0, 1), first, self.slices[keys[-1]].stop, blocks)


@pytest.mark.parametrize("least", [1, 500, 10_000])
def test_buckets_cover_a_span_once_and_are_cut_alike_by_holders_of_other_arenas(least: int) -> None:
    order = (*reversed(range(COMPUTE)), COMPUTE)
    run = [(unit, 0) for unit in range(UNITS)]
    one = Holder.of([*run, *((unit, 1) for unit in range(UNITS))])
    other = Holder.of([(0, 1), *run])
    found, theirs = (
        buckets_of([holder.span(run)], holder.slices, Cut(order, least), COMPUTE) for holder in (one, other)
    )
    assert [bucket.spaces for bucket in found] == [bucket.spaces for bucket in theirs]
    assert [bucket.blocks for bucket in found] == [bucket.blocks for bucket in theirs]
    covered = sorted((bucket.start, bucket.stop) for bucket in found)
    assert covered[0][0] == 0 and covered[-1][1] == one.slices[UNITS - 1, 0].stop
    assert all(before[1] == after[0] for before, after in itertools.pairwise(covered))
    for bucket in found:
        assert bucket.blocks[0].start == 0 and bucket.blocks[-1].stop == bucket.stop - bucket.start
        assert bucket.units == {UNITS - 1} or UNITS - 1 not in bucket.units, "a shared weight has its own"
        assert bucket.stop - bucket.start >= least or bucket.units & {0, UNITS - 1}
    last = [max(order.index(unit) for unit in bucket.units) for bucket in found]
    assert last == sorted(last)


def test_a_bucket_has_one_shard() -> None:
    run = [(unit, shard) for shard in range(2) for unit in range(COMPUTE)]
    holder = Holder.of(run)
    found = buckets_of([holder.span(run)], holder.slices, Cut(tuple(range(UNITS)), 10**6), COMPUTE)
    assert sorted(len({shard for _, shard in bucket.spaces}) for bucket in found) == [1, 1]


def test_messages_have_every_block_once_in_the_order_of_units_however_they_are_listed() -> None:
    blocks = [block for layout in layouts().values() for block in layout.blocks]
    order = (3, 1, 6, 0, 2, 5, 4)
    shuffled = random.Random(1).sample(blocks, len(blocks))
    for least in (1, 700, 10**6):
        found = messages_of(blocks, Cut(order, least))
        assert found == messages_of(shuffled, Cut(order, least))
        flat = [block for message in found for block in message]
        assert sorted(flat) == sorted(blocks)
        places = [order.index(block.unit) for block in flat]
        assert places == sorted(places)
        assert all(sum(block.numel for block in message) >= least for message in found[:-1])
