"""Between an agent's loop and the journal: entries in, in order and once; events out.

The *follower* thread blocks on the next position and hands each entry to the
loop. Appending is done by a *writer* thread, so that the loop never waits for a
store that may be far away or gone; only the agent that serves the store itself
appends right from its loop, which saves four changes of thread on the way from a
death to FREEZE. The end of the store reaches the loop once, as a call of ``lost``.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from megatron.elastic.control.events import Decided, Event
from megatron.elastic.control.journal import Journal, Seal, Trimmed
from megatron.elastic.control.store import Store, StoreLost
from megatron.elastic.launch.loop import Loop

__all__ = ["Couriers"]

_WAIT_SECONDS = 30.0


class Couriers:
    """See the module docstring. The callbacks run on the loop's thread.

    ``deliver(position, event)``; ``lost(why)``: the store is gone; ``behind()``: entries that were not
    delivered yet are gone from the journal, so :meth:`start` has to be called with a later position.
    """

    def __init__(
        self,
        loop: Loop,
        store: Store,
        seal: Seal,
        deliver: Callable[[int, Event | None], None],
        lost: Callable[[str], None],
        behind: Callable[[], None],
    ) -> None:
        self._loop, self._deliver, self._lost, self._behind = loop, deliver, lost, behind
        self._near = store.server
        self._outgoing: queue.SimpleQueue[tuple[int | None, Event]] = queue.SimpleQueue()
        self._follower = Journal(store.clone(), seal)
        self._writer = Journal(store.clone(), seal)
        self._writing = False
        self._next = 0

    def start(self, position: int) -> None:
        """Begin with the entry at ``position``, also anew. Daemon threads: they end with the process."""
        self._next = self._follower.position = position
        threading.Thread(target=self._follow, name="journal-follower", daemon=True).start()
        if not self._near and not self._writing:
            self._writing = True
            threading.Thread(target=self._write, name="journal-writer", daemon=True).start()

    def append(self, event: Event) -> None:
        """Append at the end, whatever else is appended meanwhile."""
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
            self._writer.position = self._next
            if position is None:
                for at, found in self._writer.append(event):
                    self._offer(at, found)
            elif position == self._next and self._writer.append_at(position, event):
                self._offer(position, event)
        except StoreLost as error:
            self._lost(str(error))

    def _offer(self, position: int, event: Event | None) -> None:
        """Deliver what has not been delivered: an entry appended near comes again from the follower."""
        if position == self._next:
            self._next += 1
            self._deliver(position, event)

    def _follow(self) -> None:
        try:
            while True:
                for position, event in self._follower.follow(_WAIT_SECONDS):
                    self._loop.post(lambda p=position, e=event: self._offer(p, e))  # type: ignore[misc]
        except Trimmed:
            self._loop.post(self._behind)
        except StoreLost as error:
            why = str(error)
            self._loop.post(lambda: self._lost(why))

    def _write(self) -> None:
        try:
            while True:
                position, event = self._outgoing.get()
                # What the follower has seen need not be read again to find the first free position.
                self._writer.position = max(self._writer.position, self._follower.position)
                if position is None:
                    with suppress(Trimmed):  # what a node that was given up has to say concerns nobody
                        for _ in self._writer.append(event):
                            pass
                else:
                    self._writer.append_at(position, event)
        except StoreLost as error:
            why = str(error)
            self._loop.post(lambda: self._lost(why))
