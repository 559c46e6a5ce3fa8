"""The two threads between an agent's loop and the journal.

The *follower* blocks on the next position and hands each entry to the loop, in
order; the *writer* appends. Neither ever makes the loop wait for the store. The
end of the store reaches the loop once, as a call of ``lost``.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from megatron.elastic.control.events import Decided, Event
from megatron.elastic.control.journal import Journal, Seal
from megatron.elastic.control.store import Store, StoreLost
from megatron.elastic.launch.loop import Loop

__all__ = ["Couriers"]

_WAIT_SECONDS = 30.0


class Couriers:
    """See the module docstring. ``deliver(position, event)`` and ``lost(why)`` run on the loop's thread."""

    def __init__(
        self, loop: Loop, store: Store, seal: Seal, deliver: Callable[[int, Event | None], None], lost: Callable[[str], None]
    ) -> None:
        self._loop = loop
        self._deliver = deliver
        self._lost = lost
        self._outgoing: queue.SimpleQueue[tuple[int | None, Event]] = queue.SimpleQueue()
        self._follower = Journal(store.clone(), seal)
        self._writer = Journal(store.clone(), seal)

    def start(self) -> None:
        """Begin. Daemon threads: they end with the process, wherever they wait."""
        threading.Thread(target=self._follow, name="journal-follower", daemon=True).start()
        threading.Thread(target=self._write, name="journal-writer", daemon=True).start()

    def append(self, event: Event) -> None:
        """Append at the end, whatever else is appended meanwhile."""
        self._outgoing.put((None, event))

    def append_at(self, position: int, event: Decided) -> None:
        """Append if ``position`` is still free; otherwise nothing happens."""
        self._outgoing.put((position, event))

    def _follow(self) -> None:
        try:
            while True:
                for position, event in self._follower.follow(_WAIT_SECONDS):
                    self._loop.post(lambda p=position, e=event: self._deliver(p, e))  # type: ignore[misc]
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
                    for _ in self._writer.append(event):
                        pass
                else:
                    self._writer.append_at(position, event)
        except StoreLost as error:
            why = str(error)
            self._loop.post(lambda: self._lost(why))
