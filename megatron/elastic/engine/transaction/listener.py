"""The interface through which the engine reports events to the host, which logs them.

The engine does not depend on a listener's actions. Each method is called on every living
rank, after the event, unless its docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.elastic.engine.compute.samples import StepAddress
from megatron.elastic.engine.generation.configuration import Configuration
from megatron.elastic.engine.generation.repartition import Recut
from megatron.elastic.engine.generation.report import Report
from megatron.elastic.engine.generation.view import View
from megatron.elastic.engine.transaction.agreement import RecoveryOutcome, StateLost
from megatron.elastic.engine.transaction.certificates import CertificateOutcome
from megatron.elastic.engine.transaction.protection import Protected
from megatron.elastic.engine.transaction.streams import Moved
from megatron.elastic.state.notes import Applied
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.protocol import Resolution
from megatron.elastic.state.record import StepRecord

__all__ = ["Listener", "Stepped", "Voted"]


@dataclass(frozen=True)
class Stepped:
    """Times and counts of one committed step on this rank."""

    address: StepAddress
    seconds: float
    phases: Mapping[str, int]
    """Nanoseconds by phase."""
    attempts: int
    """Number of times this rank computed it; 0 if this rank only finished it."""
    computed: int
    """Samples computed by all ranks."""
    state_bytes: int
    """Bytes of state received in added copies since this process began."""
    applied: tuple[Applied, ...] = ()
    """Gradients that copies were updated by since the step before."""


@dataclass(frozen=True)
class Voted:
    """The basis of a vote: the record before it, the samples of its step, and this rank's copies when it joined."""

    before: StepRecord
    address: StepAddress
    named: Configuration
    """The configuration that the vote names."""
    oldest: int
    """Lowest version of the copies."""
    retained: int
    """Most gradients that one copy retained since the vote before."""
    coming: bool | None = None
    """:attr:`~megatron.elastic.engine.transaction.migrate.Migrator.coming`."""
    short: int = 0
    """Blocks that lack mirrors by ``named``, where ``coming`` is not None."""


class Listener:
    """Ignores every event; override the methods of interest."""

    def recorded(
        self,
        record: StepRecord,
        view: View,
        source: str,
        voted: Voted | None = None,
        resolution: Resolution | None = None,
    ) -> None:
        """``record`` is this rank's newest from here on; called before the rank acts on it.

        ``source``: 'vote', which comes with ``voted``; 'decision', with its ``resolution``; 'start', 'load' or 'join'.
        """

    def reporting(self, report: Report) -> None:
        """This rank is about to report after a loss."""

    def lost(self, lost: StateLost, pool: StatePool) -> None:
        """State is lost as the reports say; ``pool``: the copies here. The engine raises ``lost`` next."""

    def stepped(self, record: StepRecord, view: View, step: Stepped) -> None:
        """A step was committed: ``record``."""

    def settled(self, outcome: RecoveryOutcome, view: View, seconds: float) -> None:
        """A recovery is finished, ``seconds`` after it began."""

    def noticed(self, why: str) -> None:
        """A line for the log, such as the refusal of a request. Called on the ranks that it concerns."""

    def paced(self, record: StepRecord, before: View, view: View) -> None:
        """Measured speeds changed the plan from that of ``before`` to that of ``view``."""

    def recut(self, record: StepRecord, view: View, recut: Recut) -> None:
        """Units are about to move. Called before the migration begins."""

    def reshapes(self, units: int) -> None:
        """So many units begin to move to other ranks, because a user asked for other parallel sizes."""

    def rehomes(self, record: StepRecord, view: View, before: float, after: float, replicas: int) -> None:
        """Experts begin to move to other ranks. ``before``, ``after``: :meth:`Assignment.imbalance` of the load.

        ``replicas``: most homes of an expert then.
        """

    def moved(self, record: StepRecord, view: View, moved: Moved) -> None:
        """A migration of copies, and perhaps of units, has ended."""

    def protected(self, record: StepRecord, view: View, protected: Protected) -> None:
        """Every block has all its mirrors again after a loss."""

    def examined(self, view: View, verdict: CertificateOutcome) -> None:
        """A certificate was taken. If it failed, the engine raises its findings next."""
