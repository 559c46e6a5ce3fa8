"""The early end of a long evaluation, agreed on by all ranks between two of its batches.

Ranks compute batches of an evaluation without waiting for one another. So they do not ask before each batch: they
measure how long batches take, and ask every few seconds. What is nearly done is always finished.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron.elastic.comm.fabric import Fabric

__all__ = ["EarlyEnd", "Reasons"]

Reasons = Mapping[str, Callable[[], bool]]
"""Name of a reason to end early → whether it holds on this rank; the same names on every rank."""

_SECONDS = 5.0
"""Time between two questions, and the remaining time that is never cut off."""


class EarlyEnd:
    """Asks in one evaluation of ``batches`` batches. ``clock``: monotonic seconds."""

    def __init__(self, fabric: Fabric, clock: Callable[[], float], reasons: Reasons, batches: int) -> None:
        self._fabric = fabric
        self._clock = clock
        self._reasons = reasons
        self._batches = batches
        self._asked, self._next = 0, 1
        """Batches before the last question, and before the next one; equal on all ranks."""
        self._since = clock()

    def reason(self, done: int) -> str:
        """Return why the evaluation ends after ``done`` batches, empty if it goes on. Collective at some of them."""
        if not self._reasons or done != self._next:
            return ""
        now = self._clock()
        holds = [int(is_so()) for is_so in self._reasons.values()]
        (elapsed,), holding = self._fabric.sum_over_ranks([now - self._since], holds)
        seconds = elapsed / len(self._fabric.alive) / (done - self._asked)
        self._asked, self._since = done, now
        self._next = done + max(1, int(_SECONDS / max(seconds, 1e-6)))
        if seconds * (self._batches - done) <= _SECONDS:
            return ""
        return next((name for name, count in zip(self._reasons, holding, strict=True) if count), "")
