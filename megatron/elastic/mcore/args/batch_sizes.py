"""Megatron's schedule of batch sizes as a pure function of consumed samples.

Megatron keeps one calculator a process, whose value is that of the newest update. A recovery asks for the size of a
step that Megatron's loop has left behind, and a newcomer for one that its loop has not come to. So the engine has a
copy of its own, which is updated at each question.

Invariant: the answer depends on the flags and the number of samples alone, so every rank plans for the same batch.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron.core import num_microbatches_calculator

__all__ = ["BatchSizes"]

_ALL = 1 << 62
"""More samples than any run consumes: the size of a schedule's last step."""


class BatchSizes:
    """The sizes of ``calculator``, or of the one that Megatron made from its flags."""

    def __init__(self, calculator: Any = None) -> None:
        found = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR if calculator is None else calculator
        self._calculator = copy.deepcopy(found)
        self._calculator.rank = -1  # the process's own calculator logs the changes

    def __call__(self, consumed: int) -> int:
        """Return the number of samples of the step that follows ``consumed`` ones."""
        self._calculator.update(consumed, consistency_check=False)
        return int(self._calculator.get_current_running_global_batch_size())

    @property
    def largest(self) -> int:
        """The number of samples of the largest step."""
        steps = getattr(self._calculator, "schedule", ())  # of --step-batch-size-schedule: it need not grow
        return max((self(_ALL), *(int(size) for _, size in steps)))
