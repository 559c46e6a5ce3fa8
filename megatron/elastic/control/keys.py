"""The embedded store's content: keys and values in the memory of the first agent, for its threads and its server."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from megatron.elastic.control.store import Store

__all__ = ["Keys", "LocalStore"]

Waiter = Callable[[bytes], None]


class Keys:
    """Values under keys, and calls to be made when a key is set. For any number of threads; nothing here blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[Waiter]] = {}

    def put(self, key: str, value: bytes) -> None:
        """Set ``key``; calls that wait for it are made, on this thread."""
        with self._lock:
            self._values[key] = value
            waiting = self._waiting.pop(key, ())
        for call in waiting:
            call(value)

    def get(self, key: str) -> bytes | None:
        """The value, or None."""
        return self._values.get(key)

    def replace(self, key: str, old: bytes | None, new: bytes) -> bytes | None:
        """Set ``key`` to ``new`` if it holds ``old`` (None: nothing); returns the value it holds then."""
        with self._lock:
            present = self._values.get(key)
            if present != old:
                return present
            self._values[key] = new
            waiting = self._waiting.pop(key, ())
        for call in waiting:
            call(new)
        return new

    def delete(self, key: str) -> None:
        """Remove ``key`` if it is there."""
        with self._lock:
            self._values.pop(key, None)

    def when(self, key: str, call: Waiter) -> bytes | None:
        """The value if ``key`` is there; otherwise None, and ``call`` is made once, by the thread that sets it."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                self._waiting.setdefault(key, []).append(call)
            return found

    def forget(self, key: str, call: Waiter) -> None:
        """``call`` waits no longer, if it still did."""
        with self._lock:
            waiting = self._waiting.get(key, [])
            if call in waiting:
                waiting.remove(call)
            if not waiting:
                self._waiting.pop(key, None)


class LocalStore(Store):
    """The store in the process that keeps it: asking it takes no time."""

    server = True
    embedded = True

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    @property
    def keeper(self) -> str:
        return "this agent, which holds the store,"

    def put(self, key: str, value: bytes) -> None:
        self._keys.put(key, value)

    def get(self, key: str) -> bytes | None:
        return self._keys.get(key)

    def get_many(self, keys: Sequence[str]) -> dict[str, bytes | None]:
        return {key: self._keys.get(key) for key in keys}

    def create(self, key: str, value: bytes) -> bytes:
        found = self._keys.replace(key, None, value)
        assert found is not None
        return found

    def replace(self, key: str, old: bytes | None, new: bytes) -> bool:
        return self._keys.replace(key, old, new) == new

    def wait(self, key: str, timeout: float) -> bytes | None:
        came: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        found = self._keys.when(key, came.put)
        if found is not None:
            return found
        try:
            return came.get(timeout=max(0.0, timeout))
        except queue.Empty:
            self._keys.forget(key, came.put)
            return None

    def delete(self, key: str) -> None:
        self._keys.delete(key)

    def clone(self) -> LocalStore:
        return self
