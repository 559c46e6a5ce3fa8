"""The configuration that is in force: placement and assignment, named by the newest record.

A configuration changes at boundaries, and whenever copies are promoted after a loss. Ranks
learn of a change at different instants, so no rank may decide from its own memory which
configuration holds after the next loss. The record decides: every vote carries the digest of
the configuration in force from then on, and survivors go on from the one that the newest record
among them names (docs/design.md §6; ``tests/unit/protocol``). Each rank therefore keeps every
configuration since that of its newest record: the one confirmed by a vote and those entered
since then. It enters a configuration before it joins the vote that names it.
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
    """Owner and mirrors of every block."""
    assignment: Assignment
    """Units of each cell."""

    @cached_property
    def digest(self) -> str:
        """Hash of the whole (32 hex digits)."""
        text = f"{self.assignment.digest()}|{self.placement.to_json()}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class History:
    """The configurations that may be in force after a loss, by digest."""

    def __init__(self, *bases: Configuration) -> None:
        self._known = {configuration.digest: configuration for configuration in bases}

    def enter(self, configuration: Configuration) -> None:
        """Add a configuration that no vote has confirmed yet: ranks work under it, or the next vote names it."""
        self._known[configuration.digest] = configuration

    def confirm(self, configuration: Configuration) -> None:
        """Keep only ``configuration``, which a vote has named: no older one can be in force again."""
        self._known = {configuration.digest: configuration}

    def in_force(self, records: Collection[StepRecord]) -> Configuration:
        """Return the configuration that the newest of ``records`` names. Raises ``RuntimeError`` if it is unknown."""
        newest = max(records, key=lambda record: record.age)
        configuration = self._known.get(newest.placement)
        if configuration is None:
            raise RuntimeError(
                f"the record of step {newest.version} names placement {newest.placement}, which this rank does not know"
            )
        return configuration

    def common(self, digests: Iterable[str]) -> Configuration | None:
        """Return the configuration that all ``digests`` name; None if they differ."""
        first, *others = set(digests)
        return None if others else self._known.get(first)

    def of(self, record: StepRecord) -> Configuration:
        """Return the configuration that ``record`` names."""
        return self.in_force((record,))
