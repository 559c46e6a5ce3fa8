"""The threads between an agent's loop and the journal: each entry reaches the loop once and in order.

The *follower* thread waits for the next position and hands each entry to the loop. The *writer* thread appends, so
the loop never waits for a store that may be far away or gone. The agent that serves the store appends from its loop
instead, which saves four changes of thread between a death and FREEZE. If the store is lost, the loop is told once,
by a call of ``lost``.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from megatron.elastic.control.events import Decided, Event
from megatron.elastic.control.journal import BEGIN, Journal, Mark, Signer, Trimmed
from megatron.elastic.control.store import Store, StoreLost
from megatron.elastic.launch.agent.loop import Loop

__all__ = ["JournalIO"]

_WAIT_SECONDS = 30.0


class JournalIO:
    """See the module docstring. The callbacks run on the loop's thread.

    ``deliver(position, event)``; ``lost(why)``: the store is gone; ``behind()``: entries that were not
    delivered yet are gone from the journal, so :meth:`start` has to be called with a later position.
    """

    def __init__(
        self,
        loop: Loop,
        store: Store,
        signer: Signer,
        deliver: Callable[[int, Event | None], None],
        lost: Callable[[str], None],
        behind: Callable[[], None],
    ) -> None:
        self._loop, self._deliver, self._lost, self._behind = loop, deliver, lost, behind
        self._near = store.server
        self._outgoing: queue.SimpleQueue[tuple[int | None, Event]] = queue.SimpleQueue()
        self._follower = Journal(store.clone(), signer)
        self._writer = Journal(store.clone(), signer)
        self._writing = False
        self.mark = BEGIN
        """The entries that the loop has been given."""

    @property
    def needed(self) -> int:
        """The first entry that a thread of this agent has yet to read.

        The follower may lag behind the loop, which is given the entries that it appends near at once.
        """
        return min(self.mark.position, self._follower.position)

    def start(self, mark: Mark) -> None:
        """Begin with the entry at ``mark``, also anew. Daemon threads: they end with the process."""
        self.mark = self._follower.mark = mark
        threading.Thread(target=self._follow, name="journal-follower", daemon=True).start()
        if not self._near and not self._writing:
            self._writing = True
            threading.Thread(target=self._write, name="journal-writer", daemon=True).start()

    def append(self, event: Event) -> None:
        """Append at the end, also while others append."""
        self._send(None, event)

    def append_at(self, position: int, event: Decided) -> None:
        """Append if ``position`` is still free; otherwise nothing happens."""
        self._send(position, event)

    def _send(self, position: int | None, event: Event) -> None:
        if self._near:
            self._loop.post(lambda: self._append_near(position, event))
        else:
            self._outgoing.put((position, event))

    def _append_near(self, position: int | None, event: Event) -> None:
        try:
            self._writer.mark = self.mark
            if position is None:
                for _, found in self._writer.append(event):
                    self._offer(self._writer.mark, found)
            elif position == self.mark.position and self._writer.append_next(event):
                for _, found in self._writer.follow(0.0):
                    self._offer(self._writer.mark, found)
        except StoreLost as error:
            self._lost(str(error))

    def _offer(self, mark: Mark, event: Event | None) -> None:
        """Deliver the entry before ``mark`` unless it was: one appended near comes again from the follower."""
        if mark.position == self.mark.position + 1:
            self.mark = mark
            self._deliver(mark.position - 1, event)

    def _follow(self) -> None:
        try:
            while True:
                for _, event in self._follower.follow(_WAIT_SECONDS):
                    self._loop.post(lambda m=self._follower.mark, e=event: self._offer(m, e))  # type: ignore[misc]
        except Trimmed:
            self._loop.post(self._behind)
        except StoreLost as error:
            why = str(error)
            self._loop.post(lambda: self._lost(why))

    def _write(self) -> None:
        try:
            while True:
                position, event = self._outgoing.get()
                # Positions that the follower has read need not be read again to find the first free one.
                self._writer.mark = max(self._writer.mark, self._follower.mark, key=lambda mark: mark.position)
                if position is None:
                    with suppress(Trimmed):  # this node was given up: its events do not count any more
                        for _ in self._writer.append(event):
                            pass
                elif position == self._writer.position:
                    self._writer.append_next(event)
        except StoreLost as error:
            why = str(error)
            self._loop.post(lambda: self._lost(why))
