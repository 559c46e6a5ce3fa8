"""Samples by address: any rank reads any sample of any step, with and without loader workers."""

from __future__ import annotations

import os
import signal
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from megatron.elastic.engine.compute.samples import DatasetSource, StepAddress
from megatron.elastic.plan.model import Piece


class Numbers(Dataset[torch.Tensor]):
    """Sample n is n squared, and the process that read it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index * index, os.getpid()])

    def __len__(self) -> int:
        return 1000


def pieces(*rows: tuple[int, ...]) -> tuple[Piece, ...]:
    return tuple(Piece(i, 0, 0, 4, each) for i, each in enumerate(rows))


PLAN = pieces((0, 1), (4, 5))


@given(st.integers(0, 50), st.permutations(range(8)))
@settings(max_examples=30)
def test_what_is_read_depends_on_the_address_alone(first: int, order: list[int]) -> None:
    source = DatasetSource(Numbers(), lambda sample: sample)
    plan = pieces(tuple(order[:3]), tuple(order[3:]))
    source.plan(plan)
    read = source.begin(StepAddress(first, 8))
    for piece in (*plan, plan[0]):  # twice gives the same
        reader = read(piece)
        (batch,) = reader
        assert batch[:, 0].tolist() == [(first + row) ** 2 for row in piece.rows]
        assert reader.reading is not None and reader.reading.samples == tuple(first + row for row in piece.rows)


def test_loader_workers_read_ahead_and_follow_a_changed_plan() -> None:
    source = DatasetSource(Numbers(), lambda sample: sample, workers=1)
    source.plan(PLAN)
    for step in range(3):
        read = source.begin(StepAddress(8 * step, 8))
        batches = [next(read(piece)) for piece in PLAN]
        assert all(os.getpid() not in batch[:, 1].tolist() for batch in batches), "read by a worker"
        assert [b[:, 0].tolist() for b in batches] == [[(8 * step + r) ** 2 for r in p.rows] for p in PLAN]
    changed = pieces((6, 7, 2))
    source.plan(changed)
    (batch,) = source.begin(StepAddress(24, 8))(changed[0])
    assert batch[:, 0].tolist() == [30**2, 31**2, 26**2]
    source.close()


def test_a_killed_loader_worker_costs_no_sample() -> None:
    source = DatasetSource(Numbers(), lambda sample: sample, workers=1)
    source.plan(PLAN)
    (batch,) = source.begin(StepAddress(0, 8))(PLAN[0])
    os.kill(int(batch[0, 1]), signal.SIGKILL)
    for step in range(1, 4):
        read = source.begin(StepAddress(8 * step, 8))
        for piece in PLAN:
            (batch,) = read(piece)
            assert batch[:, 0].tolist() == [(8 * step + row) ** 2 for row in piece.rows]
    source.close()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_a_step_cut_short_anywhere_leaves_the_next_one_its_own_samples(cuts: list[int], random: Random) -> None:
    """A rank that is parked in the middle of a step, and computes again from the next step on under the same plan."""
    plan = pieces((0, 1), (4, 5), (2, 3))
    source = DatasetSource(Numbers(), lambda sample: sample, workers=1)
    for step, cut in enumerate((*cuts, len(plan))):
        source.plan(plan)
        for attempt in range(1 + random.randint(0, 1)):  # the step may be computed again from its beginning
            read = source.begin(StepAddress(8 * step, 8))
            for piece in plan[:cut]:
                reader = read(piece)
                (batch,) = reader
                assert batch[:, 0].tolist() == [(8 * step + row) ** 2 for row in piece.rows], (step, cut, attempt)
                assert reader.reading is not None
                assert reader.reading.samples == tuple(8 * step + row for row in piece.rows)
    source.close()


def test_a_batch_that_is_not_asked_for_is_not_read() -> None:
    """A middle stage's forward step takes nothing from its iterator; the loader stays where it is."""
    source = DatasetSource(Numbers(), lambda sample: sample, workers=1)
    source.plan(PLAN)
    read = source.begin(StepAddress(0, 8))
    untouched = read(pieces((6, 7))[0])
    assert untouched.reading is None
    for piece in PLAN:
        assert os.getpid() not in next(read(piece))[:, 1].tolist(), "read by a worker"
    source.close()


def test_the_end_of_the_data_is_an_error() -> None:
    def order(sample: int) -> int:
        if sample >= 4:
            raise IndexError("exhausted")
        return sample

    source = DatasetSource(Numbers(), order)
    source.plan(PLAN)
    with pytest.raises(IndexError):
        next(source.begin(StepAddress(0, 8))(PLAN[1]))
