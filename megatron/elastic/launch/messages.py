"""The launcher's own lines on the console."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from megatron.elastic.platform.threads import OS_THREADS, Threads

__all__ = ["say", "waiting_for"]

_FIRST_SECONDS, _LONGEST_SECONDS = 3.0, 60.0


def say(text: str, lines: Sequence[str] = ()) -> None:
    """One line of the launcher's own, with others indented below.

    Written at once, so that agents do not mix; a console that is gone does not end the job.
    """
    body = "".join(f"    | {line}\n" for line in lines)
    with suppress(OSError, ValueError):
        sys.stderr.write(f"[launch] {text}\n{body}")
        sys.stderr.flush()


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
