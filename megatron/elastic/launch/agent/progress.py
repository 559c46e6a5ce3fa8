"""Lines about what an agent waits for, at growing intervals, until it has come."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.elastic.launch.messages import say

__all__ = ["waiting_for"]

_FIRST_SECONDS, _LONGEST_SECONDS = 3.0, 60.0


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Say ``waiting for WHAT (12 s)`` while the block runs: first after 3 s, at last once a minute."""
    done, began = threading.Event(), time.monotonic()

    def tell() -> None:
        pause = _FIRST_SECONDS
        while not done.wait(pause):
            say(f"waiting for {what} ({time.monotonic() - began:.0f} s)")
            pause = min(2 * pause, _LONGEST_SECONDS)

    thread = threading.Thread(target=tell, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
