"""The counters of Megatron's loop, for a newcomer that begins in the middle of it.

The loop keeps some counters in arguments, which change as it runs. It reads others from
arguments once, into variables of its own, and these arguments keep the values of the job's
start. A newcomer's loop has to begin with the newest step, but its arguments (which
checkpoints contain) have to equal those of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.training import get_args

__all__ = ["Counters"]

_ARGUMENTS = (
    "curr_iteration",
    "iteration",
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
    "num_floating_point_operations_so_far",
    "do_train",
    "do_valid",
    "do_test",
)
"""Arguments that the loop changes as it runs, or takes from a checkpoint."""

_STARTS = ("iteration", "num_floating_point_operations_so_far")
"""Those of them that it reads once, at its start."""


class Counters:
    """The counters of one process. A job begins with :meth:`begin`, a newcomer with :meth:`take`."""

    def __init__(self) -> None:
        self._at_step: dict[str, Any] = {}
        self._operations: float = 0
        self._next: int = 0
        """Iteration of the loop's next step. The loop tells it in an argument, but not before a step it leaves out."""
        self._job_started: dict[str, Any] = {}
        """Values that a newcomer's arguments get once its loop has started from them."""

    def for_newcomer(self) -> Mapping[str, Any]:
        """Return the counters at the begin of the present step, with which a newcomer begins."""
        return self._at_step

    def begin(self) -> None:
        """Note the counters when the job's loop is about to start."""
        args = get_args()
        self._operations, self._next = args.num_floating_point_operations_so_far, args.iteration
        self._note(args.iteration)

    def take(self, shared: Mapping[str, Any]) -> None:
        """Set a newcomer's counters when its loop is about to start."""
        args = get_args()
        for name, value in {**shared["arguments"], **shared["loop"]}.items():
            setattr(args, name, value)
        self._job_started = {name: shared["arguments"][name] for name in _STARTS}
        self._operations, self._next = args.num_floating_point_operations_so_far, args.iteration
        self._at_step = dict(shared)
        # The loop saves a checkpoint where the size of the batch changes, and the members have passed this place.
        update_num_microbatches(args.consumed_train_samples, consistency_check=False)

    def step(self) -> None:
        """Note the counters when a step is about to begin."""
        args = get_args()
        for name, value in self._job_started.items():
            setattr(args, name, value)
        self._job_started = {}
        self._note(self._next)
        self._next += 1

    def boundary(self, operations: float) -> None:
        """Note the end of a step; ``operations``: floating-point operations so far, as counted by the loop."""
        self._operations = operations

    def _note(self, iteration: int) -> None:
        args = get_args()
        loop = dict(zip(_STARTS, (iteration, self._operations), strict=True))
        self._at_step = {"arguments": {name: getattr(args, name, None) for name in _ARGUMENTS}, "loop": loop}
