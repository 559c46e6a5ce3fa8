"""The kinds of events that a rank logs, one dataclass each (:mod:`events` writes and reads them).

Fields hold JSON values, tuples and string-keyed dicts of them, so that an event is read back as it was logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

__all__ = [
    "EVENT_KINDS",
    "BeginEvent",
    "CertificateEvent",
    "ClockEvent",
    "EndEvent",
    "ExpertsEvent",
    "GenerationEvent",
    "LogEvent",
    "LostStateEvent",
    "MigrationEvent",
    "PhasesEvent",
    "PlanEvent",
    "ProtectionEvent",
    "RankLostEvent",
    "ReadyEvent",
    "RecordEvent",
    "RecoveryEvent",
    "ReportEvent",
    "SlowRankEvent",
    "StepEvent",
    "SubstitutionEvent",
    "ToleranceEvent",
    "TraceEvent",
]


@dataclass(frozen=True)
class LogEvent:
    """Base of what is logged. Fields hold JSON values, tuples and string-keyed dicts of them."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True)
class GenerationEvent(LogEvent):
    """A generation after the first in which steps went on, as one of its members saw it."""

    kind: ClassVar[str] = "generation"
    number: int
    reason: str
    """'loss', 'join', 'drain' or 'reform'."""
    members: tuple[int, ...]
    lost: tuple[int, ...] = ()
    """Ranks lost since steps last went on."""
    joined: tuple[int, ...] = ()
    parked: tuple[int, ...] = ()
    """Members that compute nothing."""
    left_out: tuple[int, ...] = ()
    """Nodes whose lost ranks are not started again for now: they lost some more often than the others."""


@dataclass(frozen=True)
class BeginEvent(LogEvent):
    """The first line of an incarnation."""

    kind: ClassVar[str] = "begin"
    run: str
    """Name of the job (``--rdzv-id``, or made up)."""
    clock: str
    """Monotonic times of lines can be compared where this is equal (:func:`clock_name`)."""


@dataclass(frozen=True)
class RecordEvent(LogEvent):
    """The record that a rank holds as its newest from here on. Written before the rank acts on it.

    ``tools/history`` judges a run by these lines, with those of copies, losses and ends.
    """

    kind: ClassVar[str] = "record"
    step: int
    """Version of the record: the number of committed steps."""
    source: str
    """'vote'; or at the begin of this line's generation: 'start', 'load', 'decision' or 'join'."""
    digest: str
    """Of the whole record."""
    before: str = ""
    """Digest of the record that the vote was taken on; empty without a vote."""
    samples: tuple[int, int] | None = None
    """Of the step that the vote committed: it used [first, end) of the nominal grid."""
    gradient: tuple[int, int, int] | None = None
    """Version, generation and attempt of the computation whose gradients made this version."""
    ledger: str = ""
    grad_norm: float | None = None
    skipped: bool = False
    members: tuple[int, ...] = ()
    """Of the generation; empty with a vote."""
    placement: str = ""
    """Digest of the configuration in force from here on: the one that the vote named, or the decision went on with."""
    homes: tuple[tuple[int, ...], ...] = ()
    """Sets of ranks of which each holds all copies of some block, by the configuration that the vote named. In the
    first vote of this incarnation that names it, else empty."""
    oldest: int | None = None
    """Lowest version of this rank's copies when it joined the vote; -1 without copies, None without a vote."""
    retained: int = 0
    """Most gradients that one copy retained since the vote before."""
    coming: bool | None = None
    """While missing copies are made: whether this rank could say, before it shipped, that its part will be there before
    the vote. None: none are made, or an earlier vote has agreed on them."""
    short: int = 0
    """Blocks that lack mirrors by the configuration that the vote named; counted only where ``coming`` is not None."""
    resolution: str = ""
    """With a decision: 'roll_forward', 'revote' or 'rerun'."""
    again: tuple[int, int, int] | None = None
    """The gradients on which a 'revote' takes the vote again."""


@dataclass(frozen=True)
class ReportEvent(LogEvent):
    """The copies, gradients and statistics that a rank reports after a loss. Written before it reports them.

    The line's generation is the one that the rank leaves.
    """

    kind: ClassVar[str] = "report"
    step: int
    """Version of the newest record that it knows."""
    oldest: int
    """Lowest and highest version of its copies; -1 without copies."""
    newest: int
    gradients: tuple[tuple[int, int, int], ...]
    """Complete: each copy that needs a gradient of this key retains it."""
    rows: tuple[tuple[int, int, int, int, int], ...]
    """(step, generation, attempt, first, end): rows of the batch whose statistics it knows, by key."""
    voting: str
    """Digest of the configuration that the vote under way is to name."""
    torn: int = 0
    """Copies whose update was interrupted."""
    admitted: bool = False
    """It has not voted since it was let in, so its copies do not count."""


