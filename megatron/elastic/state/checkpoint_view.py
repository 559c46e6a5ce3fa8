"""The state of one version, read while training goes on: copy on write, block by block.

A view is opened at a step boundary. A writer thread reads block after block. Before the
training thread updates a block that is not read yet, it copies the old contents. So
training never waits for the disk. The extra memory is that of blocks updated before they
were read, at most one more copy of the written state.

A change of generation abandons the view and the write (:meth:`CheckpointView.abandon`):
a checkpoint counts only once it is renamed into place.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from megatron.elastic.state.block_copy import BlockCopy
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.pool import StateError, StatePool
from megatron.elastic.state.record import StepRecord

__all__ = ["CheckpointView", "ViewAbandoned"]


class ViewAbandoned(RuntimeError):
    """The view is void: a new generation began, or the view was closed."""


class CheckpointView:
    """Blocks ``keys`` of ``pool`` at their present version. Open and close on the training thread; read on any."""

    def __init__(self, pool: StatePool, keys: Iterable[BlockKey], record: StepRecord) -> None:
        self.record = record
        self._pool = pool
        self._lock = threading.Lock()
        self._unread = set(keys)
        self._aside: dict[BlockKey, torch.Tensor] = {}
        self._why: str | None = None
        behind = {key: pool.get(key).version for key in self._unread if pool.get(key).version != record.version}
        if behind:
            raise StateError(f"rank {pool.rank}: a view of version {record.version} while blocks are at {behind}")
        self._remove = pool.add_guard(self._around_change)

    @property
    def bytes_aside(self) -> int:
        """Bytes of copied old contents that are not read yet."""
        with self._lock:
            return sum(state.numel() * state.element_size() for state in self._aside.values())

    def read(self, key: BlockKey) -> torch.Tensor:
        """Return the state of a block, fp32 [3, numel], at the view's version; each block once.

        Raises :class:`ViewAbandoned`, ``KeyError`` for a block that is not in the view or was read already.
        """
        with self._lock:
            if self._why is not None:
                raise ViewAbandoned(self._why)
            self._unread.remove(key)
            state = self._aside.pop(key, None)
            if state is None:
                state = self._pool.get(key).made.host_clone()
            if not self._unread:
                self._detach()
        return state

    def abandon(self, why: str) -> None:
        """Release all blocks; later reads raise. Idempotent."""
        with self._lock:
            if self._unread:
                self._why = self._why or why
            self._unread.clear()
            self._aside.clear()
            self._detach()

    def __enter__(self) -> CheckpointView:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abandon("the view was closed")

    def _detach(self) -> None:
        self._remove()
        self._remove = lambda: None

    @contextmanager
    def _around_change(self, copy: BlockCopy, record: StepRecord | None) -> Iterator[None]:
        """Copy the old contents of an unread block before it changes; a skipped step changes none."""
        key = copy.block.key
        with self._lock:
            unread = key in self._unread and key not in self._aside and self._pool.get(key) is copy
            if unread and not (record is not None and record.skipped):
                self._aside[key] = copy.made.host_clone()
            yield
