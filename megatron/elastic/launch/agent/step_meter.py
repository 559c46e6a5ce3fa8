"""The steps that the workers of one node commit, as their slots show them now and then.

All ranks commit the same steps, so one node's workers are enough. The meter only reads memory: a worker that hangs
delays nothing. A step that is shorter than the time between two looks may be missing among the samples. Numbers that
cannot be true are left out: a slot is memory that a broken worker may write anything to.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.elastic.control.membership import Committed
from megatron.elastic.launch.workers.pool import Worker

__all__ = ["StepMeter", "StepSample"]

_SAMPLES = 1200
_WINDOW_SECONDS = 60.0


@dataclass(frozen=True)
class StepSample:
    """One committed step. ``at``: when, in seconds of this machine's monotonic clock."""

    at: float
    step: Committed


class StepMeter:
    """The newest samples, in the order of their commits."""

    def __init__(self) -> None:
        self.samples: deque[StepSample] = deque(maxlen=_SAMPLES)

    @property
    def newest(self) -> Committed | None:
        """The newest committed step; None before the first."""
        return self.samples[-1].step if self.samples else None

    def look(self, workers: Iterable[Worker]) -> None:
        """Take the newest step of ``workers``, if it is a new one."""
        found = [one for worker in workers if (one := worker.slot.committed()) is not None]
        now = time.monotonic_ns()
        shown = [one for one in found if _is_possible(*one, now)]
        if not shown:
            return
        step, stamp = max(shown, key=lambda one: one[1])
        before = self.samples[-1] if self.samples else None
        if before is None or (before.step.step != step.step and stamp / 1e9 > before.at):
            self.samples.append(StepSample(stamp / 1e9, step))

    def _window(self) -> list[StepSample]:
        """Return the samples of the last minute of steps, newest first, none before a return to a checkpoint."""
        found: list[StepSample] = []
        for sample in reversed(self.samples):
            if found and (found[0].at - sample.at > _WINDOW_SECONDS or sample.step.step > found[-1].step.step):
                break
            found.append(sample)
        return found

    def duration(self) -> float | None:
        """Mean seconds of a step over the last minute of steps, without saves, evaluations and waits between them."""
        seconds = [one.step.seconds for one in self._window() if math.isfinite(one.step.seconds)]
        return sum(seconds) / len(seconds) if seconds else None

    def rate(self) -> float | None:
        """Steps a second, over the last minute of steps and all that lay between; None before the second step."""
        if len(self.samples) < 2:
            return None
        window = self._window()
        first, last = window[-1], window[0]
        steps, seconds = last.step.step - first.step.step, last.at - first.at
        if steps <= 0 or seconds <= 0.0:  # one step in the last minute
            duration = last.step.seconds
            return 1.0 / duration if math.isfinite(duration) and duration > 0.0 else None
        return steps / seconds


def _is_possible(step: Committed, stamp: int, now: int) -> bool:
    """Return whether a step can have been committed at ``stamp``, in ns of the clock that counts since the boot."""
    return step.step >= 0 and stamp <= now and 0.0 <= step.seconds <= stamp / 1e9
