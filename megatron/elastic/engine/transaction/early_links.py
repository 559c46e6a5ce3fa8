"""Links opened before they are needed: what a waiting rank does with its time.

A newcomer that is told who the members are connects to them on a thread of its own,
while they train and notice nothing; the edit that admits it finds the links standing
(``Fabric.prepare``). A spare thereby takes a lost rank's place without opening one.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.elastic.comm.fabric import Address, Fabric
from megatron.elastic.platform.threads import OS_THREADS, Threads

__all__ = ["LinksAhead"]


class LinksAhead:
    """One thread of a process that waits to be admitted. ``timeout``: seconds a round of connecting may take."""

    def __init__(self, fabric: Fabric, timeout: float, threads: Threads = OS_THREADS) -> None:
        self._fabric, self._timeout = fabric, timeout
        self._changed = threads.condition()
        self._members: Mapping[int, Address] | None = None
        self._over = False
        threads.start("elastic-links", self._run)

    def members_are(self, members: Mapping[int, Address]) -> None:
        """Whom to be linked to from now on. Any thread; returns at once."""
        with self._changed:
            self._members = members
            self._changed.notify_all()

    def stop(self) -> None:
        """No more are wanted; an edit ends the round under way. Idempotent."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._over and self._members is None:
                    self._changed.wait()
                if self._over:
                    return
                members, self._members = self._members, None
            if members:
                self._fabric.prepare(members, self._timeout)
