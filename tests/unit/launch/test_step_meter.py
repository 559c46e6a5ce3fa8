"""An agent sees the steps of its workers in their slots, whatever is written there."""

from __future__ import annotations

import os
import socket
import struct

import pytest

from megatron.elastic.control.clock import JobClock
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.history import JobHistory
from megatron.elastic.control.membership import Committed
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.slot import Slot
from megatron.elastic.control.status_text import progress_line
from megatron.elastic.launch.agent.admin import Sources
from megatron.elastic.launch.agent.step_meter import StepMeter, StepSample
from megatron.elastic.launch.workers.pool import Worker


def worker_with_slot(rank: int) -> tuple[Worker, Slot]:
    fd, agents = Slot.create("t")
    workers = Slot(fd)
    os.close(fd)
    channel, _ = socket.socketpair()
    return Worker(rank, rank, rank, 0, channel, agents), workers


def sources(meter: StepMeter) -> Sources:
    return Sources("job", Generations({0: Node("h", (0, 1))}), JobHistory(), JobClock(), meter)


def test_the_newest_step_of_any_worker_is_the_nodes_and_seen_once() -> None:
    meter, (first, one), (second, other) = StepMeter(), worker_with_slot(0), worker_with_slot(1)
    meter.look([first, second])
    assert meter.newest is None and meter.rate() is None and sources(meter).progress() is None
    for step in (1, 2, 3):
        (one if step < 3 else other).commit(Committed(step, 10, 8 * step, 0.25, 4.0 - step))
        meter.look([first, second])
        meter.look([first, second])
    assert [sample.step.step for sample in meter.samples] == [1, 2, 3]
    rate = meter.rate()
    assert rate is not None and rate == pytest.approx(2 / (meter.samples[-1].at - meter.samples[0].at))
    progress = sources(meter).progress()
    assert progress is not None and (progress.step, progress.target, progress.samples) == (3, 10, 24)
    assert progress.left_s == pytest.approx(7 / rate) and progress.loss == 1.0


def test_a_job_that_goes_back_to_a_checkpoint_has_the_rate_of_its_new_steps() -> None:
    meter, (worker, slot) = StepMeter(), worker_with_slot(0)
    for step in (7, 8, 3, 4, 5):
        slot.commit(Committed(step, 10, step, 0.5, 1.0))
        meter.look([worker])
    rate = meter.rate()
    assert rate == pytest.approx(2 / (meter.samples[-1].at - meter.samples[2].at))


def test_a_wait_between_steps_does_not_count_as_duration_of_a_step() -> None:
    """Such as an evaluation: the time left must count it, and the duration of a step must not."""
    meter = StepMeter()
    assert meter.duration() is None
    for at, step in ((100.0, 1), (101.0, 2), (125.0, 3), (125.5, 4)):  # 24 s before step 3
        meter.samples.append(StepSample(at, Committed(step, 10, step, 0.5 if step == 4 else 1.0, 1.0)))
    progress = sources(meter).progress()
    assert progress is not None and progress.mean_step_s == pytest.approx(3.5 / 4)
    assert progress.left_s == pytest.approx(6 * 25.5 / 3)
    assert "0.875 s a step" in progress_line(sources(meter).status())
    meter.samples.append(StepSample(200.0, Committed(5, 10, 5, 0.25, 1.0)))  # the only one of the last minute
    assert meter.duration() == 0.25


def test_half_a_write_and_senseless_numbers_give_no_figures() -> None:
    meter, (worker, slot) = StepMeter(), worker_with_slot(0)
    slot.commit(Committed(5, -1, -1, 0.5, float("inf")))
    meter.look([worker])
    progress = sources(meter).progress()
    assert progress is not None and (progress.target, progress.loss, progress.left_s) == (None, None, None)
    struct.pack_into("<Q", worker.slot._map, 1536, 99)  # a write under way when its writer died
    slot._map[1544:1552] = struct.pack("<q", 7)
    meter.look([worker])
    assert len(meter.samples) == 1


@pytest.mark.parametrize(("step", "seconds"), [(-5, 0.5), (6, float("nan")), (6, 1e308), (6, -1.0)])
def test_a_step_that_cannot_be_is_not_taken(step: int, seconds: float) -> None:
    """Nothing else looks at a worker's numbers before the agent writes them for users."""
    meter, (worker, slot) = StepMeter(), worker_with_slot(0)
    for one in (Committed(9, 1 << 62, 8, 0.5, 1.0), Committed(step, 1 << 62, 8, seconds, 1.0)):
        slot.commit(one)
        meter.look([worker])
    assert progress_line(sources(meter).status()).startswith("starting; step 9 of ")
    assert len(meter.samples) == 1


def test_a_time_that_is_yet_to_come_keeps_no_later_step_out() -> None:
    meter, (worker, slot), (broken, other) = StepMeter(), worker_with_slot(0), worker_with_slot(1)
    other.commit(Committed(1, 10, 8, 0.5, 1.0))
    other._map[1584:1592] = b"\xff" * 8
    meter.look([broken])
    slot.commit(Committed(2, 10, 16, 0.5, 1.0))
    meter.look([worker, broken])
    assert [sample.step.step for sample in meter.samples] == [2]
