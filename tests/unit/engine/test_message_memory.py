"""The memory of a message is free when all its users are done. Then the same blocks use it again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.compute.message_memory import MessageMemory
from megatron.elastic.state.layout import StateBlock
from megatron.elastic.state.retained import Lent

A, B, C = (StateBlock(0, 0, index, 16 * index, 16 * index + 8 * (index + 1)) for index in range(3))


@pytest.fixture
def memory() -> MessageMemory:
    return MessageMemory(4)


def test_a_message_has_its_blocks_one_after_another_and_checksums_behind_them(memory: MessageMemory) -> None:
    message = memory.buffers((A, C)).take()
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
    buffers, lent = memory.buffers((A, B)), list[Lent]()
    message = buffers.take()
    for step in steps:
        if step == "lend":
            lent.append(message.lend(len(lent) % 2))
            assert lent[-1].values is message.parts[(len(lent) - 1) % 2]
        elif lent:
            lent.pop().give_back()
        assert not buffers.free and buffers.take() is not message
    message.let_go()
    while lent:
        assert not buffers.free
        lent.pop().give_back()
    assert buffers.free == [message] and memory.bytes_free == 4 * (8 + 16 + 2 * 4)
    assert buffers.take() is message and not memory.bytes_free


def test_prepared_memory_is_taken_first_and_for_its_blocks_alone(memory: MessageMemory) -> None:
    for _ in range(2):
        memory.buffers((A,)).prepare()
    prepared = list(memory.buffers((A,)).free)
    assert {memory.buffers((A,)).take(), memory.buffers((A,)).take()} == set(prepared)
    assert memory.buffers((C,)).take() not in prepared and memory.buffers((A,)).take() not in prepared


def test_nothing_is_kept_after_clear_and_nothing_comes_back_to_it(memory: MessageMemory) -> None:
    memory.buffers((A,)).prepare()
    used = memory.buffers((B,)).take()
    memory.clear()
    used.let_go()
    assert not memory.bytes_free and not memory.buffers((B,)).free
