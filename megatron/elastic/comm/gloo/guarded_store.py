"""A store whose waits can be ended.

gloo asks a ``torch.distributed.Store`` for its peers' addresses and waits inside
the store for the slow ones: up to the time-out for a peer that died before it
wrote its own. This wrapper polls instead, and gives up as soon as ``check``
raises, so that rendezvous is interrupted like any other wait. Polling also
keeps the one connection of a ``TCPStore`` client free for other threads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

__all__ = ["GuardedStore"]

FIRST_PAUSE = 0.0002
LONGEST_PAUSE = 0.01


class GuardedStore(dist.Store):
    """Keys of ``store`` under ``prefix``; ``check()`` raises when waiting is pointless.

    ``written``: takes the keys that are set, with the prefix, so that its owner can delete them.
    """

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        check: Callable[[], None],
        timeout: float,
        written: deque[str] | None = None,
    ) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._check = check
        self._seconds = timeout
        self._written = deque[str]() if written is None else written

    def set(self, key: str, value: str | bytes) -> None:
        self._written.append(self._prefix + key)
        self._store.set(self._prefix + key, value)  # type: ignore[arg-type]  # bytes are taken too

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._prefix + key)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check([self._prefix + key for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all ``keys`` exist. Raises what ``check`` raises, or ``TimeoutError``."""
        deadline = time.monotonic() + (timeout.total_seconds() if timeout else self._seconds)
        pause = FIRST_PAUSE
        while not self.check(keys):
            self._check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"store: no {list(keys)} within the time allowed")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
