"""The admission of a newcomer to a running job.

A newcomer runs the user's script in a world of one and waits to be admitted. The members
admit it at a step boundary, in a generation with reason ``join``. If they cannot go on
without it, they admit it at once (:mod:`wait_for_ranks`). One :class:`JoinState` gives it the
layouts, the placement, the record, its place in the loop and the host's counters. The gather
that follows gives it parameters, and it computes from then on. It receives state blocks with
the next migration and owns none before.

At a boundary members do not wait for the newcomer: they have the parameters. They take part in its gather
and exchange statements for the certificate while they compute, and examine these before they vote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.comm.messages import receive, send
from megatron.elastic.control.membership import Decision
from megatron.elastic.engine.generation.configuration import Configuration, History
from megatron.elastic.engine.generation.hardware import Hardware
from megatron.elastic.engine.generation.report import newcomers
from megatron.elastic.engine.transaction.fence import EntryPoint
from megatron.elastic.state.layout import ParamSpec
from megatron.elastic.state.record import StepRecord

__all__ = ["JoinState", "receive_join_state", "send_join_state"]


@dataclass(frozen=True)
class JoinState:
    """Everything a newcomer receives besides tensors."""

    catalog: Mapping[tuple[int, int], tuple[ParamSpec, ...]]
    hardware: Hardware
    configuration: Configuration
    """The configuration of the generation that admits it, after promotion."""
    confirmed: Configuration
    """The configuration that ``record`` names, in force again should this generation end before its vote."""
    record_text: str
    """:attr:`record` as text. Its digest is of this text, in which 2 and 2.0 differ; in a typed message they do not."""
    place: EntryPoint
    """Its place in the host's loop."""
    step_committed: bool
    """True if the step it begins with is committed, so that only update and gather remain."""
    between_steps: bool
    """True if it is admitted at a boundary, so that its certificate is examined before the next vote."""
    report_keys: tuple[str, ...]
    host: str
    """The host's own counters, as text that the engine does not read."""

    @cached_property
    def record(self) -> StepRecord:
        """The newest record."""
        return StepRecord.from_json(self.record_text)

    def history(self) -> History:
        """Return the configurations that a member knows."""
        return History(self.confirmed, self.configuration)


def send_join_state(fabric: Fabric, decision: Decision, join_state: Callable[[], JoinState]) -> None:
    """Send ``join_state()`` to each newcomer, if this is the lowest member; for members."""
    if fabric.rank == _lowest_member(decision):
        message = join_state()
        for rank in newcomers(decision):
            send(fabric, rank, message)


def receive_join_state(fabric: Fabric, decision: Decision) -> JoinState:
    """Return the message of the lowest member; for newcomers."""
    return receive(fabric, _lowest_member(decision), JoinState)


def _lowest_member(decision: Decision) -> int:
    return min(set(decision.members) - set(newcomers(decision)))
