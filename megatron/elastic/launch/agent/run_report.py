"""The launcher's own report of a run: now and then a line of progress in a terminal, and a summary at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from megatron.elastic.control.status_text import duration, progress_line, summary_lines
from megatron.elastic.launch.agent.admin import Sources
from megatron.elastic.launch.messages import say

__all__ = ["RunReport"]

_FIRST_SECONDS, _LONGEST_SECONDS = 5.0, 60.0


class RunReport:
    """For one agent; only the one that coordinates the job is to call it. ``now``: monotonic seconds.

    A line of progress is written only where the launcher's messages go to a terminal (``terminal``): a log file has
    the training log. It comes 5 s after the first step, and then at growing intervals, at last once a minute.
    """

    def __init__(
        self,
        sources: Sources,
        terminal: bool | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources, self._now = sources, now
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._pause = _FIRST_SECONDS
        self._next: float | None = None
        self._summarized = False

    def beat(self) -> None:
        """Write the line of progress if it is due."""
        if not self._terminal or self._sources.history.first_step < 0:
            return
        now = self._now()
        if self._next is None:
            self._next = now + self._pause
        elif now >= self._next:
            self._pause = min(2 * self._pause, _LONGEST_SECONDS)
            self._next = now + self._pause
            say(progress_line(self._sources.status()))

    def end(self, code: int) -> None:
        """Write the summary, once. ``code``: the launcher's exit status. A job that did not begin has none."""
        past = self._sources.history
        if self._summarized or (past.first_step < 0 and not past.losses):
            return
        self._summarized = True
        status = self._sources.status()
        say(
            f"job {status.run_id} ends with exit status {code} after {duration(status.job_s)}",
            summary_lines(status),
        )
