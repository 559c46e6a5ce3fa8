"""The embedded store as torch wants one: for communicators that meet through it (``--elastic-comm gloo``, vendors')."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from megatron.elastic.control.store import Store

__all__ = ["TorchStore"]


class TorchStore(dist.Store):
    """Keys of ``store`` below ``prefix``. ``timeout``: seconds that :meth:`get` and :meth:`wait` wait at most."""

    def __init__(self, store: Store, prefix: str, timeout: float) -> None:
        super().__init__()
        self._store, self._prefix, self._seconds = store, prefix, timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._store.put(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """The value, waited for. Raises ``TimeoutError``."""
        return self._waited(key, self._seconds)

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._store.get_many([self._prefix + key for key in keys]).values()

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all ``keys`` exist. Raises ``TimeoutError``."""
        for key in keys:
            self._waited(key, timeout.total_seconds() if timeout else self._seconds)

    def delete_key(self, key: str) -> bool:
        there = self.check([key])
        self._store.delete(self._prefix + key)
        return there

    def add(self, key: str, amount: int) -> int:
        """Add to a number that begins at 0; returns it. Atomic."""
        while True:
            present = self._store.get(self._prefix + key)
            found = int(present or 0) + amount
            if self._store.replace(self._prefix + key, present, str(found).encode()):
                return found

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set ``desired`` if the value is ``expected`` (or none, where that is empty); returns the value then. Atomic.

        As in torch's stores: of a key without a value ``expected`` is returned, unless that is empty.
        """
        while True:
            present = self._store.get(self._prefix + key)
            if present is None and expected:
                return expected.encode()
            if present is not None and present != expected.encode():
                return present
            if self._store.replace(self._prefix + key, present, desired.encode()):
                return desired.encode()

    def _waited(self, key: str, seconds: float) -> bytes:
        found = self._store.wait(self._prefix + key, seconds)
        if found is None:
            raise TimeoutError(f"store: no {key!r} within {seconds:.0f} s")
        return found
