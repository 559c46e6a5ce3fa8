"""Facts about the copies of one rank, counted where they happen and taken for the event log.

The history checker judges by them how copies were updated (``tools/history/copies.py``). Nothing acts on them. Counting
costs one comparison or one set insertion a block and step. For the training thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.elastic.state.record import GradientKey

__all__ = ["Applied", "Notes"]

Applied = tuple[int, int, int, int]
"""Version that a copy was brought to, then step, generation and attempt of the gradient that it was updated by."""


@dataclass
class Notes:
    """See the module docstring."""

    _retained: int = 0
    _applied: set[tuple[int, GradientKey]] = field(default_factory=set)

    def retained(self, gradients: int) -> None:
        """Note that a copy retains so many gradients."""
        if gradients > self._retained:
            self._retained = gradients

    def applied(self, version: int, key: GradientKey) -> None:
        """Note that a copy was brought to ``version`` by the gradient of ``key``."""
        self._applied.add((version, key))

    def take_retained(self) -> int:
        """Return the most gradients that one copy retained since the last call."""
        most, self._retained = self._retained, 0
        return most

    def take_applied(self) -> tuple[Applied, ...]:
        """Return the gradients that copies were updated by since the last call, ascending."""
        taken, self._applied = self._applied, set()
        return tuple(sorted((version, *key) for version, key in taken))
