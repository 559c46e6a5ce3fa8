"""Connecting one gloo group without stopping other ranks.

gloo's constructor returns when every member is connected. So each group is
built by a thread of its own: members may make their groups in any order, and a
member that makes one late delays only the ranks that use it. A build that an edit
has overtaken ends by itself: its store refuses to wait any longer.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.gloo.seating import Seating

__all__ = ["Build", "bury"]


class Build:
    """A gloo group being connected, then connected (``inner``) or failed (``error``)."""

    def __init__(self, seating: Seating) -> None:
        self.seating = seating
        self.ready = threading.Event()
        self.inner: Any = None
        self.error: BaseException | None = None
        self._store: dist.Store | None = None
        self._lock = threading.Lock()
        self._dropped = False

    def start(self, store: dist.Store, device: Any, timeout: float, threads: int) -> None:
        """Connect over ``store``'s keys; on a thread when there is a rank to wait for."""
        self._store = store  # torch keeps only the C++ half of a Python store
        options = cast(Any, dist.ProcessGroupGloo)._Options()
        options._devices = [device]
        options._timeout = timedelta(seconds=timeout)
        options._threads = threads
        if len(self.seating.living) == 1:
            self._connect(store, options)
        else:
            threading.Thread(target=self._connect, args=(store, options), name="elastic-build", daemon=True).start()

    def _connect(self, store: dist.Store, options: Any) -> None:
        living, own = self.seating.living, self.seating.own
        try:
            if len(living) > 1:
                self._gather(store)
            inner = dist.ProcessGroupGloo(store, own, len(living), options)
            with self._lock:
                if not self._dropped:
                    self.inner = inner
        except (CommError, RuntimeError, TimeoutError) as error:
            self.error = error
        self.ready.set()

    def _gather(self, store: dist.Store) -> None:
        """Enter gloo only when all members are about to: what waits inside it cannot be woken."""
        living = self.seating.living
        store.set(f"here/{self.seating.own}", "")
        store.wait([f"here/{index}" for index in range(len(living))], timedelta(days=365))

    def drop(self) -> None:
        """Destroy the gloo group, now or as soon as it is there. May take until its works have failed."""
        with self._lock:
            self._dropped = True
            self.inner = None  # before the store, which gloo's threads may still ask


def bury(builds: list[Build]) -> None:
    """Drop ``builds`` aside."""

    def run() -> None:
        while builds:
            builds.pop().drop()

    if builds:
        threading.Thread(target=run, name="elastic-bury", daemon=True).start()
