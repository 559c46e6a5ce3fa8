"""Calls of a vendor's library that may not return: each runs in a thread of its own, which its caller can leave.

A call that connects members returns when all of them have come, so a member that dies holds it up. No library ends such
a call from outside. NCCL aborts only a communicator whose calls do not block, which starts a thread for each operation
(``src/group.cc``). HCCL waits for ``HCCL_CONNECT_TIMEOUT``. So a caller whose generation is over goes on at once and
leaves the thread behind (:func:`connected`).

Invariant: what such a thread uses or makes is used by no other thread. It gives that back itself, should the library
return.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from megatron.elastic.comm.vendor.library import VendorHang, VendorInterrupted

__all__ = ["bounded", "connected"]

T = TypeVar("T")
LOOK_SECONDS = 0.005
"""Time between two looks whether a caller that waits for others has been interrupted."""


class _Call(Generic[T]):
    """An ``action`` in a thread. ``left``: run there if the caller has gone on, with the result, None if it failed."""

    def __init__(self, action: Callable[[], T], what: str, left: Callable[[T | None], None]) -> None:
        self.over = threading.Event()
        self._action, self._give_back = action, left
        self._lock = threading.Lock()  # the call is over or it is left behind, whichever comes first
        self._left = False
        self._result: list[T] = []
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, name=f"elastic-vendor-{what}", daemon=True).start()

    def leave(self) -> bool:
        """Return True if the thread is left behind now, False if the call is over."""
        with self._lock:
            self._left = not self.over.is_set()
            return self._left

    def result(self) -> T:
        """The result of a call that is over. Raises what it raised."""
        if self._failure is not None:
            raise self._failure
        return self._result[0]

    def _run(self) -> None:
        try:
            self._result.append(self._action())
        except BaseException as failure:  # raised again by the caller
            self._failure = failure
        with self._lock:
            self.over.set()
            left = self._left
        if left:
            self._give_back(self._result[0] if self._result else None)


def bounded(action: Callable[[], T], seconds: float, what: str) -> T:
    """``action()`` in a helper thread. Raises :class:`VendorHang` when it takes longer than ``seconds``."""
    call = _Call(action, what, lambda _: None)
    if not call.over.wait(seconds) and call.leave():
        raise VendorHang(f"{what} did not return within {seconds:.3g} s")
    return call.result()


def connected(
    action: Callable[[], T],
    seconds: float,
    what: str,
    interrupted: Callable[[], bool],
    left: Callable[[T | None], None],
) -> T:
    """``action()``, which waits for other ranks, in a helper thread.

    Raises :class:`VendorInterrupted` once ``interrupted()``, :class:`VendorHang` when it takes longer than ``seconds``.
    Then the thread is left behind: when the call returns there, ``left`` is run with what it made, None if it failed.
    """
    call, end = _Call(action, what, left), time.monotonic() + seconds
    while not call.over.wait(LOOK_SECONDS):
        if interrupted() and call.leave():
            raise VendorInterrupted(f"{what}: the members changed before all had come")
        if time.monotonic() > end and call.leave():
            raise VendorHang(f"{what} did not return within {seconds:.3g} s")
    return call.result()