@dataclass(frozen=True)
class LostStateEvent(LogEvent):
    """State is lost as the reports say, and the copies of it that this rank holds all the same."""

    kind: ClassVar[str] = "lost_state"
    step: int
    """The newest version that a report names."""
    blocks: int
    """Number of blocks without a copy that could go on."""
    held: tuple[tuple[int, int, int, int, tuple[tuple[int, int, int], ...]], ...] = ()
    """(unit, shard, number, version, keys of retained gradients) of each copy of these blocks here."""


@dataclass(frozen=True)
class EndEvent(LogEvent):
    """The end of an incarnation that ends on purpose."""

    kind: ClassVar[str] = "end"
    step: int
    """The newest committed step that it knows; -1 before the first record."""
    code: int
    """Exit status."""
    why: str = ""
    """Empty at the end of the training."""


@dataclass(frozen=True)
class ReadyEvent(LogEvent):
    """A rank that comes later has run everything up to its admission, and waits for it."""

    kind: ClassVar[str] = "ready"
    rehearsed_seconds: float | None
    """Time of the rehearsal of its first pass; None: there was none."""


@dataclass(frozen=True)
class RankLostEvent(LogEvent):
    """One lost incarnation, where it stood, and everything known of its end."""

    kind: ClassVar[str] = "loss"
    lost_rank: int
    lost_incarnation: int
    host: str
    cause: str
    """'signal SIGKILL', 'exit code 1', 'stopped', 'node unreachable', 'hung'."""
    step: int
    last_lines: tuple[str, ...] = ()
    tensor_parallel_group: tuple[int, ...] = ()
    stage: int | None = None
    replica: int | None = None


@dataclass(frozen=True)
class PlanEvent(LogEvent):
    """The plan a generation runs."""

    kind: ClassVar[str] = "plan"
    step: int
    plan_hash: str
    stages: tuple[tuple[int, int, int, int], ...]
    """(replica, cell, first unit, end unit) of every segment."""
    rows: dict[str, int]
    """Cell → rows of the global batch it computes."""
    labels: tuple[str, ...] = ()
    planning_seconds: float = 0.0


@dataclass(frozen=True)
class PhasesEvent(LogEvent):
    """Time one rank spent in each phase of one step, nanoseconds."""

    kind: ClassVar[str] = "phases"
    step: int
    nanoseconds: dict[str, int]
    state_bytes: int = 0
    """Bytes of optimizer state this rank had received from others by then, since it came."""
    applied: tuple[tuple[int, int, int, int], ...] = ()
    """(version, step, generation, attempt): gradients that copies were updated by since the line before, by version."""


@dataclass(frozen=True)
class TraceEvent(LogEvent):
    """Timeline of one rank since the line before (``--elastic-trace``), by its monotonic clock."""

    kind: ClassVar[str] = "trace"
    step: int
    phases: tuple[tuple[str, int, int], ...]
    """(phase, start ns, end ns), an abandoned attempt's included."""
    work: tuple[tuple[str, int, int, int, int, int], ...]
    """(op, piece, first unit, end unit, start ns, end ns) of every computation."""


@dataclass(frozen=True)
class RecoveryEvent(LogEvent):
    """A change of the generation on one rank, from noticing it to being able to go on; or the way back to a checkpoint.

    A rank whose way back is to a checkpoint ends with this event, like all others.
    """

    kind: ClassVar[str] = "recovery"
    step: int
    """The step under way, or between steps the newest committed one; with 'checkpoint' the first that is repeated."""
    outcome: str
    """With a step under way: 'finished' (its vote was known), 'voted again', 're-run', or 'rolled forward' (to the
    version before it). Else: 'between steps', 'some ranks left as asked', or 'checkpoint'. Ranks that came are told
    first: 'joined by 2, 3', behind a comma the outcome of the step if ranks were lost in it."""
    seconds: dict[str, float]
    """By phase, in order: 'decide', 'edit', 'plan', 'settle'. Empty with 'checkpoint'."""
    lost_steps: int = 0
    links_opened: int = 0
    """Links to other ranks that this rank opened while all waited for it."""
    links_ahead: int = 0
    """Links to newcomers that existed before: opened while the members trained."""


@dataclass(frozen=True)
class MigrationEvent(LogEvent):
    """Copies of state that changed place while steps went on, as one rank saw it."""

    kind: ClassVar[str] = "migration"
    step: int
    """The last step before the new placement."""
    added: int
    promoted: int
    dropped: int
    bytes_received: int
    """State bytes that came to this rank in added copies."""
    background_seconds: float
    """From the first byte to the end of the step whose vote named the new placement, without the stall."""
    stall_seconds: float
    """Seconds that this rank waited for it."""
    seconds: dict[str, float] = field(default_factory=dict)
    """The same by what for: finish (before shipping), switch (after the vote), certificate (after the gather)."""
    urgent: bool = False
    """Only copies that a loss left missing: begun in the recovery."""


