"""A mirror may make its updates two at a time: nothing that reads its numbers can tell."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.engine.transaction.streams import Streams
from megatron.elastic.state import place as place_module
from megatron.elastic.state.adam import adam_step_runs
from megatron.elastic.state.block_copy import BlockCopy
from megatron.elastic.state.pool import StateError, StatePool
from megatron.elastic.state.record import GradientKey, Hyper, StepRecord
from megatron.elastic.state.retained import Lent
from tests.unit.state.test_pool import HYPER, KEYS, LAYOUT, bits, filled, gradient, retain_all, same, voted

MAY_SKIP = Hyper(HYPER.schedule, scaler="dynamic", initial_loss_scale=8.0)


def numbers(pool: StatePool) -> list[torch.Tensor]:
    """Return the numbers that lie in memory, which may lack updates."""
    return [pool.get(key).made.state.view(torch.int32).clone() for key in pool]


def waiting(pool: StatePool) -> int:
    return sum(len(pool.get(key).accepted) for key in pool)


def stepped(pools: tuple[StatePool, ...], record: StepRecord, skipped: bool = False) -> StepRecord:
    """Return the next record, for which all pools have gradients."""
    key = GradientKey(record.version, 1)
    for pool in pools:
        retain_all(pool, key)
        if skipped:
            values = pool.get(KEYS[0]).host_gradient(key).clone()
            values[3] = math.inf
            pool.retain(KEYS[0], key, values)
    return voted(pools[0], record, key, found=skipped)


def test_a_mirror_makes_two_updates_in_one_pass() -> None:
    (owner, record), (mirror, _) = filled(0), filled(1)
    for version in range(1, 5):
        before = numbers(mirror)
        record = stepped((owner, mirror), record)
        owner.apply(record)
        mirror.apply(record, unread=KEYS)
        assert {mirror.get(key).version for key in KEYS} == {version}
        assert {mirror.get(key).lineage for key in KEYS} == {owner.get(key).lineage for key in KEYS}
        assert same(numbers(mirror), before if version % 2 else numbers(owner))
    assert same(bits(owner), bits(mirror))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_read_has_the_owners_bits(data: st.DataObject) -> None:
    """Steps and skipped steps, some blocks at once and others late, reads, guards and new roles in between."""
    (owner, record), (mirror, _) = filled(0, MAY_SKIP), filled(1, MAY_SKIP)
    blocks = st.sampled_from(KEYS)
    for _ in range(data.draw(st.integers(1, 7), "steps")):
        record = stepped((owner, mirror), record, data.draw(st.integers(0, 3)) == 0)
        owner.apply(record)
        unread = data.draw(st.sets(blocks), "unread")
        mirror.apply(record, data.draw(st.lists(blocks, unique=True)), unread)
        mirror.apply(record, unread=unread)
        for key in data.draw(st.sets(blocks), "read"):
            assert torch.equal(mirror.get(key).state.view(torch.int32), owner.get(key).state.view(torch.int32)), key
        if data.draw(st.booleans(), "guarded"):
            mirror.add_guard(lambda copy, record: nothing())()
            assert not waiting(mirror)
    assert same(bits(owner), bits(mirror))


@contextmanager
def nothing() -> Iterator[None]:
    yield


def test_no_update_waits_while_a_guard_is_on_the_pool() -> None:
    mirror, record = filled(1)
    mirror.apply(record := stepped((mirror,), record), unread=KEYS)
    assert waiting(mirror) == len(KEYS)
    seen = list[torch.Tensor]()

    @contextmanager
    def guard(copy: BlockCopy, record: StepRecord | None) -> Iterator[None]:
        seen.append(copy.made.state.clone())
        assert not copy.accepted
        yield
        assert not copy.accepted

    remove = mirror.add_guard(guard)
    assert not waiting(mirror)
    at_one = [mirror.get(key).state.clone() for key in KEYS]
    for _ in range(2):
        mirror.apply(record := stepped((mirror,), record), unread=KEYS)
    assert len(seen) == 2 * len(KEYS)
    assert all(torch.equal(a, b) for a, b in zip(seen[: len(KEYS)], at_one, strict=True))
    remove()
    mirror.apply(record := stepped((mirror,), record), unread=KEYS)
    mirror.apply(stepped((mirror,), record), unread=KEYS)
    assert waiting(mirror) == len(KEYS)


def test_an_accepted_update_keeps_its_gradients_memory_until_it_is_made() -> None:
    mirror, record = filled(1)
    returned, held = list[int](), mirror.bytes_held()
    for step, message in enumerate(torch.zeros(2, LAYOUT.numel)):
        key = GradientKey(step, 1)
        for number, block in enumerate(LAYOUT.blocks):
            part = message[block.start : block.stop].copy_(gradient(step)[block.start : block.stop])
            lent = Lent(part, partial(returned.append, 10 * step + number), elsewhere=True)
            mirror.retain(block.key, key, part, lent)
        record = voted(mirror, record, key)
        mirror.apply(record, unread=KEYS)
        assert mirror.bytes_held() == held, "the memory is another process's"
        assert len(returned) == (2 * len(KEYS) if step else 0)
    both = itertools.product((0, 1), range(len(KEYS)))
    assert sorted(returned) == [10 * step + number for step, number in both]


def test_memory_of_its_own_counts_until_the_update_is_made() -> None:
    mirror, record = filled(1)
    mirror.apply(record := stepped((mirror,), record), unread=KEYS)
    assert mirror.bytes_held() == 16 * LAYOUT.numel
    retain_all(mirror, GradientKey(1, 1))
    assert mirror.bytes_held() == 20 * LAYOUT.numel


def test_updates_interrupted_while_they_are_made_leave_the_block_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    mirror, record = filled(1)
    mirror.apply(record := stepped((mirror,), record), unread=KEYS)
    calls = list[None]()

    def interrupted(*arguments: object) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        adam_step_runs(*arguments)  # type: ignore[arg-type]

    record = stepped((mirror,), record)
    monkeypatch.setattr(place_module, "adam_step_runs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mirror.apply(record, unread=KEYS)
    monkeypatch.undo()
    held = mirror.holdings()
    assert held.torn == (KEYS[1],) and (held.oldest, held.newest) == (1, 2)
    with pytest.raises(StateError, match="version -2"):
        mirror.apply(record)


def test_a_gradient_that_is_missing_is_refused_when_the_step_is_accepted() -> None:
    (owner, record), (mirror, _) = filled(0), filled(1)
    record = stepped((owner,), record)
    with pytest.raises(StateError, match="lacks gradient"):
        mirror.apply(record, unread=KEYS)
    assert not waiting(mirror) and mirror.holdings().newest == 0


def test_whoever_reads_a_copy_while_it_is_updated_makes_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread counts what has come, and may read it, while the threads of its streams update it."""
    (owner, record), (mirror, _) = filled(0), filled(1)
    copy = mirror.get(KEYS[0])
    receiver = SimpleNamespace(blocks={KEYS[0]: copy})
    streams, made = Streams.__new__(Streams), list[int]()
    streams._incoming = cast(Any, [SimpleNamespace(receiver=receiver)])

    def read_meanwhile(*arguments: object) -> None:
        made.append(streams.bytes_received)
        assert copy.state is copy.made.state
        adam_step_runs(*arguments)  # type: ignore[arg-type]

    record = stepped((owner, mirror), record)
    owner.apply(record)
    monkeypatch.setattr(place_module, "adam_step_runs", read_meanwhile)
    mirror.replay(copy, record)
    assert made == [12 * LAYOUT.blocks[0].numel]
    assert torch.equal(copy.state.view(torch.int32), owner.get(KEYS[0]).state.view(torch.int32))
