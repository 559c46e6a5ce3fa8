"""A store whose waits can be ended.

gloo asks a ``torch.distributed.Store`` for its peers' addresses and waits inside
the store for the slow ones: up to the time-out for a peer that died before it
wrote its own. This wrapper polls instead, and gives up as soon as ``check``
raises, so that rendezvous is interrupted like any other wait. Polling also
keeps the one connection of a ``TCPStore`` client free for other threads: no call
here waits in the store, not even for a key that was there a moment ago, since its
owner may have deleted it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

__all__ = ["GuardedStore"]

FIRST_PAUSE = 0.0002
LONGEST_PAUSE = 0.01

_NO_VALUE = "no value"
"""No value of a key that gloo sets."""

T = TypeVar("T")


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
        """Return the value of ``key`` once it has one. Raises as :meth:`wait` does."""
        return self._polled(lambda: self._value(key), [key], self._seconds)

    def _value(self, key: str) -> bytes | None:
        """Return the value of ``key``, None if it has none: a swap that changes nothing, as ``get`` would wait."""
        found = self._store.compare_set(self._prefix + key, _NO_VALUE, _NO_VALUE)
        return None if found == _NO_VALUE.encode() else found

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check([self._prefix + key for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all ``keys`` exist. Raises what ``check`` raises, or ``TimeoutError``."""
        self._polled(lambda: self.check(keys) or None, keys, timeout.total_seconds() if timeout else self._seconds)

    def _polled(self, look: Callable[[], T | None], keys: Sequence[str], seconds: float) -> T:
        """Return what ``look`` finds, looking for ``keys`` for so many seconds."""
        deadline = time.monotonic() + seconds
        pause = FIRST_PAUSE
        while (found := look()) is None:
            self._check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"store: no {list(keys)} within the time allowed")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return found
