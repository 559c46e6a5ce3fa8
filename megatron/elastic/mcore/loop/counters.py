"""Where Megatron's loop stands, for a rank that comes later and begins in the middle of it.

The loop keeps some counts in arguments, which change as it goes; others it takes from
arguments once, into variables of its own, and the arguments go on saying where the job
started. A newcomer's loop has to begin with the newest step, its arguments (a checkpoint
has them in it) have to say what everybody's say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
"""Arguments that the loop changes as it goes, or has from a checkpoint."""

_STARTS = ("iteration", "num_floating_point_operations_so_far")
"""Those of them that it only starts from."""


class Counters:
    """Of one process. A job begins with :meth:`begin`, a newcomer with :meth:`take`."""

    def __init__(self) -> None:
        self._at_step: dict[str, Any] = {}
        self._operations: float = 0
        self._job_started: dict[str, Any] = {}
        """What this newcomer's arguments are to say once its loop has started from them."""

    def told(self) -> Mapping[str, Any]:
        """Where the loop stood when the present step began: whoever comes begins with it, or its end."""
        return self._at_step

    def begin(self) -> None:
        """The job's loop is about to start."""
        args = get_args()
        self._operations = args.num_floating_point_operations_so_far
        self._note(args.iteration)

    def take(self, told: Mapping[str, Any]) -> None:
        """A newcomer's loop is about to start."""
        args = get_args()
        for name, value in {**told["arguments"], **told["loop"]}.items():
            setattr(args, name, value)
        self._job_started = {name: told["arguments"][name] for name in _STARTS}
        self._operations, self._at_step = args.num_floating_point_operations_so_far, dict(told)

    def step(self) -> None:
        """A step is about to begin."""
        args = get_args()
        for name, value in self._job_started.items():
            setattr(args, name, value)
        self._job_started = {}
        self._note(args.curr_iteration)

    def boundary(self, operations: float) -> None:
        """A step is over; ``operations``: floating-point operations so far, as the loop counts them."""
        self._operations = operations

    def _note(self, iteration: int) -> None:
        args = get_args()
        loop = dict(zip(_STARTS, (iteration, self._operations), strict=True))
        self._at_step = {"arguments": {name: getattr(args, name, None) for name in _ARGUMENTS}, "loop": loop}
