"""How a rank that was not here becomes part of the job.

A newcomer runs the user's script in a world of one and waits to be admitted. At
a step boundary all members let it in (a generation like any other, reason
``join``), or wherever they are when they cannot go on without it (:mod:`wait_for_ranks`).
What it cannot know it is told once, in a :class:`JoinState`: the layouts, the
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
from megatron.elastic.engine.generation.configuration import Configuration, History
from megatron.elastic.engine.generation.hardware import Hardware
from megatron.elastic.engine.generation.report import newcomers
from megatron.elastic.engine.transaction.fence import EntryPoint
from megatron.elastic.state.layout import ParamSpec
from megatron.elastic.state.record import StepRecord

__all__ = ["JoinState", "receive_join_state", "send_join_state"]


@dataclass(frozen=True)
class JoinState:
    """Everything a newcomer needs besides tensors."""

    catalog: Mapping[tuple[int, int], tuple[ParamSpec, ...]]
    hardware: Hardware
    configuration: Configuration
    """Who holds what, as promoted for the generation that admits it."""
    confirmed: Configuration
    """What ``record`` names: where to start from should this generation end at once."""
    record_text: str
    """:attr:`record` as its text, which its digest is of: there 2 and 2.0 differ, in a message of types they do not."""
    place: EntryPoint
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
        return History(self.confirmed, self.configuration)


def send_join_state(fabric: Fabric, decision: Decision, join_state: Callable[[], JoinState]) -> None:
    """Members' side: the lowest of them sends ``join_state()`` to each newcomer."""
    if fabric.rank == _speaker(decision):
        message = join_state()
        for rank in newcomers(decision):
            send(fabric, rank, message)


def receive_join_state(fabric: Fabric, decision: Decision) -> JoinState:
    """A newcomer's side: what the lowest member sends."""
    return receive(fabric, _speaker(decision), JoinState)


def _speaker(decision: Decision) -> int:
    return min(set(decision.members) - set(newcomers(decision)))
