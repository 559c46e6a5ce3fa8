"""The journal is kept short: a snapshot now and then, and entries that every agent has read are dropped.

A job of weeks would otherwise keep an entry for each request of each rank at each change.
The snapshot holds the state, the counts of failures and the history, which all agents derive from the
same entries; the floor is the last entry that every thread of every living agent has read. An agent that counts
as lost is not waited for: it starts from the snapshot when it is back.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

from megatron.elastic.control.failures import Failures
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.history import JobHistory
from megatron.elastic.control.journal import BEGIN, Mark, Signer, Snapshot, keep, newest, trim
from megatron.elastic.control.snapshot import dump, restore
from megatron.elastic.control.store import Store, StoreLost
from megatron.elastic.control.wire import ProtocolError

__all__ = ["TRIM_ENTRIES", "JournalTrimming"]

TRIM_ENTRIES = 1024
"""Entries between two snapshots."""


class JournalTrimming:
    """One agent's part. ``state``, ``failures`` and ``history`` change with each entry.

    ``seen``: node → entries it has read.
    """

    def __init__(
        self,
        store: Store,
        signer: Signer,
        node: int,
        state: Generations,
        failures: Failures,
        history: JobHistory,
        seen: Mapping[int, int],
    ) -> None:
        self._store, self._signer, self._node = store, signer, node
        self._state, self._failures, self._history, self._seen = state, failures, history, seen
        self._newest = BEGIN
        self._kept = 0
        """Of the newest snapshot that this agent has seen in the store."""
        self._work: queue.SimpleQueue[tuple[Snapshot, int]] = queue.SimpleQueue()

    def resume(self) -> Mark:
        """Take over what the newest snapshot says, if there is one; where to read on.

        Raises :class:`StoreLost`, also for a snapshot that is not this job's, or older than one seen before.
        """
        try:
            found = newest(self._store, self._signer)
            if found is None:
                return BEGIN
            if found.mark.position < self._kept:
                raise ProtocolError(f"its snapshot, of entry {found.mark.position}, is older than one read before")
            restore(self._state, self._failures, self._history, found.content)
        except ProtocolError as error:
            raise StoreLost(f"its snapshot of the job's state cannot be used: {error}") from None
        self._newest, self._kept = found.mark, found.mark.position
        return found.mark

    def start(self) -> None:
        """Begin. A daemon thread, so that the loop waits for no store."""
        threading.Thread(target=self._run, name="journal-trimming", daemon=True).start()

    def read(self, mark: Mark, needed: int) -> None:
        """Every entry before ``mark`` is applied here, and those before ``needed`` are read no more.

        The coordinator acts on it.
        """
        state = self._state
        if mark.position - self._newest.position < TRIM_ENTRIES or state.coordinator() != self._node:
            return
        self._newest = mark
        others = [self._seen.get(n, 0) for n, node in state.nodes.items() if node.alive and n != self._node]
        content = dump(state, self._failures, self._history)  # now: all change with the next entry
        self._work.put((Snapshot(mark, content), min([mark.position, needed, *others])))

    def carry_out(self, store: Store) -> None:
        """Keep the snapshot taken next, and drop the entries that every agent had read by then."""
        snapshot, floor = self._work.get()
        if keep(store, self._signer, snapshot):
            self._kept = snapshot.mark.position
            trim(store, self._signer, floor)

    def _run(self) -> None:
        try:
            store = self._store.clone()
            while True:
                self.carry_out(store)
        except (StoreLost, ProtocolError):
            return  # the journal's follower tells the loop
