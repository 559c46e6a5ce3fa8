"""Memory of this machine and this process, read from /proc (bytes).

``/proc/meminfo`` MemTotal and MemAvailable; ``/proc/self/status`` VmRSS and VmHWM
(peak resident set). Where /proc is absent the resource module's peak stands in.
"""

from __future__ import annotations

import resource
from pathlib import Path

__all__ = ["machine_memory", "process_memory"]


def _table(path: str) -> dict[str, int]:
    """``name:  value kB`` lines as bytes; empty where the file is missing."""
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    rows: dict[str, int] = {}
    for line in text.splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            rows[key] = int(words[0]) * 1024
    return rows


def machine_memory() -> tuple[int, int]:
    """(total, available) bytes of this machine; zeros where unknown."""
    rows = _table("/proc/meminfo")
    return rows.get("MemTotal", 0), rows.get("MemAvailable", rows.get("MemFree", 0))


def process_memory() -> tuple[int, int]:
    """(resident, peak resident) bytes of this process."""
    rows = _table("/proc/self/status")
    peak = rows.get("VmHWM", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return rows.get("VmRSS", peak), peak
