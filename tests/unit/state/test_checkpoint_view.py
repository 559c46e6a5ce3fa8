"""A checkpoint is written from one version while training goes on."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.state.checkpoint_view import CheckpointView, ViewAbandoned
from megatron.elastic.state.layout import ParamSpec, UnitLayout
from megatron.elastic.state.pool import StateError, StatePool
from megatron.elastic.state.record import ConstantSchedule, GradientKey, Hyper, Rate, StepRecord, Vote, advance

LAYOUT = UnitLayout.build(0, 0, [ParamSpec("w", 2000, (2000,), True)], 1024)
KEYS = [block.key for block in LAYOUT.blocks]
RATES = (Rate(1e-2, 0.1),)
HYPER = Hyper(ConstantSchedule(RATES), scaler="dynamic", initial_loss_scale=8.0)


def fresh() -> tuple[StatePool, StepRecord]:
    pool = StatePool(0, {(0, 0): LAYOUT}, HYPER)
    for block in LAYOUT.blocks:
        pool.put(block.key, torch.randn(block.numel), 0)
    return pool, StepRecord.initial(HYPER)


def step(pool: StatePool, record: StepRecord, found: bool = False) -> StepRecord:
    key = GradientKey(record.version, 1)
    for name in pool:
        pool.retain(name, key, torch.randn(pool.block(name).numel))
    after = advance(record, Vote(key, [1.0], found, 1.0, 1.0, 4, rates=RATES), HYPER)
    pool.apply(after)
    return after


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(st.just("step"), st.just("skip"), st.sampled_from(KEYS)), max_size=20))
def test_whatever_is_read_when_it_is_the_contents_of_the_one_version(actions):
    pool, record = fresh()
    record = step(pool, record)
    truth = {key: pool.get(key).state.clone() for key in KEYS}
    unread, opened = set(KEYS), record
    with CheckpointView(pool, KEYS, record) as view:
        for action in [*actions, *KEYS]:
            if action in ("step", "skip"):
                record = step(pool, record, found=action == "skip")
            elif action in unread:
                assert torch.equal(view.read(action), truth[action])
                unread.remove(action)
        assert view.record == opened and view.bytes_aside == 0


def test_memory_is_only_for_blocks_stepped_before_they_are_read_and_once():
    pool, record = fresh()
    with CheckpointView(pool, KEYS, record) as view:
        view.read(KEYS[0])
        for _ in range(3):
            record = step(pool, record)
        assert view.bytes_aside == 12 * sum(pool.block(key).numel for key in KEYS[1:])
        for key in KEYS[1:]:
            view.read(key)
        assert view.bytes_aside == 0


def test_a_skipped_step_sets_nothing_aside():
    pool, record = fresh()
    with CheckpointView(pool, KEYS, record) as view:
        step(pool, record, found=True)
        assert view.bytes_aside == 0


def test_a_block_dropped_from_the_pool_can_still_be_read():
    pool, record = fresh()
    truth = pool.get(KEYS[0]).state.clone()
    with CheckpointView(pool, KEYS, record) as view:
        pool.drop(KEYS[0])
        assert torch.equal(view.read(KEYS[0]), truth)


def test_a_change_of_generation_abandons_the_write():
    pool, record = fresh()
    view = CheckpointView(pool, KEYS, record)
    view.read(KEYS[0])
    view.abandon("generation 4 began")
    with pytest.raises(ViewAbandoned, match="generation 4"):
        view.read(KEYS[1])
    step(pool, record)
    assert view.bytes_aside == 0, "it follows the pool no longer"


def test_a_view_across_versions_is_refused():
    pool, record = fresh()
    after = step(pool, record)
    with pytest.raises(StateError, match="view of version 0"):
        CheckpointView(pool, KEYS, record)
    CheckpointView(pool, KEYS, after).abandon("")


def test_a_writer_thread_reads_one_version_while_the_training_thread_steps_on():
    pool, record = fresh()
    truth = {key: pool.get(key).state.clone() for key in KEYS}
    wrong: list[tuple] = []
    with CheckpointView(pool, KEYS, record) as view:

        def write() -> None:
            for key in KEYS:
                if not torch.equal(view.read(key), truth[key]):
                    wrong.append(key)

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        for _ in range(40):
            record = step(pool, record)
        writer.join(20)
    assert not writer.is_alive() and not wrong and pool.holdings().newest == 40
