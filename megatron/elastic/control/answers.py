"""The answers of an agent to ``ctl``. In JSON ``answer`` names the type of each."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from megatron.elastic.comm.address import Rank
from megatron.elastic.control.wire import Codec, Int64

__all__ = [
    "ANSWERS",
    "Acceptance",
    "Answer",
    "GenerationStatus",
    "JobStatus",
    "NodeStatus",
    "RankStatus",
    "Refusal",
    "ToleranceStatus",
    "WorkerStatus",
]


class _Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="answer"):
    """Base of the answers."""


class _StatusPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the parts of a status."""


class Refusal(_Answer, frozen=True, tag="refused"):
    """The command is not carried out, for the reason ``error``."""

    error: str


class Acceptance(_Answer, frozen=True, tag="accepted"):
    """The command ``accepted`` is in the job's journal."""

    accepted: str
    run_id: str
    ranks: tuple[Rank, ...]


class GenerationStatus(_StatusPart, frozen=True):
    """The newest generations: the decided one, the frozen one, and the ranks whose report for it is ``missing``."""

    decided: Int64
    frozen: Int64
    missing: tuple[Rank, ...]


class ToleranceStatus(_StatusPart, frozen=True):
    """The losses that ``generation`` can survive, in one line."""

    generation: Int64
    text: str


class RankStatus(_StatusPart, frozen=True):
    """A rank of the job."""

    standing: str
    incarnation: Int64
    returns: bool
    """True if it is started again when it is lost."""


class NodeStatus(_StatusPart, frozen=True):
    """A node of the job."""

    host: str
    alive: bool
    losses_in_1h: Int64
    out_s: float
    """Seconds for which its lost ranks are not started again."""


class WorkerStatus(_StatusPart, frozen=True):
    """A worker on the agent's node."""

    pid: Int64
    step: Int64
    phase: str
    waiting_for: tuple[Rank, ...]
    idle_s: float
    """Seconds since it last made progress."""


class JobStatus(_Answer, frozen=True, tag="status"):
    """The state of the job, as one agent knows it."""

    run_id: str
    up_s: float
    """Seconds since this agent started."""
    generation: GenerationStatus
    members: tuple[Rank, ...]
    pending: tuple[str, ...]
    """Requests that members are to honour at their next boundary."""
    tolerance: ToleranceStatus
    ranks: Mapping[Rank, RankStatus]
    nodes: Mapping[Int64, NodeStatus]
    workers_here: Mapping[Rank, WorkerStatus]


Answer = Refusal | Acceptance | JobStatus
ANSWERS: Codec[Answer] = Codec(Answer)
