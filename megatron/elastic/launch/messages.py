"""The launcher's own lines on the console.

A console may not be read for a while: its user has paused it, or it is a file of a file system that hangs. Writing to
it then blocks. So the launcher has a thread of its own for it (:meth:`Console.write_apart`), and no caller waits.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from megatron.elastic.platform.threads import OS_THREADS, Threads

__all__ = ["CONSOLE", "Console", "say", "waiting_for"]

_FIRST_SECONDS, _LONGEST_SECONDS = 3.0, 60.0
_FLUSH_SECONDS = 5.0
_MOST = 1000
"""Messages that wait for a console that is not read."""


class Console:
    """Writes messages in their order: at once, and after :meth:`write_apart` on a thread.

    While ``most`` messages wait for that thread, it drops the newest, and tells their number later.
    """

    def __init__(self, write: Callable[[str], None], most: int = _MOST, threads: Threads = OS_THREADS) -> None:
        self._write, self._most, self._threads = write, most, threads
        self._changed = threads.condition()
        self._waiting: deque[str] = deque()
        self._dropped = 0
        self._apart = self._writing = False

    def write_apart(self) -> None:
        """Start the thread. A process that is forked later does not have it. Later calls change nothing."""
        if not self._apart:
            self._apart = True
            self._threads.start("console", self._run)

    def put(self, text: str) -> None:
        """Write ``text``, one or more whole lines."""
        if not self._apart:
            self._write(text)
            return
        with self._changed:
            if len(self._waiting) >= self._most:
                self._dropped += 1
                return
            self._tell_dropped()
            self._waiting.append(text)
            self._changed.notify_all()

    def flush(self, seconds: float = _FLUSH_SECONDS) -> None:
        """Have the console, and standard output too, take what was written; give up after ``seconds``."""
        end, done = self._threads.monotonic() + seconds, self._threads.event()

        def flush_streams() -> None:
            with suppress(OSError, ValueError):
                sys.stderr.flush()
                sys.stdout.flush()
            done.set()

        with self._changed:
            while (self._waiting or self._writing) and self._threads.monotonic() < end:
                self._changed.wait(end - self._threads.monotonic())
        self._threads.start("flush", flush_streams)
        done.wait(max(0.0, end - self._threads.monotonic()))

    def _tell_dropped(self) -> None:
        if self._dropped:
            self._waiting.append(f"[launch] {self._dropped} messages were dropped: the console was not read\n")
            self._dropped = 0

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                if not self._waiting:
                    self._tell_dropped()
                while not self._waiting:
                    self._changed.notify_all()
                    self._changed.wait()
                text, self._writing = self._waiting.popleft(), True
            self._write(text)


def _write_now(text: str) -> None:
    """Write in one piece, so that agents do not mix; a console that is gone does not end the job."""
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


CONSOLE = Console(_write_now)
"""This launcher's standard error."""


def say(text: str, lines: Sequence[str] = ()) -> None:
    """One line of the launcher's own, with others indented below."""
    body = "".join(f"    | {line}\n" for line in lines)
    CONSOLE.put(f"[launch] {text}\n{body}")


@contextmanager
def waiting_for(what: str, threads: Threads = OS_THREADS) -> Iterator[None]:
    """Say ``waiting for WHAT (12 s)`` while the block runs: first after 3 s, at last once a minute."""
    done, began = threads.event(), threads.monotonic()

    def tell() -> None:
        pause = _FIRST_SECONDS
        while not done.wait(pause):
            say(f"waiting for {what} ({threads.monotonic() - began:.0f} s)")
            pause = min(2 * pause, _LONGEST_SECONDS)

    thread = threads.start("waiting", tell)
    try:
        yield
    finally:
        done.set()
        thread.join()
