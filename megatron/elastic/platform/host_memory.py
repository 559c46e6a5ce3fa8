"""Memory of this machine and this process, in bytes (psutil)."""

from __future__ import annotations

import resource

import psutil

__all__ = ["machine_memory", "process_memory"]


def machine_memory() -> tuple[int, int]:
    """(total, available) bytes of this machine."""
    found = psutil.virtual_memory()
    return found.total, found.available


def process_memory() -> tuple[int, int]:
    """(resident, peak resident) bytes of this process."""
    resident = psutil.Process().memory_info().rss
    return resident, max(resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
