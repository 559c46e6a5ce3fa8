"""A flipped bit is found, named by block, tensor and rank, and repaired from another copy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.state.hashing import content_hash
from megatron.elastic.state.layout import ParamSpec, UnitLayout
from megatron.elastic.state.ownership import Rules, UnitGroup, initial
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import ConstantSchedule, GradientKey, Hyper, Rate, StepRecord, Vote, advance
from megatron.elastic.state.transfer import commit, prune
from megatron.elastic.state.verify import (
    Corruption,
    compare,
    compared,
    due,
    fingerprints,
    repairs,
)

RANKS = (0, 1, 2)
LAYOUT = UnitLayout.build(0, 0, [ParamSpec("w", 1500, (1500,), True)], 1024)
RATES = (Rate(1e-2, 0.1),)
HYPER = Hyper(ConstantSchedule(RATES))


class Job:
    """Three ranks, k mirrors a block, a few real steps, and the parameters every rank computes with."""

    def __init__(self, mirrors: int) -> None:
        self.placement = initial([UnitGroup(0, 0, LAYOUT.blocks, RANKS)], Rules(mirrors, 2, dict.fromkeys(RANKS, 0)))
        self.pools = {rank: StatePool(rank, {(0, 0): LAYOUT}, HYPER) for rank in RANKS}
        flat = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(1))
        for key, copies in self.placement.copies.items():
            for rank in copies.ranks:
                block = LAYOUT.blocks[key[2]]
                self.pools[rank].put(key, flat[block.start : block.stop], 0)
        self.record = StepRecord.initial(HYPER)
        self.step()

    def step(self) -> None:
        key = GradientKey(self.record.version, 1)
        self.record = advance(self.record, Vote(key, [1.0], False, 1.0, 1.0, 4, rates=RATES), HYPER)
        flat = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(9 + key.step))
        for pool in self.pools.values():
            for name in pool:
                block = LAYOUT.blocks[name[2]]
                pool.retain(name, key, flat[block.start : block.stop])
            pool.apply(self.record)
        self.params = {
            key: content_hash(key, self.pools[copies.owner].get(key).master.bfloat16())
            for key, copies in self.placement.copies.items()
        }

    def found(self, with_parameters: bool = False) -> tuple[Corruption, ...]:
        tables = {rank: fingerprints(pool, pool, torch.bfloat16) for rank, pool in self.pools.items()}
        parameters = dict.fromkeys(RANKS, self.params) if with_parameters else None
        return compare(tables, self.placement, parameters)

    def flip(self, rank: int, key, row: int, element: int, bit: int = 30) -> None:
        self.pools[rank].get(key).state[row].view(torch.int32)[element] ^= 1 << bit


def test_healthy_copies_are_silent():
    assert Job(1).found() == Job(2).found(with_parameters=True) == ()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_with_two_mirrors_any_single_flip_is_named_by_block_tensor_and_rank(data):
    job = Job(2)
    key = data.draw(st.sampled_from(sorted(job.placement.copies)))
    rank, row = data.draw(st.sampled_from(RANKS)), data.draw(st.integers(0, 2))
    job.flip(rank, key, row, data.draw(st.integers(0, LAYOUT.blocks[key[2]].numel - 1)), data.draw(st.integers(0, 30)))
    [found] = job.found()
    assert (found.block, found.rank, found.tensors) == (key, rank, (("master", "exp_avg", "exp_avg_sq")[row],))


def test_with_one_mirror_the_parameters_convict_an_owner_whose_master_changed_after_the_gather():
    job = Job(1)
    key, copies = sorted(job.placement.copies.items())[0]
    job.flip(copies.owner, key, 0, 3)
    assert job.found()[0].rank == -1, "undecided without the parameters"
    [found] = job.found(with_parameters=True)
    assert (found.rank, found.tensors) == (copies.owner, ("master",))


def test_with_one_mirror_and_no_witness_the_finding_is_undecided_and_repairs_nothing():
    job = Job(1)
    key, copies = sorted(job.placement.copies.items())[0]
    job.flip(copies.mirrors[0], key, 1, 3)
    [found] = job.found(with_parameters=True)
    assert (found.rank, found.suspects) == (-1, tuple(sorted(copies.ranks)))
    assert "one of ranks" in str(found) and repairs([found], job.placement) == ()


def test_repair_replaces_the_bad_copy_and_hands_over_first_when_it_is_the_owner():
    job = Job(2)
    key, copies = sorted(job.placement.copies.items())[0]
    mirror = copies.mirrors[0]
    by_mirror = repairs([Corruption(key, mirror, ("master",), RANKS)], job.placement)
    assert [(c.kind, c.rank, c.source) for c in by_mirror] == [("drop", mirror, -1), ("add", mirror, copies.owner)]
    by_owner = repairs([Corruption(key, copies.owner, ("master",), RANKS)], job.placement)
    assert [c.kind for c in by_owner] == ["promote", "drop", "add"]
    after = job.placement.apply(by_owner)
    assert after.owner(key) == mirror and set(after.copies[key].ranks) == set(copies.ranks)


def test_a_damaged_copy_is_replaced_in_place():
    job = Job(2)
    key, copies = sorted(job.placement.copies.items())[0]
    mirror = copies.mirrors[0]
    job.flip(mirror, key, 0, 9)
    changes = repairs(job.found(), job.placement)
    good = job.pools[copies.owner].get(key)
    fresh = job.pools[mirror].shape(key, good.state.clone(), good.version, good.lineage)
    commit(job.pools[mirror], changes, {key: fresh}, job.record.version)
    after = job.placement.apply(changes)
    assert after.copies == job.placement.copies
    assert not prune(job.pools[mirror], after) and job.found() == ()


def test_every_block_is_looked_at_once_in_an_interval_and_the_work_is_spread():
    keys = [(unit, shard, index) for unit in range(5) for shard in range(2) for index in range(40)]
    for interval in (1, 7, 50):
        rounds = [[key for key in keys if due(key, version, interval)] for version in range(100, 100 + interval)]
        assert sorted(key for chosen in rounds for key in chosen) == sorted(keys)
        assert max(map(len, rounds)) <= 2 * len(keys) / interval + 5
    assert not any(due(key, version, 0) for key in keys for version in range(10))


@pytest.mark.parametrize("wrong", RANKS)
def test_copies_that_were_made_of_one_have_one_vote_until_they_are_compared(wrong: int) -> None:
    """Rank 2's copy came from rank 1's. Either side may be wrong: only one of two that should be equal is named."""
    job = Job(2)
    key = next(iter(job.placement.copies))
    job.pools[2].get(key).origin = 1
    for rank in (1, 2) if wrong == 1 else (wrong,):
        job.flip(rank, key, 1, 3)
    found = job.found()
    assert [one.rank for one in found] == ([2] if wrong == 2 else [-1])
    for pool in job.pools.values():
        compared(pool, job.record.version, 1)
    assert all(pool.get(key).origin == -1 for pool in job.pools.values())
    assert [one.rank for one in job.found()] == [2 if wrong == 2 else 0]
