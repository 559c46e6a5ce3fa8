"""Whom the engine tells what it did: the host, which logs it.

Nothing depends on what a listener does with it; each method is called on every
living rank unless it says otherwise, after the fact unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.elastic.engine.compute.samples import StepAddress
from megatron.elastic.engine.generation.repartition import Recut
from megatron.elastic.engine.generation.view import View
from megatron.elastic.engine.transaction.agreement import RecoveryOutcome
from megatron.elastic.engine.transaction.certificates import CertificateOutcome
from megatron.elastic.engine.transaction.protection import Protected
from megatron.elastic.engine.transaction.streams import Moved
from megatron.elastic.state.record import StepRecord

__all__ = ["Listener", "Stepped"]


@dataclass(frozen=True)
class Stepped:
    """What a committed step took on this rank."""

    address: StepAddress
    seconds: float
    phases: Mapping[str, int]
    """Nanoseconds by phase."""
    attempts: int
    """How often it was computed; 0 where it was only finished."""
    computed: int
    """Samples computed by all ranks."""
    state_bytes: int
    """Bytes of state received in added copies since this rank began."""


class Listener:
    """Hears nothing; override what is of interest."""

    def stepped(self, record: StepRecord, view: View, step: Stepped) -> None:
        """``record`` was committed."""

    def settled(self, outcome: RecoveryOutcome, view: View, seconds: float) -> None:
        """A recovery is finished, ``seconds`` after it began."""

    def noticed(self, why: str) -> None:
        """A line for the log: what was asked for and is not done, what is done again."""

    def paced(self, record: StepRecord, before: View, view: View) -> None:
        """Measured speeds changed the plan from that of ``before`` to that of ``view``."""

    def recut(self, record: StepRecord, view: View, recut: Recut) -> None:
        """Units are about to change place."""

    def moved(self, record: StepRecord, view: View, moved: Moved) -> None:
        """Copies, and perhaps units, have changed place."""

    def protected(self, record: StepRecord, view: View, protected: Protected) -> None:
        """Every block has its mirrors again after a loss."""

    def examined(self, view: View, verdict: CertificateOutcome) -> None:
        """A certificate was taken; one that failed is raised next."""
