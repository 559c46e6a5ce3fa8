"""``state`` mode: mirrors receive stepped blocks; the version before is kept until the next step."""

from __future__ import annotations

import pytest
import torch

from megatron.elastic.state.layout import ParamSpec, UnitLayout
from megatron.elastic.state.pool import StateError, StatePool
from megatron.elastic.state.protocol import resolve
from megatron.elastic.state.record import ConstantSchedule, GradientKey, Hyper, Rate, StepRecord, Vote, advance

LAYOUT = UnitLayout.build(0, 0, [ParamSpec("w", 500, (500,), True)], 1024)
KEYS = [block.key for block in LAYOUT.blocks]
RATES = (Rate(1e-2, 0.1),)
HYPER = Hyper(ConstantSchedule(RATES))
A, B = KEYS[0], KEYS[1]
OWNED = {0: A, 1: B}


def pair() -> tuple[dict[int, StatePool], StepRecord]:
    """Rank 0 owns A and mirrors B, rank 1 the other way round."""
    record = StepRecord.initial(HYPER)
    pools = {rank: StatePool(rank, {(0, 0): LAYOUT}, HYPER, snapshot="state") for rank in (0, 1)}
    for pool in pools.values():
        pool.start(record)
        for key in KEYS:
            pool.put(key, torch.full((pool.block(key).numel,), 1.0 + key[2]), 0)
    return pools, record


def step_owned(pools: dict[int, StatePool], record: StepRecord) -> StepRecord:
    key = GradientKey(record.version, 1)
    for rank, pool in pools.items():
        pool.retain(OWNED[rank], key, torch.randn(pool.block(OWNED[rank]).numel))
    after = advance(record, Vote(key, [1.0], False, 1.0, 1.0, 4, rates=RATES), HYPER)
    for rank, pool in pools.items():
        pool.apply(after, [OWNED[rank]])
    return after


def ship(pools: dict[int, StatePool], record: StepRecord, source: int) -> None:
    copy = pools[source].get(OWNED[source])
    pools[1 - source].adopt(OWNED[source], copy.state, record, copy.lineage)


def test_mirrors_adopt_the_owners_bits_and_lineage():
    pools, record = pair()
    for _ in range(3):
        record = step_owned(pools, record)
        for rank in pools:
            ship(pools, record, rank)
    for key in KEYS:
        assert torch.equal(pools[0].get(key).state, pools[1].get(key).state)
        assert pools[0].get(key).lineage == pools[1].get(key).lineage
    assert pools[0].holdings().newest == pools[0].holdings().oldest == 3


def test_an_owner_lost_before_it_shipped_costs_the_last_step_but_never_mixes_versions():
    pools, record = pair()
    record = step_owned(pools, record)
    for rank in pools:
        ship(pools, record, rank)
    before = {key: pools[1].get(key).state.clone() for key in KEYS}
    record = step_owned(pools, record)
    ship(pools, record, 1)  # rank 0 dies before its own A is shipped
    result = resolve({1: pools[1].holdings()}, {A: (0, 1), B: (1, 0)}, lambda _: 4, None)
    assert (result.kind, result.version) == ("rerun", 1)
    assert result.record is not None
    pools[1].revert(result.record)
    pools[1].discard(None, 1)
    assert all(torch.equal(pools[1].get(key).state, before[key]) for key in KEYS)
    assert pools[1].holdings().newest == pools[1].holdings().oldest == 1


def test_a_rank_without_mirrors_that_missed_the_update_goes_forward():
    """Its copies have the gradients of the step, so it reaches the version of the rank that is ahead."""
    record = StepRecord.initial(HYPER)
    pools = {rank: StatePool(rank, {(0, 0): LAYOUT}, HYPER, snapshot="state") for rank in OWNED}
    for rank, pool in pools.items():
        pool.start(record)
        pool.put(OWNED[rank], torch.ones(pool.block(OWNED[rank]).numel), 0)
        pool.retain(OWNED[rank], GradientKey(0, 1), torch.ones(pool.block(OWNED[rank]).numel))
    after = advance(record, Vote(GradientKey(0, 1), [1.0], False, 1.0, 1.0, 4, rates=RATES), HYPER)
    pools[0].apply(after, [A])
    result = resolve({rank: pool.holdings() for rank, pool in pools.items()}, {A: (0,), B: (1,)}, lambda _: 4, None)
    assert (result.kind, result.version, result.stale) == ("roll_forward", 1, ())
    for rank, pool in pools.items():
        pool.revert(after)
        pool.discard(None, 1)
        pool.apply(after, [OWNED[rank]])
        assert pool.holdings().newest == pool.holdings().oldest == 1


def test_two_versions_back_is_refused_and_so_is_adopting_in_gradient_mode():
    pools, record = pair()
    record = step_owned(pools, record)
    for rank in pools:
        ship(pools, record, rank)
    record = step_owned(pools, record)
    ship(pools, record, 0)
    with pytest.raises(StateError, match="cannot go back to 0"):
        pools[1].revert(StepRecord.initial(HYPER))
    plain = StatePool(0, {(0, 0): LAYOUT}, HYPER)
    plain.put(A, torch.zeros(plain.block(A).numel), 0)
    with pytest.raises(StateError, match="cannot adopt"):
        plain.adopt(A, torch.zeros(3, plain.block(A).numel), record, "")


def test_memory_is_28_bytes_for_an_owned_parameter_and_24_for_a_mirrored_one():
    pools, record = pair()
    record = step_owned(pools, record)
    for rank in pools:
        ship(pools, record, rank)
    owned, mirrored = (pools[0].block(key).numel for key in (A, B))
    assert pools[0].bytes_held() == 28 * owned + 24 * mirrored
