"""One collective in flight on a gloo group, with errors as types and results put in place.

A tensor that gloo cannot take as it is (not contiguous, a type it cannot add, an average) travels as a copy.
``finish`` writes the result back only after the transfer, so that an aborted collective leaves no late write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import CommError

__all__ = ["GlooWork", "UntilDone", "Waits"]

_WITHOUT_END = timedelta(days=1)
"""gloo takes no wait without a time."""


class Waits(Protocol):
    """The part of its fabric that a work needs."""

    def waiting(self, peers: tuple[int, ...], generation: int) -> AbstractContextManager[None]:
        """Publish, for as long as it lasts, that this thread is blocked on ``peers`` in ``generation``."""

    def void(self, generation: int) -> bool:
        """True if no operation begun in ``generation`` can arrive any more."""

    def translate(self, error: BaseException, peers: tuple[int, ...], generation: int, seconds: float) -> CommError:
        """The typed form of gloo's ``RuntimeError``."""


UntilDone = Callable[[dist.Work, timedelta, Callable[[], bool]], None]
"""Returns when a work is done, within a time; ends early when the last argument says that it is void."""


class GlooWork(dist.Work):
    """``inner`` works of one operation that began in ``generation`` and waits for global ranks ``peers``.

    ``until_done`` waits for one of them (:mod:`megatron.elastic.comm.gloo.wait`).
    """

    def __init__(
        self,
        waits: Waits,
        until_done: UntilDone,
        inner: Sequence[dist.Work],
        peers: tuple[int, ...],
        generation: int,
        seconds: float,
        result: list[torch.Tensor],
        finish: Callable[[], None] | None = None,
        source: Callable[[], int] | None = None,
    ) -> None:
        super().__init__()
        self._waits = waits
        self._until_done = until_done
        self._inner = list(inner)
        self._peers = peers
        self._generation = generation
        self._seconds = seconds
        self._result = result
        self._finish = finish
        self._source = source
        self._error: CommError | None = None
        self._done = False
        self._once = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done. Raises ``PeerLost``, ``GenerationChanged`` or ``CommTimeout``."""
        if not self._is_over():
            with self._waits.waiting(self._peers, self._generation):
                allowed = timeout or timedelta(seconds=self._seconds)
                self._await(allowed, lambda: self._waits.void(self._generation))
        return True

    def wait_unless(self, void: Callable[[], bool]) -> bool:
        """Return True when done, False once ``void()`` holds. For threads beside the step: no wait is published.

        However long it takes: the peer may be busy with a slow disk.
        """
        try:
            if not void() and not self._is_over():
                self._await(_WITHOUT_END, lambda: void() or self._waits.void(self._generation))
        except CommError:
            if not void():
                raise
        return not void()

    def _is_over(self) -> bool:
        """Return whether it is done. Raises its error if it has failed."""
        if self._error is not None:
            raise self._error
        return self._done

    def _await(self, allowed: timedelta, void: Callable[[], bool]) -> None:
        try:
            for work in self._inner:
                self._until_done(work, allowed, void)
        except CommError as error:
            self._error = error
            raise
        except (RuntimeError, TimeoutError) as error:
            seconds = allowed.total_seconds()
            self._error = self._waits.translate(error, self._peers, self._generation, seconds)
            raise self._error from error
        self._complete()

    def is_completed(self) -> bool:
        return self._done or self._error is not None or all(work.is_completed() for work in self._inner)

    def is_success(self) -> bool:
        return self._error is None and all(work.is_completed() and work.is_success() for work in self._inner)

    def exception(self) -> BaseException | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._result

    def source_rank(self) -> int:
        """Group rank a ``recv_anysource`` was served by."""
        if self._source is None:
            raise RuntimeError("source_rank() is for works of recv_anysource")
        return self._source()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result; completed by gloo's thread, also when no thread waits."""
        futures = [work.get_future() for work in self._inner]
        return torch.futures.collect_all(futures).then(self._settle)

    def _settle(self, all_done: torch.futures.Future[list[torch.futures.Future[Any]]]) -> list[torch.Tensor]:
        try:
            for future in all_done.value():
                future.value()
        except RuntimeError as error:
            self._error = self._waits.translate(error, self._peers, self._generation, self._seconds)
            raise self._error from error
        self._complete()
        return self._result

    def _complete(self) -> None:
        with self._once:
            if not self._done and self._finish is not None:
                self._finish()
            self._done = True
