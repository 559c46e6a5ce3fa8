"""Whom the engine tells what it did: the host, which logs it.

Nothing depends on what a listener does with it; each method is called on every
living rank unless it says otherwise, after the fact unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron.elastic.engine.certificates import Verdict
from megatron.elastic.engine.movement import Moved
from megatron.elastic.engine.recovery import Outcome
from megatron.elastic.engine.recut import Recut
from megatron.elastic.engine.source import StepAddress
from megatron.elastic.engine.standing import Standing

if TYPE_CHECKING:
    from megatron.elastic.engine.engine import Engine
    from megatron.elastic.engine.position import Position

__all__ = ["Listener"]


class Listener:
    """Hears nothing; override what is of interest."""

    def stepped(self, engine: Engine, address: StepAddress, seconds: float, phases: Mapping[str, int]) -> None:
        """A step was committed: its samples, how long it took, nanoseconds by phase."""

    def settled(self, outcome: Outcome, standing: Standing, seconds: float) -> None:
        """A recovery is finished, ``seconds`` after it began."""

    def noticed(self, why: str) -> None:
        """A line for the log: what was asked for and is not done, what is done again."""

    def paced(self, position: Position, before: Standing) -> None:
        """Measured speeds changed the plan from that of ``before``."""

    def recut(self, position: Position, recut: Recut) -> None:
        """Units are about to change place."""

    def moved(self, position: Position, moved: Moved) -> None:
        """Copies, and perhaps units, have changed place."""

    def examined(self, position: Position, verdict: Verdict) -> None:
        """A certificate was taken; one that failed is raised next."""
