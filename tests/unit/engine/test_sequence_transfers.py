"""Every position of a sequence is in one part, and every receiver gets each position that it holds exactly once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.compute.sequence_cut import SequenceCut, length_of, part_runs, taken
from megatron.elastic.engine.compute.sequence_transfers import Transfer, boundary_transfers

COUNTS = st.integers(1, 8)
CUTS = st.builds(SequenceCut, st.integers(1, 48), st.booleans())


@st.composite
def shared(draw: st.DrawFn) -> tuple[SequenceCut, int, int]:
    """A cut over parts of some tensor-parallel ranks each, and the ranks of two cells."""
    tensor, a, b = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    length = tensor * draw(st.integers(2 * max(a, b), 30))
    return SequenceCut(length, draw(st.booleans()), tensor), a * tensor, b * tensor


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 100))
def test_parts_hold_each_position_once_and_differ_by_one_grain(count: int, grain: int, length: int) -> None:
    parts = [part_runs(length, index, count, grain) for index in range(count)]
    held = sorted(position for part in parts for start, stop in part for position in range(start, stop))
    assert held == list(range(length))
    sizes = [length_of(part) for part in parts]
    assert max(sizes) - min(sizes) <= grain
    if length % grain == 0:
        assert not any(size % grain for size in sizes)
        assert all(sizes) == (length // grain >= count)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_cut_is_megatrons_where_twice_the_number_of_parts_divides_the_length(count: int) -> None:
    positions = torch.arange(24)
    for index in range(count):
        chunks = positions.view(2 * count, -1)[[index, 2 * count - 1 - index]].reshape(-1)
        assert torch.equal(taken(positions, part_runs(24, index, count, 2), 0), chunks)


def received(a: int, b: int, cut: SequenceCut) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The positions that each receiver gets and those that it should hold; positions count from 1."""
    sequence = torch.arange(cut.length) + 1
    sent = [taken(sequence, cut.held(index, a), 0) for index in range(a)]
    expected = [taken(sequence, cut.held(index, b), 0) for index in range(b)]
    got = [torch.zeros_like(tensor) for tensor in expected]
    for item in boundary_transfers(a, b, cut):
        for sent_from, put_at, number in item.stretches:
            target = got[item.receiver][put_at : put_at + number]
            assert not target.any(), "a position arrives twice"
            target.copy_(sent[item.sender][sent_from : sent_from + number])
    return list(zip(got, expected, strict=True))


@given(COUNTS, COUNTS, CUTS)
def test_the_tensors_of_the_receivers_are_those_of_the_sequence(a: int, b: int, cut: SequenceCut) -> None:
    assert all(torch.equal(*pair) for pair in received(a, b, cut))


@given(shared())
def test_cells_that_share_the_sequence_hand_over_every_position(case: tuple[SequenceCut, int, int]) -> None:
    cut, a, b = case
    assert all(torch.equal(*pair) for pair in received(a, b, cut))
    pairs = [(item.sender, item.receiver) for item in boundary_transfers(a, b, cut)]
    assert len(pairs) == len(set(pairs)), "two ranks exchange one message"


@given(shared())
def test_cells_of_equal_size_send_rank_to_rank(case: tuple[SequenceCut, int, int]) -> None:
    cut, count, _ = case
    for each in (cut, SequenceCut(cut.length, cut.sequence_parallel)):
        for item in boundary_transfers(count, count, each):
            assert item.sender == item.receiver
            assert item.stretches == ((0, 0, length_of(each.held(item.sender, count))),)


@given(COUNTS, COUNTS, CUTS)
def test_a_receiver_takes_from_as_few_senders_as_possible(a: int, b: int, cut: SequenceCut) -> None:
    transfers = boundary_transfers(a, b, cut)
    for receiver in range(b):
        ((first, stop),), ((begin, end),) = cut.held(receiver, b), cut.held(0, a)
        size = end - begin
        fewest = 1 if size == cut.length else (stop - 1) // size - first // size + 1
        assert sum(item.receiver == receiver for item in transfers) == fewest


@pytest.mark.parametrize(
    ("senders", "receivers", "length", "expected"),
    [
        (2, 1, 8, (Transfer(0, 0, ((0, 0, 4),)), Transfer(1, 0, ((0, 4, 4),)))),
        (1, 2, 8, (Transfer(0, 0, ((0, 0, 4),)), Transfer(0, 1, ((4, 0, 4),)))),
        (
            2,
            3,
            12,
            (
                Transfer(0, 0, ((0, 0, 4),)),
                Transfer(0, 1, ((4, 0, 2),)),
                Transfer(1, 1, ((0, 2, 2),)),
                Transfer(1, 2, ((2, 0, 4),)),
            ),
        ),
        (3, 2, 8, (Transfer(0, 0, ((0, 0, 4),)), Transfer(1, 1, ((4, 0, 4),)))),
    ],
)
def test_intersections(senders: int, receivers: int, length: int, expected: tuple[Transfer, ...]) -> None:
    """Of three ranks and eight positions each rank holds all of them: the cell has no sequence parallelism."""
    assert boundary_transfers(senders, receivers, SequenceCut(length, True)) == expected


def test_a_cell_that_has_lost_a_part_receives_from_both_ends_of_the_sequence() -> None:
    """Of 12 positions, part 0 of two has [0, 3) and [9, 12): one message with two stretches."""
    assert boundary_transfers(2, 1, SequenceCut(12, tensor=1)) == (
        Transfer(0, 0, ((0, 0, 3), (3, 9, 3))),
        Transfer(1, 0, ((0, 3, 6),)),
    )


def test_receivers_are_spread_over_senders_that_all_hold_the_whole_sequence() -> None:
    assert [item.sender for item in boundary_transfers(3, 6, SequenceCut(10))] == [0, 0, 1, 1, 2, 2]
