"""Samples by address: any rank reads any sample of any step, with and without loader workers."""

from __future__ import annotations

import os
import signal
from random import Random

import psutil
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


def test_loader_workers_read_ahead_and_stay_when_the_plan_changes_or_a_step_is_cut_short() -> None:
    source = DatasetSource(Numbers(), lambda sample: sample, workers=2)
    readers: set[int] = set()

    def read(step: int, plan: tuple[Piece, ...], cut: int) -> None:
        source.plan(plan)
        batch_of = source.begin(StepAddress(8 * step, 8))
        for piece in plan[:cut]:
            batch = next(batch_of(piece))
            assert batch[:, 0].tolist() == [(8 * step + row) ** 2 for row in piece.rows]
            readers.update(batch[:, 1].tolist())

    for step in range(3):
        read(step, PLAN, 2)
    workers = set(readers)
    assert len(workers) == 2 and os.getpid() not in workers, "read by the workers"
    read(3, PLAN, 1)  # cut short,
    read(3, pieces((6, 7, 2), (0, 1), (3,)), 3)  # and computed again under another plan
    read(4, PLAN, 2)
    assert readers == workers
    read(5, (), 0)
    assert not any(map(psutil.pid_exists, workers)), "a rank that reads nothing keeps no workers"


@pytest.mark.parametrize("plan", [PLAN, pieces((6, 7, 2), (0, 1))], ids=["same plan", "another plan"])
def test_a_killed_loader_worker_costs_no_sample(plan: tuple[Piece, ...]) -> None:
    source = DatasetSource(Numbers(), lambda sample: sample, workers=1)
    source.plan(PLAN)
    (batch,) = source.begin(StepAddress(0, 8))(PLAN[0])
    killed = int(batch[0, 1])
    os.kill(killed, signal.SIGKILL)
    for step in range(1, 4):
        source.plan(plan)
        read = source.begin(StepAddress(8 * step, 8))
        for piece in plan:
            (batch,) = read(piece)
            assert batch[:, 0].tolist() == [(8 * step + row) ** 2 for row in piece.rows]
    assert killed != batch[0, 1] != os.getpid(), "read by a new worker"
    source.close()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_a_step_cut_short_anywhere_leaves_the_next_one_its_own_samples(cuts: list[int], random: Random) -> None:
    """A rank that is parked in the middle of a step, and goes on with the next step, perhaps by another plan."""
    plans = pieces((0, 1), (4, 5), (2, 3)), pieces((0, 1), (2, 3, 6)), pieces((7,))
    source = DatasetSource(Numbers(), lambda sample: sample, workers=1)
    for step, cut in enumerate((*cuts, 3)):
        plan = random.choice(plans)
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
