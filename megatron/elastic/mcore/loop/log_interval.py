"""Megatron's sums since its last log line, for a newcomer that may print the next one.

With ``--log-interval`` above 1 a line has the mean loss of the interval, its skipped steps, and its time. Each rank
adds them up by itself, and the highest living rank prints. So a newcomer goes on with the sums of the members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.training import get_timers

__all__ = ["LogInterval", "numbers"]

_TIMER = "interval-time"


class LogInterval:
    """The sums of one process, as of the begin of the present step."""

    def __init__(self) -> None:
        self._sums: Mapping[str, Any] = {}
        self._at_step: Mapping[str, Any] = {}
        self.first = True
        """True until the job's first step has been logged; Megatron prints a line of it, whatever the interval."""
        self._first_at_step = True
        self._told: Mapping[str, Any] | None = None
        """Sums and seconds that members told this newcomer, until its loop has its first step behind it."""
        self._times: Mapping[str, float] | None = None
        """While a line is under way: the seconds of Megatron's timers before it."""

    def for_newcomer(self) -> Mapping[str, Any]:
        """Return the sums at the begin of the present step, and the seconds since the last line."""
        if self._times is not None:
            self.restore_times()  # a newcomer that takes part in the line, too, prints the time before it
        seconds = 0.0 if self._told is None else float(self._told["seconds"])
        return {"sums": numbers(self._at_step), "seconds": seconds + _elapsed(), "first": self._first_at_step}

    def take(self, told: Mapping[str, Any]) -> None:
        """Note what members told this newcomer."""
        self._told = told
        self._sums = self._at_step = _of_message(told["sums"])
        self.first = self._first_at_step = told["first"]

    def step(self) -> None:
        """Note that a step is about to begin."""
        self._at_step, self._first_at_step = self._sums, self.first

    def before_log(self, sums: dict[str, Any]) -> None:
        """Add what a newcomer was told to ``sums``, which its loop has begun with nothing."""
        told, self._told = self._told, None
        if told is None:
            return
        sums.update(self._sums)
        timer = get_timers()(_TIMER, log_level=0)
        timer.set_elapsed(timer.elapsed(reset=False) + float(told["seconds"]))

    def pass_line(self, sums: dict[str, Any], after: Mapping[str, tuple[float, float]]) -> None:
        """Set ``sums`` to those of the members ``after`` a line that was over when this newcomer was admitted.

        They are 0, but not after the job's first line, which resets nothing.
        """
        sums.clear()
        sums.update(_of_message(after))
        if not self.first:
            get_timers()(_TIMER, log_level=0).elapsed(reset=True)

    def after_log(self, sums: Mapping[str, Any]) -> None:
        """Note the sums that the loop goes on with."""
        self._sums, self.first, self._times = dict(sums), False, None

    def begin_line(self) -> None:
        """Note the times before a line, which reads the timers and has them begin anew."""
        # A timer that runs is stopped and started again, so its seconds so far are those noted here.
        self._times = {name: float(timer.elapsed(reset=False)) for name, timer in _timers().items()}

    def restore_times(self) -> None:
        """Have the timers go on as if the line under way had not read them."""
        times = self._times or {}
        for name, timer in _timers().items():
            timer.set_elapsed(times.get(name, 0.0))


def numbers(sums: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return ``sums`` for a message: name → (sum, 1 if it is a count, else 0)."""
    return {name: (float(value), float(isinstance(value, int))) for name, value in sums.items()}


def _of_message(told: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the sums of a message in the types that Megatron's loop has."""
    device = torch.device(torch.cuda.current_device())
    return {
        name: int(value) if count else torch.tensor([value], dtype=torch.float32, device=device)
        for name, (value, count) in told.items()
    }


def _elapsed() -> float:
    """Return the seconds that the loop's timer has run since the last line."""
    return float(get_timers()(_TIMER, log_level=0).elapsed(reset=False))


def _timers() -> Mapping[str, Any]:
    timers: Mapping[str, Any] = get_timers()._timers
    return timers
