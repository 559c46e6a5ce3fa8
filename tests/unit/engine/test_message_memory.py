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


class Peers:
    """The memory that peers may have on loan, and what they have."""

    def __init__(self) -> None:
        self.have: set[int] = set()

    def lendable(self, count: int) -> torch.Tensor:
        return torch.zeros(count)

    def on_loan(self, address: int) -> bool:
        return address in self.have


class FromOwner:
    """A loan of a message that lies at its owner's."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.address, self.given_back = memory.data_ptr(), 0
        self._memory = memory

    def values(self) -> torch.Tensor:
        return self._memory

    def give_back(self) -> None:
        self.given_back += 1


@pytest.fixture
def memory() -> MessageMemory:
    return MessageMemory(4, Peers())


def test_a_message_has_its_blocks_one_after_another_and_checksums_behind_them(memory: MessageMemory) -> None:
    message = memory.outgoing((A, C)).take()
    assert message.whole.numel() == 8 + 24 + 2 * 4
    for number, (part, start) in enumerate(zip(message.parts, (0, 8), strict=True)):
        part.fill_(number + 1)
        assert message.whole[start] == number + 1
    message.checksums[:] = bytes(range(32))
    assert message.whole[32:].view(torch.uint8).tolist() == list(range(32))
    assert [part.numel() for part in message.parts] == [8, 24]


@given(st.lists(st.sampled_from(["lend", "return"]), max_size=20))
def test_it_is_free_when_its_last_user_is_done(steps: list[str]) -> None:
    memory = MessageMemory(4, Peers())
    buffers, lent = memory.outgoing((A, B)), list[Lent]()
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
    message.written = True
    assert buffers.free == [message] and memory.bytes_free == 4 * (8 + 16 + 2 * 4)
    assert buffers.take() is message and not memory.bytes_free


def test_prepared_memory_is_taken_first_and_for_its_blocks_alone(memory: MessageMemory) -> None:
    for _ in range(2):
        memory.outgoing((A,)).prepare()
    prepared = list(memory.outgoing((A,)).free)
    assert {memory.outgoing((A,)).take(), memory.outgoing((A,)).take()} == set(prepared)
    assert memory.outgoing((C,)).take() not in prepared and memory.outgoing((A,)).take() not in prepared


def test_nothing_is_kept_after_clear_and_nothing_comes_back_to_it(memory: MessageMemory) -> None:
    memory.outgoing((A,)).prepare()
    used = memory.outgoing((B,)).take()
    memory.clear()
    used.let_go()
    assert not memory.bytes_free and not memory.outgoing((B,)).free


def test_what_a_mirror_has_on_loan_is_not_taken_again() -> None:
    peers = Peers()
    buffers = MessageMemory(4, peers).outgoing((A, B))
    first = buffers.take()
    peers.have.add(first.address)
    first.let_go()
    second = buffers.take()
    assert second is not first and buffers.free == [first]
    second.let_go()
    peers.have.clear()
    assert {buffers.take(), buffers.take()} == {first, second}


def test_a_loan_ends_with_its_last_user_and_the_same_memory_is_known_again(memory: MessageMemory) -> None:
    buffers, at_the_owner = memory.incoming((A, B)), torch.arange(8 + 16 + 2 * 4.0)
    loan = FromOwner(at_the_owner)
    message = buffers.borrowed(loan)
    assert message.whole is at_the_owner and message.parts[1].tolist() == list(range(8, 24))
    lent = [message.lend(0), message.lend(1)]
    message.let_go()
    lent.pop().give_back()
    assert not loan.given_back
    lent.pop().give_back()
    assert loan.given_back == 1
    again = FromOwner(at_the_owner)
    assert buffers.borrowed(again) is message and not again.given_back
    message.let_go()
    assert (loan.given_back, again.given_back) == (1, 1)
    assert buffers.borrowed(FromOwner(torch.zeros(32))) is not message


def test_memory_to_receive_in_counts_when_something_has_come(memory: MessageMemory) -> None:
    buffers = memory.incoming((A,))
    message = buffers.take()
    message.let_go()
    assert buffers.free == [message] and not memory.bytes_free
    message.written = True
    assert memory.bytes_free == 4 * (8 + 4)
