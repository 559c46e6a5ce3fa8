"""Links opened before they are needed: what a waiting rank does with its time.

A newcomer that is told who the members are connects to them on a thread of its own,
while they train and notice nothing; the edit that admits it finds the links standing
(``Fabric.prepare``). A spare thereby takes a lost rank's place without opening one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from megatron.elastic.comm.fabric import Address, Fabric

__all__ = ["LinksAhead"]


class LinksAhead:
    """One thread of a process that waits to be admitted. ``timeout``: seconds a round of connecting may take."""

    def __init__(self, fabric: Fabric, timeout: float) -> None:
        self._fabric, self._timeout = fabric, timeout
        self._changed = threading.Condition()
        self._members: Mapping[int, Address] | None = None
        self._over = False
        threading.Thread(target=self._run, name="elastic-links", daemon=True).start()

    def members_are(self, members: Mapping[int, Address]) -> None:
        """Whom to be linked to from now on. Any thread; returns at once."""
        with self._changed:
            self._members = members
            self._changed.notify()

    def stop(self) -> None:
        """No more are wanted; an edit ends the round under way. Idempotent."""
        with self._changed:
            self._over = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._members is not None)
                if self._over:
                    return
                members, self._members = self._members, None
            if members:
                self._fabric.prepare(members, self._timeout)
