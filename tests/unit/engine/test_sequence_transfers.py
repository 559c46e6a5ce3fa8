"""Every receiver of a boundary gets each position that it holds exactly once, from a rank that has it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.compute.sequence_transfers import Transfer, boundary_transfers, held_slice

COUNTS = st.integers(1, 8)


@given(COUNTS, COUNTS, st.integers(1, 48), st.booleans())
def test_the_tensors_of_the_receivers_are_those_of_the_sequence(a: int, b: int, length: int, parallel: bool) -> None:
    sequence = torch.arange(length) + 1
    sent = [sequence[slice(*held_slice(index, a, length, parallel))] for index in range(a)]
    received = [torch.zeros_like(sequence[slice(*held_slice(index, b, length, parallel))]) for index in range(b)]
    for item in boundary_transfers(a, b, length, parallel):
        size = item.stop - item.start
        target = received[item.receiver][item.put_at : item.put_at + size]
        assert not target.any(), "a position arrives twice"
        target.copy_(sent[item.sender][item.sent_from : item.sent_from + size])
    for index, tensor in enumerate(received):
        assert torch.equal(tensor, sequence[slice(*held_slice(index, b, length, parallel))])


@given(COUNTS, st.integers(1, 48), st.booleans())
def test_cells_of_equal_size_send_rank_to_rank(count: int, length: int, parallel: bool) -> None:
    for item in boundary_transfers(count, count, length, parallel):
        assert item.sender == item.receiver and item.sent_from == item.put_at == 0


@given(COUNTS, COUNTS, st.integers(1, 48), st.booleans())
def test_a_receiver_takes_from_as_few_senders_as_possible(a: int, b: int, length: int, parallel: bool) -> None:
    transfers = boundary_transfers(a, b, length, parallel)
    for receiver in range(b):
        first, stop = held_slice(receiver, b, length, parallel)
        begin, end = held_slice(0, a, length, parallel)
        size = end - begin
        fewest = 1 if size == length else (stop - 1) // size - first // size + 1
        assert sum(item.receiver == receiver for item in transfers) == fewest


@pytest.mark.parametrize(
    ("senders", "receivers", "length", "expected"),
    [
        (2, 1, 8, (Transfer(0, 0, 0, 4, 0, 0), Transfer(1, 0, 4, 8, 0, 4))),
        (1, 2, 8, (Transfer(0, 0, 0, 4, 0, 0), Transfer(0, 1, 4, 8, 4, 0))),
        (
            2,
            3,
            12,
            (
                Transfer(0, 0, 0, 4, 0, 0),
                Transfer(0, 1, 4, 6, 4, 0),
                Transfer(1, 1, 6, 8, 0, 2),
                Transfer(1, 2, 8, 12, 2, 0),
            ),
        ),
        (3, 2, 8, (Transfer(0, 0, 0, 4, 0, 0), Transfer(1, 1, 4, 8, 4, 0))),
    ],
)
def test_intersections(senders: int, receivers: int, length: int, expected: tuple[Transfer, ...]) -> None:
    """Of three ranks and eight positions each rank holds all of them: the cell has no sequence parallelism."""
    assert boundary_transfers(senders, receivers, length, True) == expected


def test_receivers_are_spread_over_senders_that_all_hold_the_whole_sequence() -> None:
    assert [item.sender for item in boundary_transfers(3, 6, 10, False)] == [0, 0, 1, 1, 2, 2]
