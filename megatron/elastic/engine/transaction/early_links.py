"""Links that a waiting rank opens before it is admitted.

A newcomer connects to the members on a thread of its own, while they train. The edit that
admits it uses these links (``Fabric.prepare``). A spare can so replace a lost rank without
opening a link.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.elastic.comm.address import Address
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.platform.threads import OS_THREADS, Threads

__all__ = ["EarlyLinks"]


class EarlyLinks:
    """The connecting thread of a process that waits to be admitted. ``timeout``: seconds for one round."""

    def __init__(self, fabric: Fabric, timeout: float, threads: Threads = OS_THREADS) -> None:
        self._fabric, self._timeout = fabric, timeout
        self._changed = threads.condition()
        self._members: Mapping[int, Address] | None = None
        self._over = False
        threads.start("elastic-links", self._run)

    def members_are(self, members: Mapping[int, Address]) -> None:
        """Set the members to connect to from now on. Any thread; returns at once."""
        with self._changed:
            self._members = members
            self._changed.notify_all()

    def stop(self) -> None:
        """Start no further round; an edit ends the one under way. Idempotent."""
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
