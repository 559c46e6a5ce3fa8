"""Copies move between host and device when their role changes, beside steps.

Owned blocks belong into device memory, mirrors into host memory. A mirror that becomes owner is stepped where it lies,
so no recovery waits for a transfer; a thread then moves it, one block at a time, while steps go on. A former owner's
copy goes the other way.

Invariants
- A copy moves inside the guard of its changes: it has one version in either place, and moves before or after a step,
  never during one. The training thread waits for one block at most. The guard is on the pool only while copies move.
- Memory is reserved by the training thread (:mod:`device_place`), and only as much as is free beyond what the
  allocator holds for the work of a step. Blocks that do not fit stay on the host, where they are stepped as well. That
  may be one whose bytes are free: allocators take memory in larger pieces, and other ranks take it meanwhile.
- A role that changes while copies move voids what has not moved yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch

from megatron.elastic.platform.threads import OS_THREADS, Running, Threads
from megatron.elastic.state.block_copy import BlockCopy
from megatron.elastic.state.device_place import DevicePlace, Reserved
from megatron.elastic.state.layout import BlockKey, StateBlock
from megatron.elastic.state.place import HOST, BlockStore
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import StepRecord

__all__ = ["Relocation"]

_PAUSE = 0.0005
"""Seconds between two looks whether the training thread still changes copies."""


class Relocation:
    """The moves of one rank's copies (module docstring). Methods are for the training thread.

    ``free``: returns the free bytes of device memory; ``say``: prints a line for the user.
    """

    def __init__(
        self,
        pool: StatePool,
        place: DevicePlace,
        free: Callable[[], int],
        say: Callable[[str], None],
        threads: Threads = OS_THREADS,
    ) -> None:
        self._pool, self._place, self._free, self._say, self._threads = pool, place, free, say, threads
        self._lock = threading.Lock()  # over the moves, and while a copy changes or moves
        self._waiting: dict[BlockKey, Reserved | None] = {}
        """Blocks to move, in order: into this memory, or (None) to the host."""
        self._changing = False
        """True while the training thread changes a copy or waits to."""
        self._thread: Running | None = None
        self._running = False
        self._owned: tuple[StateBlock, ...] | None = None
        self._short = False
        """True if the user knows that some blocks do not fit."""
        self.error: Exception | None = None
        """Raised by a move; again by the next :meth:`follow`."""
        self._remove: Callable[[], None] | None = None
        """Takes the guard off the pool."""

    def follow(self, owned: tuple[StateBlock, ...]) -> None:
        """Begin to move copies to the places that their roles give them. ``owned``: the view's owned blocks.

        Raises the error of an earlier move.
        """
        if self.error is not None:
            raise self.error
        if self._remove is not None and not self._running:
            self._remove()
            self._remove = None
        if owned is self._owned:
            return
        self._owned = owned
        if self._remove is None:
            self._remove = self._pool.add_guard(self._around_change)
        with self._held():
            self._waiting = self._due({block.key for block in owned})
            begins = bool(self._waiting) and not self._running
            self._running = self._running or begins
        if begins:
            self._thread = self._threads.start("elastic-places", self._run)

    @property
    def pending(self) -> int:
        """Number of blocks that have yet to move."""
        return len(self._waiting)

    @property
    def moving(self) -> bool:
        """True if the thread that moves blocks runs."""
        return self._running

    def close(self) -> None:
        """Stop; blocks stay where they are. Idempotent."""
        with self._held():
            self._waiting = {}
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _due(self, owned: Collection[BlockKey]) -> dict[BlockKey, Reserved | None]:
        """Return the moves that are due, with their memory; those to the host first, since they set some free."""
        before, moves = self._waiting, dict[BlockKey, Reserved | None]()
        copies = [self._pool.get(key) for key in self._pool]
        for copy in copies:
            if copy.place.on_device and copy.block.key not in owned:
                moves[copy.block.key] = None
        up = [copy for copy in copies if not copy.place.on_device and copy.block.key in owned]
        free, left = self._free(), 0
        for copy in up:
            reserved = before.get(copy.block.key)
            if reserved is None:
                free -= copy.made.state.nbytes
                reserved = self._reserved(copy) if free >= 0 else None
            if reserved is None:
                free, left = -1, left + copy.made.state.nbytes
                continue
            moves[copy.block.key] = reserved
        self._tell(left)
        return moves

    def _reserved(self, copy: BlockCopy) -> Reserved | None:
        """Return device memory for ``copy``; None if the allocator gets none."""
        try:
            return self._place.reserve(3, copy.block.numel)
        except torch.OutOfMemoryError:
            return None

    def _tell(self, left: int) -> None:
        if left and not self._short:
            self._say(
                f"--elastic-state: rank {self._pool.rank} steps {left / 2**20:.1f} MiB of state that it came to own in "
                "host memory, since its device has no memory free"
            )
        self._short = left > 0

    def _run(self) -> None:
        try:
            while True:
                while self._changing:
                    self._threads.sleep(_PAUSE)
                with self._lock:
                    if not self._waiting:
                        self._running = False
                        return
                    key = next(iter(self._waiting))
                    self._move(key, self._waiting.pop(key))
        except Exception as error:  # raised again on the training thread
            self.error, self._waiting, self._running = error, {}, False

    def _move(self, key: BlockKey, into: Reserved | None) -> None:
        if key not in self._pool:
            return
        copy = self._pool.get(key)
        if into is None:
            copy.store = BlockStore(HOST, copy.made.host_clone())
        elif not copy.place.on_device:
            self._place.fill(into, copy.made.state)
            copy.store = BlockStore(self._place, into.values)

    @contextmanager
    def _held(self) -> Iterator[None]:
        self._changing = True
        try:
            with self._lock:
                yield
        finally:
            self._changing = False

    @contextmanager
    def _around_change(self, copy: BlockCopy, record: StepRecord | None) -> Iterator[None]:
        with self._held():
            yield
