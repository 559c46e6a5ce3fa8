"""Memory of messages is used again by the same blocks once all its users are done, and by nobody before that."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.compute.message_memory import MessageMemory
from megatron.elastic.state.block_copy import Lent
from megatron.elastic.state.layout import StateBlock

A, B, C = (StateBlock(0, 0, index, 16 * index, 16 * index + 8 * (index + 1)) for index in range(3))


@pytest.fixture
def memory() -> MessageMemory:
    return MessageMemory(4)


def test_a_message_has_its_blocks_one_after_another_and_checksums_behind_them(memory: MessageMemory) -> None:
    message = memory.take((A, C))
    assert message.whole.numel() == 8 + 24 + 2 * 4
    for number, (part, start) in enumerate(zip(message.parts, (0, 8), strict=True)):
        part.fill_(number + 1)
        assert message.whole[start] == number + 1
    message.checksums[:] = bytes(range(32))
    assert message.whole[32:].view(torch.uint8).tolist() == list(range(32))
    assert [part.numel() for part in message.parts] == [8, 24]


@given(st.lists(st.sampled_from(["lend", "return"]), max_size=20))
def test_it_is_free_when_its_last_user_is_done(steps: list[str]) -> None:
    memory = MessageMemory(4)
    message, lent = memory.take((A, B)), list[Lent]()
    for step in steps:
        if step == "lend":
            lent.append(message.lend(len(lent) % 2))
            assert lent[-1].values is message.parts[(len(lent) - 1) % 2]
        elif lent:
            lent.pop().give_back()
        assert not memory.free and memory.take((A, B)) is not message
    message.let_go()
    while lent:
        assert not memory.free
        lent.pop().give_back()
    assert memory.free == [(A, B)] and memory.bytes_free == 4 * (8 + 16 + 2 * 4)
    assert memory.take((A, B)) is message and not memory.free


def test_prepared_memory_is_taken_first_and_by_its_blocks_alone(memory: MessageMemory) -> None:
    memory.prepare([(A,), (A,), (B,)])
    assert memory.free == [(A,), (A,), (B,)]
    first, second = memory.take((A,)), memory.take((A,))
    assert first is not second and memory.free == [(B,)]
    assert not memory.take((C,)).whole.any() and memory.free == [(B,)]


def test_nothing_is_kept_after_clear_and_nothing_comes_back_to_it(memory: MessageMemory) -> None:
    memory.prepare([(A,)])
    used = memory.take((B,))
    memory.clear()
    used.let_go()
    assert not memory.free
