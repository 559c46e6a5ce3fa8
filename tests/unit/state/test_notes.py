"""A pool notes how many gradients its copies retained, and which ones updated them, until the notes are taken."""

from __future__ import annotations

from dataclasses import replace

from megatron.elastic.state.notes import Notes
from megatron.elastic.state.record import GradientKey
from tests.unit.state.test_pool import KEYS, filled, retain_all, voted


def test_the_most_gradients_of_one_copy_since_they_were_taken() -> None:
    notes = Notes()
    for gradients in (1, 2, 1):
        notes.retained(gradients)
    assert notes.take_retained() == 2 and notes.take_retained() == 0


def test_a_pool_notes_gradients_and_updates_and_tells_its_oldest_copy() -> None:
    pool, record = filled(0)
    retain_all(pool, GradientKey(0, 1))
    first = voted(pool, record, GradientKey(0, 1))
    retain_all(pool, GradientKey(1, 2, 1))
    assert pool.notes.take_retained() == 2 and pool.oldest() == 0
    pool.apply(first, KEYS[:1])
    assert pool.oldest() == 0, "the others are a step behind"
    pool.apply(first)
    pool.apply(voted(pool, first, GradientKey(1, 2, 1)))
    assert pool.oldest() == 2
    assert pool.notes.take_applied() == ((1, 0, 1, 0), (2, 1, 2, 1)) and not pool.notes.take_applied()


def test_a_skipped_step_is_no_update() -> None:
    pool, record = filled(0)
    retain_all(pool, GradientKey(0, 1))
    skipped = replace(voted(pool, record, GradientKey(0, 1)), skipped=True)
    pool.apply(skipped)
    assert pool.oldest() == 1 and not pool.notes.take_applied()
