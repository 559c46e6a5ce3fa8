"""The classification of a worker's end: an end on purpose, a loss, or the end of the job.

Also the one readable summary a loss gets in the launcher's output.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from megatron.elastic.comm.vendor.library import RESPAWN_EXIT_CODE
from megatron.elastic.control.events import Event, Finished, JobEnded, Lost
from megatron.elastic.control.exits import Ending, ExitCode, ExitReason
from megatron.elastic.control.membership import Loss
from megatron.elastic.launch.messages import say
from megatron.elastic.launch.workers.pool import Worker
from megatron.elastic.launch.workers.processes import describe_status

__all__ = ["classify", "input_error", "summarize"]

_LINES = 20
_ENDINGS: Mapping[int, Ending] = {
    ExitCode.FELL_BACK: Ending.FALL_BACK,
    ExitCode.BEGUN_ANEW: Ending.BEGIN_ANEW,
    RESPAWN_EXIT_CODE: Ending.COMMUNICATION,
}
"""Exit codes by which a worker says why it ends."""


def classify(
    worker: Worker, status: int, host: str, started: bool, elastic: bool, log_lines: Sequence[str], now: float
) -> Event:
    """The event that tells the others how ``worker`` ended. ``now``: seconds of the job.

    ``started``: members are past their set-up; an error before that would come back.
    ``elastic``: the job is meant to survive losses; without it, the first failure ends
    the job, as torchrun has it.
    """
    announced = worker.slot.finished()
    if announced is not None:
        return Finished(worker.rank, worker.incarnation, announced)
    if status == 0:
        return Finished(worker.rank, worker.incarnation, 0, announced=False)
    cause = worker.killed_for or describe_status(status)
    ending = _ending(worker, status)
    if ending is Ending.ERROR and not started:
        code = os.waitstatus_to_exitcode(status)
        return JobEnded(code, f"rank {worker.rank} on {host} failed during start-up ({cause}): the job ends")
    if not elastic:
        code = os.waitstatus_to_exitcode(status)
        code = code if code > 0 else 128 - code
        return JobEnded(code, f"rank {worker.rank} on {host} failed ({cause}): without --elastic the job ends")
    lines = tuple(worker.slot.error_text().splitlines()[-_LINES:]) or tuple(log_lines)
    step = worker.slot.look().activity.step
    return Lost((Loss(worker.rank, worker.incarnation, host, cause, lines, ending),), (step,), now)


def _ending(worker: Worker, status: int) -> Ending:
    if os.WIFSIGNALED(status) or worker.killed_for is not None:
        return Ending.KILLED
    if worker.slot.exit_reason() is ExitReason.COMMUNICATION:
        return Ending.COMMUNICATION
    return _ENDINGS.get(os.waitstatus_to_exitcode(status), Ending.ERROR)


def input_error(worker: Worker) -> str:
    """The message about bad input that ended ``worker``; empty for rank 0, which reports the same by itself."""
    words = worker.slot.error_text().splitlines()
    if worker.rank == 0 or not words or worker.slot.exit_reason() is not ExitReason.INPUT:
        return ""
    return words[-1].partition(": ")[2]


def summarize(loss: Loss, step: int) -> None:
    """Print host, rank, cause and last log lines of a loss."""
    where = f" at step {step}" if step >= 0 else ""
    life = f" (incarnation {loss.incarnation})" if loss.incarnation else ""
    say(f"lost rank {loss.rank}{life} on {loss.host}{where}: {loss.cause}", loss.last_lines)
