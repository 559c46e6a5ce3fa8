"""What a generation starts from: which placement is in force, as the newest record says.

A placement changes at a boundary, with it at times which units a cell holds, and
again whenever copies are promoted after a loss. Ranks learn of it at different
instants, so none of them may conclude from its own memory which one holds after the
next loss. The record does: every vote carries the digest of the basis that is in force from it on, and
survivors go on from what the newest record among them names (docs/design.md §6; ``tests/unit/protocol``).
Each rank therefore keeps every basis since that of its newest record: the one agreed by
vote and those entered since, which no vote has confirmed yet. It enters a basis before it
joins the vote that names it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.state.placement import Placement
from megatron.elastic.state.record import StepRecord

__all__ = ["Configuration", "History"]


@dataclass(frozen=True)
class Configuration:
    """Everything about the state that a vote confirms; ``digest`` names it in the StepRecord."""

    placement: Placement
    """Who holds which copies."""
    assignment: Assignment
    """Which units each cell holds."""

    @cached_property
    def digest(self) -> str:
        """Hash of the whole (32 hex digits)."""
        text = f"{self.assignment.digest()}|{self.placement.to_json()}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class History:
    """The bases that may turn out to be in force, by digest."""

    def __init__(self, *bases: Configuration) -> None:
        self._known = {configuration.digest: configuration for configuration in bases}

    def enter(self, configuration: Configuration) -> None:
        """``configuration`` is worked under from now on, or named by the next vote; none has confirmed it yet."""
        self._known[configuration.digest] = configuration

    def confirm(self, configuration: Configuration) -> None:
        """A vote has named ``configuration``: nothing older can come back."""
        self._known = {configuration.digest: configuration}

    def in_force(self, records: Collection[StepRecord]) -> Configuration:
        """The basis that the newest of ``records`` names. Raises ``RuntimeError`` when this rank never knew it."""
        newest = max(records, key=lambda record: record.version)
        configuration = self._known.get(newest.placement)
        if configuration is None:
            raise RuntimeError(
                f"the record of step {newest.version} was made under placement {newest.placement}, unknown here"
            )
        return configuration

    def common(self, digests: Iterable[str]) -> Configuration | None:
        """The basis that all of ``digests`` name; None where they differ."""
        first, *others = set(digests)
        return None if others else self._known.get(first)

    def of(self, record: StepRecord) -> Configuration:
        """The basis that ``record`` names."""
        return self.in_force((record,))
