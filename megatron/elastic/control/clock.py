"""The clock that leases are compared by, in all processes of a machine.

``CLOCK_BOOTTIME``: it goes on while the machine is suspended, unlike
``CLOCK_MONOTONIC``, and it does not follow the wall clock. A worker that wakes up
with its machine finds its lease run out, as the other nodes do.
"""

from __future__ import annotations

import time

__all__ = ["boot_ns", "boot_seconds"]


def boot_ns() -> int:
    """Nanoseconds since this machine was started, suspended time included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def boot_seconds() -> float:
    """The same in seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
