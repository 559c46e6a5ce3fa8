"""The answers of an agent to ``ctl``. In JSON ``answer`` names the type of each."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from megatron.elastic.comm.address import Rank
from megatron.elastic.control.history import LossNote
from megatron.elastic.control.observations import ExpertLoads, Protection, Recovered
from megatron.elastic.control.requests import ReshapeState
from megatron.elastic.control.wire import Codec, Int64

__all__ = [
    "ANSWERS",
    "Acceptance",
    "Answer",
    "GenerationStatus",
    "HistoryStatus",
    "JobStatus",
    "NodeStatus",
    "ProgressStatus",
    "RankStatus",
    "Refusal",
    "ReshapeStatus",
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
    finding: str = ""
    """The finding of its hardware checks; while there is one, its lost ranks are not started again."""


class ReshapeStatus(_StatusPart, frozen=True):
    """The newest request for other sizes; ``number`` 0: there was none."""

    number: Int64
    sizes: str
    state: ReshapeState
    text: str
    """The newest line about it from a member."""


class WorkerStatus(_StatusPart, frozen=True):
    """A worker on the agent's node."""

    pid: Int64
    step: Int64
    phase: str
    waiting_for: tuple[Rank, ...]
    idle_s: float
    """Seconds since it last made progress."""


class ProgressStatus(_StatusPart, frozen=True):
    """The newest committed step that the agent has seen on its node, and the rate of the last minute of steps."""

    step: Int64
    target: Int64 | None
    """The last step of the run, if it is known."""
    samples: Int64
    step_s: float
    """Duration of the newest step."""
    steps_per_s: float | None
    """Rate over the last minute of steps and all that lay between them."""
    left_s: float | None
    """Estimate of the seconds until the target."""
    loss: float | None
    ago_s: float
    """Seconds since it was committed."""
    mean_step_s: float | None = None
    """Mean duration of the last minute of steps, without what lay between them; None from an older agent."""


class HistoryStatus(_StatusPart, frozen=True):
    """Losses, recoveries and lost time since the launch (:class:`megatron.elastic.control.history.JobHistory`)."""

    losses: Int64
    recoveries: Int64
    changes: Int64
    lost_steps: Int64
    mttr_s: float | None
    """Mean seconds of a recovery from noticing the loss to being able to go on."""
    lost_s: Mapping[str, float]
    """Seconds by cause."""
    unprotected_s: float
    first_step: Int64
    """First step committed in this launch; −1: none yet."""
    stepping_s: float
    """Seconds since that step."""
    goodput: float | None
    """Share of that time that went into steps that count."""
    protection: Protection
    last_losses: tuple[LossNote, ...]
    last_recoveries: tuple[Recovered, ...]


class JobStatus(_Answer, frozen=True, tag="status"):
    """The state of the job, as one agent knows it."""

    run_id: str
    up_s: float
    """Seconds since this agent started."""
    job_s: float
    """Seconds of the job: since the agent that was first started. Times of losses and recoveries count so."""
    state: str
    """'starting', 'training', 'recovering', or 'draining'."""
    progress: ProgressStatus | None
    """None before the first step, and on a node without members."""
    generation: GenerationStatus
    members: tuple[Rank, ...]
    pending: tuple[str, ...]
    """Requests that members are to honour at their next boundary."""
    tolerance: ToleranceStatus
    reshape: ReshapeStatus
    moving: str
    """The layers that move between ranks now; empty: none, or none known on this node."""
    history: HistoryStatus
    ranks: Mapping[Rank, RankStatus]
    nodes: Mapping[Int64, NodeStatus]
    workers_here: Mapping[Rank, WorkerStatus]
    expert_loads: ExpertLoads | None = None
    """None without experts that ranks share, before the first step, and on a node without members."""


Answer = Refusal | Acceptance | JobStatus
ANSWERS: Codec[Answer] = Codec(Answer)
