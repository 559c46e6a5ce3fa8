"""Memory for messages of a step that sends more than the steps before it.

The kernel provides a page when it is first written, and for some megabytes this can take longer than sending them.
The step that ends a migration sends reduced blocks to other ranks than its predecessors. So a thread allocates and
writes the memory for these messages beside earlier steps.

Invariant: each tensor is handed out once. All messages may take memory here; one whose size was not prepared gets new
memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

__all__ = ["MessageMemory"]


class MessageMemory:
    """See the module docstring. Any thread may prepare while the training thread takes."""

    def __init__(self) -> None:
        self._ready: dict[int, list[torch.Tensor]] = {}
        self._lock = threading.Lock()

    def prepare(self, sizes: Iterable[int]) -> None:
        """Allocate and write one fp32 tensor for each of ``sizes`` (elements)."""
        for size in sizes:
            tensor = torch.zeros(size, dtype=torch.float32)
            with self._lock:
                self._ready.setdefault(size, []).append(tensor)

    def take(self, size: int) -> torch.Tensor:
        """Return an fp32 tensor [``size``] with arbitrary values."""
        with self._lock:
            ready = self._ready.get(size)
            if ready:
                return ready.pop()
        return torch.empty(size, dtype=torch.float32)

    @property
    def left(self) -> list[int]:
        """Sizes that were prepared and not taken, ascending."""
        with self._lock:
            return sorted(size for size, ready in self._ready.items() for _ in ready)

    def clear(self) -> None:
        """Release what was prepared and not taken."""
        with self._lock:
            self._ready.clear()
