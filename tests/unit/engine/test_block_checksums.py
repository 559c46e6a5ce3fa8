"""A mirror finds in the checksums of a step each block whose history or contents differ from its owner's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.engine.compute.block_checksums import CHECKSUM_SLOTS, Disputes, block_checksums, disputes
from megatron.elastic.state.layout import ParamSpec, UnitLayout
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import ConstantSchedule, GradientKey, Hyper, Rate, StepRecord, Vote, advance
from megatron.elastic.state.verify import due

LAYOUT = UnitLayout.build(0, 0, [ParamSpec("w", 3000, (3000,), True)], 1024)
KEYS = [block.key for block in LAYOUT.blocks]
RATES = (Rate(1e-2, 0.1),)
HYPER = Hyper(ConstantSchedule(RATES))


class Pair:
    """An owner and its mirror of all blocks, with a gradient of the present step each."""

    def __init__(self) -> None:
        self.pools = [StatePool(rank, {(0, 0): LAYOUT}, HYPER) for rank in (0, 1)]
        flat = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(1))
        for pool in self.pools:
            for block in LAYOUT.blocks:
                pool.put(block.key, flat[block.start : block.stop], 0)
        self.record = StepRecord.initial(HYPER)
        self.retain()

    @property
    def gradient(self) -> GradientKey:
        return GradientKey(self.record.version, 1)

    def retain(self) -> None:
        flat = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(9 + self.record.version))
        for pool in self.pools:
            for block in LAYOUT.blocks:
                pool.retain(block.key, self.gradient, flat[block.start : block.stop])

    def step(self) -> None:
        self.record = advance(self.record, Vote(self.gradient, [1.0], False, 1.0, 1.0, 4, rates=RATES), HYPER)
        for pool in self.pools:
            pool.apply(self.record)
        self.retain()

    def found(self, interval: int) -> Disputes:
        owner, mirror = self.pools
        sent = block_checksums(owner, LAYOUT.blocks, self.gradient, interval)
        assert len(sent) == 4 * CHECKSUM_SLOTS * len(LAYOUT.blocks)
        return disputes(mirror, LAYOUT.blocks, self.gradient, interval, memoryview(sent))


def test_equal_copies_have_no_disputes() -> None:
    pair = Pair()
    for _ in range(3):
        assert pair.found(1) == Disputes()
        pair.step()


@settings(max_examples=40, deadline=None)
@given(st.sets(st.sampled_from(KEYS), min_size=1), st.integers(1, 5), st.sampled_from([0, 1]), st.integers(0, 2))
def test_a_changed_bit_is_found_once_in_an_interval(changed: set, interval: int, rank: int, row: int) -> None:  # type: ignore[type-arg]
    """The steps do not mend it: every later state is made from the wrong one."""
    pair = Pair()
    pair.step()
    for key in changed:
        pair.pools[rank].get(key).state[row].view(torch.int32)[3] ^= 1 << 22
    found = list[tuple[int, int, int]]()
    for _ in range(interval):
        dispute = pair.found(interval)
        assert dispute.marks == ()
        assert all(due(key, pair.record.version, interval) for key in dispute.contents)
        found += dispute.contents
        pair.step()
    assert sorted(found) == sorted(changed)


def test_contents_are_not_compared_without_an_interval() -> None:
    pair = Pair()
    pair.pools[0].get(KEYS[0]).state[0] += 1.0
    assert pair.found(0) == Disputes()


@pytest.mark.parametrize("difference", ["lineage", "gradient"])
def test_a_block_with_another_history_is_told_apart_from_one_whose_memory_changed(difference: str) -> None:
    pair = Pair()
    other, changed = pair.pools[0].get(KEYS[1]), pair.pools[0].get(KEYS[2])
    if difference == "lineage":
        other.lineage = "of another history"
    else:
        pair.pools[0].retain(KEYS[1], pair.gradient, other.host_gradient(pair.gradient) + 1.0)
    other.state[0] += 1.0  # where the history differs, the contents are no finding of their own
    changed.state[0] += 1.0
    assert pair.found(1) == Disputes(marks=(KEYS[1],), contents=(KEYS[2],))


def test_disputes_of_several_owners_add_up() -> None:
    total = Disputes((KEYS[0],), (KEYS[1],))
    total.add(Disputes((KEYS[2],), ()))
    total.add(Disputes())
    assert total == Disputes((KEYS[0], KEYS[2]), (KEYS[1],))


def test_a_message_without_blocks_has_no_checksums() -> None:
    pair = Pair()
    sent = block_checksums(pair.pools[0], [], pair.gradient, 1)
    assert sent == b"" and disputes(pair.pools[1], [], pair.gradient, 1, sent) == Disputes()
