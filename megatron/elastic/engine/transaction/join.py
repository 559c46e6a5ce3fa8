"""How a rank that was not here becomes part of the job.

A newcomer runs the user's script in a world of one and waits to be admitted. At
a step boundary all members let it in (a generation like any other, reason
``join``), or wherever they are when they cannot go on without it (:mod:`wait_for_ranks`).
What it cannot know it is told once, in a :class:`Welcome`: the layouts, the
placement, the record, the place in the program and the host's counters. Parameters
come with the gather that follows, state blocks with the next rebalancing; until
then the newcomer owns nothing and computes already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.comm.messages import receive, send
from megatron.elastic.control.membership import Decision
from megatron.elastic.engine.generation.configuration import Basis, History
from megatron.elastic.engine.generation.hardware import Machine
from megatron.elastic.engine.transaction.fence import Place
from megatron.elastic.state.layout import ParamSpec
from megatron.elastic.state.record import StepRecord

__all__ = ["NEWCOMER", "Welcome", "newcomers", "receive_welcome", "send_welcome"]

NEWCOMER = ""
"""Report of a rank that has no state and no position yet."""


@dataclass(frozen=True)
class Welcome:
    """Everything a newcomer needs besides tensors."""

    catalog: Mapping[tuple[int, int], tuple[ParamSpec, ...]]
    machine: Machine
    basis: Basis
    """Who holds what, as promoted for the generation that admits it."""
    confirmed: Basis
    """What ``record`` names: where to start from should this generation end at once."""
    record_text: str
    """:attr:`record` as its text, which its digest is of: there 2 and 2.0 differ, in a message of types they do not."""
    place: Place
    """Where in the host's program it begins."""
    step_committed: bool
    """Whether the step it begins with is committed, and only its end is left."""
    report_keys: tuple[str, ...]
    host: str
    """The host's own counters, as a text that is opaque here."""

    @cached_property
    def record(self) -> StepRecord:
        """The newest record."""
        return StepRecord.from_json(self.record_text)

    def history(self) -> History:
        """What a member knows of placements."""
        return History(self.confirmed, self.basis)


def newcomers(decision: Decision) -> tuple[int, ...]:
    """Members that have to be told everything, ascending."""
    return tuple(sorted(rank for rank in decision.members if decision.reports.get(rank, NEWCOMER) == NEWCOMER))


def send_welcome(fabric: Fabric, decision: Decision, welcome: Callable[[], Welcome]) -> None:
    """Members' side: the lowest of them tells the newcomers; the others need not know what."""
    if fabric.rank == _speaker(decision):
        message = welcome()
        for rank in newcomers(decision):
            send(fabric, rank, message)


def receive_welcome(fabric: Fabric, decision: Decision) -> Welcome:
    """A newcomer's side."""
    return receive(fabric, _speaker(decision), Welcome)


def _speaker(decision: Decision) -> int:
    return min(set(decision.members) - set(newcomers(decision)))