@dataclass(frozen=True)
class ProtectionEvent(LogEvent):
    """Every block has its mirrors again, after a loss left some with fewer; from each rank that was there all along."""

    kind: ClassVar[str] = "protection"
    step: int
    """The step whose vote named the last of them."""
    time_unprotected_s: float
    """From noticing the loss to that vote. A further loss meanwhile counts into it."""
    steps: int
    """Committed in that time, this one included."""
    blocks: int
    """The most that were short of a mirror at one time."""


@dataclass(frozen=True)
class ToleranceEvent(LogEvent):
    """Losses that the state survives from here on; written when it changes, by the lowest living rank."""

    kind: ClassVar[str] = "tolerance"
    step: int
    """The newest committed one."""
    ranks: int
    """Any so many ranks at once."""
    nodes: int
    """Any so many nodes at once."""
    racks: tuple[int, ...] = ()
    """The same for each level of domains around nodes, if nodes have labels that name them."""
    fatal_nodes: tuple[tuple[str, ...], ...] = ()
    """Sets of one node more, by the hosts in them, whose loss takes state along."""
    short: int = 0
    """Blocks that lack copies."""
    text: str = ""
    """As in the log."""
    placement: str = ""
    """Digest of the configuration whose copies it counts."""
    homes: tuple[tuple[int, ...], ...] = ()
    """Sets of ranks of which each holds all copies of some block."""


@dataclass(frozen=True)
class CertificateEvent(LogEvent):
    """Outcome of a certificate: what was checked, over how much, how long it took."""

    kind: ClassVar[str] = "certificate"
    step: int
    transition: str
    """'start', 'load', 'recovery', 'join', 'migration', 'rolling'."""
    passed: bool
    blocks: int
    mirrors: int
    seconds: float
    """Seconds that all ranks waited for it."""
    contents: int = 0
    """Copies whose contents were hashed; of the others tables and lineages were compared."""
    digest: str = ""
    """Over all statements: the same on every rank."""
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepEvent(LogEvent):
    """A committed step."""

    kind: ClassVar[str] = "step"
    step: int
    samples: tuple[int, int]
    """Consumed samples before and after: the step used [first, end) of the nominal grid."""
    seconds: float
    losses: dict[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    learning_rate: float | None = None
    loss_scale: float | None = None
    skipped: bool = False
    attempts: int = 1
    """1, or more when a loss had the step computed again."""
    ledger: str = ""
    """Hash of (row, sample) assignments."""
    computed: int | None = None
    """Samples computed: fewer than consumed where the policy lets the batch shrink."""


@dataclass(frozen=True)
class ExpertsEvent(LogEvent):
    """The measured load of experts that ranks share, from the lowest living rank once in a while."""

    kind: ClassVar[str] = "experts"
    step: int
    tokens: dict[str, tuple[int, ...]]
    """Unit → tokens of a step by expert, a mean over the last steps."""
    imbalance: float
    """Tokens of the busiest rank in each layer, summed over layers, relative to those of a mean rank: 1 is even. The
    largest over the groups of ranks that share experts."""
    replicas: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Unit → number of ranks that compute each expert, of units where some have several; the most in one group."""


@dataclass(frozen=True)
class SubstitutionEvent(LogEvent):
    """A setting replaced for this platform."""

    kind: ClassVar[str] = "substitution"
    flag: str
    asked: str
    used: str
    reason: str


@dataclass(frozen=True)
class ClockEvent(LogEvent):
    """A rank's device was set to another clock (``--elastic-frequency``)."""

    kind: ClassVar[str] = "clock"
    step: int
    """The first step computed at it."""
    asked_khz: int
    set_khz: int
    observed_khz: int
    verified: bool
    power_mw: int | None = None
    """Power in milliwatts; None where the platform does not tell it."""


@dataclass(frozen=True)
class SlowRankEvent(LogEvent):
    """A rank's measured speed changed enough to plan anew."""

    kind: ClassVar[str] = "slow_rank"
    step: int
    slow_rank: int
    speed_ppm: int
    """Relative to nominal: 500000 is half speed."""


EVENT_KINDS: Mapping[str, type[LogEvent]] = {
    event.kind: event
    for event in (
        BeginEvent,
        RecordEvent,
        EndEvent,
        ReportEvent,
        LostStateEvent,
        GenerationEvent,
        RankLostEvent,
        PlanEvent,
        PhasesEvent,
        TraceEvent,
        RecoveryEvent,
        MigrationEvent,
        ProtectionEvent,
        CertificateEvent,
        StepEvent,
        ExpertsEvent,
        SubstitutionEvent,
        SlowRankEvent,
        ClockEvent,
        ReadyEvent,
        ToleranceEvent,
    )
}
