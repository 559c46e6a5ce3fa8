"""Signals that end a launcher while it starts, before its agent handles them.

No worker runs yet and there is nothing to save, so the launcher ends at once. Without a handler, the signal would kill
an ordinary process, whose status then does not tell a scheduler to queue the job again. The first process of a
container would not get the signal at all.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from megatron.elastic.control.exits import ExitCode

__all__ = ["EarlySignals"]

_WRITE_SECONDS = 1.0
"""Time for the last line to reach a console that may not be read."""


class EarlySignals:
    """Handles SIGTERM from its making on. The agent's own handlers replace these.

    ``elastic``: the launcher ends as a drained job does; else as a program that the signal ended.
    """

    def __init__(self, elastic: bool) -> None:
        self._elastic = elastic
        self.kill: Callable[[], None] = lambda: None
        """Kills the processes that the launcher has started so far."""
        signal.signal(signal.SIGTERM, self._end)

    def handle(self, names: Sequence[str]) -> None:
        """Handle these signals from now on, and SIGTERM only if it is among them. Ctrl-C stays Python's."""
        self.release()
        for name in names:
            if name != "SIGINT":
                signal.signal(signal.Signals[name], self._end)

    def release(self) -> None:
        """Let SIGTERM kill this process again."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _end(self, number: int, _frame: FrameType | None) -> None:
        # An exception could get lost in the code that it interrupts, so the process ends here.
        self.kill()
        code = ExitCode.DRAINED if self._elastic else 128 + number
        line = f"[launch] {signal.Signals(number).name} before the workers were started: the job ends, status {code}\n"
        writer = threading.Thread(target=os.write, args=(2, line.encode()), daemon=True)
        writer.start()
        writer.join(_WRITE_SECONDS)
        os._exit(code)
