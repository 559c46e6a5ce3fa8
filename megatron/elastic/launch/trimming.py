"""The journal is kept short: a snapshot now and then, and what everybody has read goes.

A job of weeks would otherwise keep an entry for each request of each rank at each change.
The snapshot holds the state and the counts of failures, which all agents derive from the
same entries; the floor is what every living agent says it has read. An agent that counts
as lost is not waited for: it starts from the snapshot when it is back.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

from megatron.elastic.control.failures import Failures
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.journal import Seal, Snapshot, keep, newest, trim
from megatron.elastic.control.snapshot import restore, to_plain
from megatron.elastic.control.store import Store, StoreLost
from megatron.elastic.control.wire import ProtocolError

__all__ = ["TRIM_ENTRIES", "Trimming"]

TRIM_ENTRIES = 1024
"""Entries between two snapshots."""


class Trimming:
    """One agent's part. ``state`` and ``failures`` change with each entry; ``seen``: node → entries it has read."""

    def __init__(
        self, store: Store, seal: Seal, node: int, state: Generations, failures: Failures, seen: Mapping[int, int]
    ) -> None:
        self._store, self._seal, self._node = store, seal, node
        self._state, self._failures, self._seen = state, failures, seen
        self._newest = 0
        self._work: queue.SimpleQueue[tuple[Snapshot, int]] = queue.SimpleQueue()

    def resume(self) -> int:
        """Take over what the newest snapshot says, if there is one; the position of the first entry after it.

        Raises :class:`StoreLost`, also for a snapshot that is not this job's.
        """
        try:
            found = newest(self._store, self._seal)
            if found is None:
                return 0
            restore(self._state, found.content.get("state"))
            restore(self._failures, found.content.get("failures"))
        except ProtocolError as error:
            raise StoreLost(f"what it keeps of the job's past cannot be read: {error}") from None
        self._newest = found.position
        return found.position

    def start(self) -> None:
        """Begin. A daemon thread, so that the loop waits for no store."""
        threading.Thread(target=self._run, name="journal-trimming", daemon=True).start()

    def read(self, position: int) -> None:
        """Every entry below ``position`` is applied here. The coordinator acts on it."""
        state = self._state
        if position - self._newest < TRIM_ENTRIES or state.coordinator() != self._node:
            return
        self._newest = position
        others = [self._seen.get(n, 0) for n, node in state.nodes.items() if node.alive and n != self._node]
        content = {"state": to_plain(state), "failures": to_plain(self._failures)}
        self._work.put((Snapshot(position, content), min([position, *others])))

    def carry_out(self, store: Store) -> None:
        """Keep the snapshot taken next, and drop what everybody had read by then."""
        snapshot, floor = self._work.get()
        if keep(store, self._seal, snapshot):
            trim(store, self._seal, floor)

    def _run(self) -> None:
        try:
            store = self._store.clone()
            while True:
                self.carry_out(store)
        except (StoreLost, ProtocolError):
            return  # the journal's follower tells the loop
