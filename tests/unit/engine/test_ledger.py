"""The ledger: whatever is computed from other samples than planned is refused, and nothing else is."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.compute.ledger import (
    Expected,
    Ledger,
    LedgerError,
    PieceReading,
    content_digests,
    differences,
    sample_digest,
)
from megatron.elastic.plan.model import Piece

UNITS = 6
ROWS = 12


def contents(sample: int) -> int:
    return sample_digest(sample, 7)


def reading(samples: tuple[int, ...]) -> PieceReading:
    return PieceReading(samples, tuple(map(contents, samples)))


@st.composite
def layouts(draw: st.DrawFn) -> list[Piece]:
    """Rows in pieces of any size, each through a pipeline that is cut anywhere."""
    rows = draw(st.permutations(range(ROWS)))
    cuts = sorted(draw(st.sets(st.integers(1, ROWS - 1))))
    pieces: list[Piece] = []
    for start, stop in zip([0, *cuts], [*cuts, ROWS], strict=True):
        stages = [0, *sorted(draw(st.sets(st.integers(1, UNITS - 1)))), UNITS]
        for first, end in pairwise(stages):
            pieces.append(Piece(len(pieces), 0, first, end, tuple(rows[start:stop])))
    return pieces


def computed(pieces: list[Piece], first: int = 0) -> Ledger:
    """The sum over ranks, one a piece."""
    total = Ledger()
    for piece in pieces:
        ledger, samples = Ledger(), tuple(first + row for row in piece.rows)
        ledger.read(piece, samples, reading(samples), UNITS)
        ledger.accumulated(piece, samples)
        ledger.weights += 2.0 * len(samples) / ROWS if piece.end == UNITS else 0.0
        total.add(ledger)
    return total


def promise(first: int = 0, **changes: object) -> Expected:
    return Expected(range(first, first + ROWS), UNITS, weights=2.0, **changes)  # type: ignore[arg-type]


@given(layouts(), st.integers(0, 1 << 40))
def test_the_sum_is_the_promise_whichever_rank_computes_what(pieces: list[Piece], first: int) -> None:
    assert computed(pieces, first).findings(promise(first)) == []


@given(layouts(), st.data())
def test_a_piece_that_is_missing_or_computed_twice_is_found(pieces: list[Piece], data: st.DataObject) -> None:
    piece = data.draw(st.sampled_from(pieces))
    assert computed([other for other in pieces if other is not piece]).findings(promise())
    assert computed([*pieces, piece]).findings(promise())


@given(layouts(), st.data())
def test_a_lost_gradient_of_any_layer_is_found(pieces: list[Piece], data: st.DataObject) -> None:
    piece, total = data.draw(st.sampled_from(pieces)), computed(pieces)
    missing = Ledger()
    missing.accumulated(piece, piece.rows)
    total.gradients -= missing.gradients
    assert total.findings(promise()) == ["some layer's gradient lacks a sample, or has one twice"]


@pytest.mark.parametrize("got", [(4, 5), (5, 4), (4,), (4, 5, 6)])
def test_samples_other_than_planned_are_refused_where_they_are_read(got: tuple[int, ...]) -> None:
    planned = (6, 7)
    with pytest.raises(LedgerError, match=r"piece 3 was computed from samples [-456, ]+ instead of 6-7"):
        Ledger().read(Piece(3, 0, 0, UNITS, (0, 1)), planned, reading(got), UNITS)


def test_a_loss_without_any_reading_is_refused():
    with pytest.raises(LedgerError, match="read nothing from its data iterator"):
        Ledger().read(Piece(3, 0, 2, UNITS, (0, 1)), (6, 7), None, UNITS)
    Ledger().read(Piece(3, 0, 2, 4, (0, 1)), (6, 7), None, UNITS)  # a middle stage reads nothing


def test_labels_of_other_contents_than_the_tokens_are_found_and_the_ranks_named():
    first, last = Piece(0, 0, 0, 3, tuple(range(ROWS))), Piece(1, 1, 3, UNITS, tuple(range(ROWS)))
    samples = tuple(range(ROWS))
    stale = PieceReading(samples, (*map(contents, samples[:-2]), 1, 2))
    total = Ledger()
    total.read(first, samples, reading(samples), UNITS)
    total.read(last, samples, stale, UNITS)
    for piece in (first, last):
        total.accumulated(piece, samples)
    total.weights = 2.0
    (finding,) = total.findings(promise())
    assert "tokens at the first stage and labels at the last" in finding
    assert total.findings(promise(complete=False)) == [], "of a vote taken again, a dead rank's inputs are unknown"
    seen = dict(zip(samples, map(contents, samples), strict=True))
    assert differences({0: (seen, {}), 4: ({}, dict(zip(samples, stale.contents, strict=True)))}) == [
        "ranks 0 and 4 read different contents of samples 10-11: compare their data files"
    ]


def test_weights_that_do_not_add_up_are_found():
    total = computed([Piece(0, 0, 0, UNITS, tuple(range(ROWS)))])
    total.weights = 1.5
    assert total.findings(promise()) == ["the weights of the losses add up to 1.5 instead of 2"]


@given(st.integers(1, 5), st.integers(0, 1 << 30))
def test_contents_are_those_of_the_row_whatever_batch_it_is_in(rows: int, seed: int) -> None:
    torch.manual_seed(seed)
    batch = {
        "tokens": torch.randint(1 << 40, (rows, 8)),
        "labels": torch.randint(1 << 40, (rows, 8)),
        "loss_mask": torch.rand(rows, 8),
        "attention_mask": torch.rand(rows, 8, 8) < 0.5,
    }
    alone = [{name: values[i : i + 1] for name, values in batch.items()} for i in range(rows)]
    whole = content_digests(batch, rows)
    assert whole == tuple(content_digests(one, 1)[0] for one in alone)
    batch["labels"][rows - 1, 3] += 1
    changed = content_digests(batch, rows)
    assert changed[:-1] == whole[:-1] and changed[-1] != whole[-1]
