"""One JSON line an event.

Each incarnation of a rank appends to its rank's file in the event directory; a
line is one ``write`` to a descriptor opened with ``O_APPEND``, so lines of two
incarnations never mix. A SIGKILL can cut a write short at a page boundary: the next
incarnation then starts on a line of its own, and readers leave the torn one out. Every line carries
rank, incarnation and generation (nothing outside a process is written without
them), wall time for people and other hosts, and monotonic time for durations.

Invariant: an event that was logged can be read back as the same dataclass
(:func:`read_events`). Readers ignore fields they do not know, and keep events of
a kind they do not know as plain fields. A log that cannot be written (disk full)
is given up with one line on stderr: training goes on.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

__all__ = [
    "EVENT_KINDS",
    "CertificateEvent",
    "ClockEvent",
    "EventLog",
    "EventRecord",
    "GenerationEvent",
    "LogEvent",
    "MigrationEvent",
    "PhasesEvent",
    "PlanEvent",
    "ProtectionEvent",
    "RankLostEvent",
    "ReadyEvent",
    "RecoveryEvent",
    "SlowRankEvent",
    "StepEvent",
    "SubstitutionEvent",
    "ToleranceEvent",
    "TraceEvent",
    "read_events",
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
class ReadyEvent(LogEvent):
    """A rank that comes later has run everything up to its admission, and waits for it."""

    kind: ClassVar[str] = "ready"


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
    """Where the platform gives it."""


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
        SubstitutionEvent,
        SlowRankEvent,
        ClockEvent,
        ReadyEvent,
        ToleranceEvent,
    )
}


def _to_json(value: Any) -> Any:
    """JSON has no NaN and no infinity: they travel as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_to_json(item) for item in value]
    return value


def _from_json(hint: Any, value: Any) -> Any:
    """``value`` as the annotation ``hint`` wants it (tuples, floats, optional fields)."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        kept = next(arm for arm in arguments if arm is not type(None))
        return None if value is None else _from_json(kept, value)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_from_json(arguments[0], item) for item in value)
        return tuple(_from_json(arm, item) for arm, item in zip(arguments, value, strict=True))
    if origin is dict:
        return {key: _from_json(arguments[1], item) for key, item in value.items()}
    return float(value) if hint is float else value


_FIRST = b'{"kind":'
"""The beginning of every line."""


class EventLog:
    """Appends events of one incarnation of a rank; does nothing when ``directory`` is None.

    A log that cannot be opened or written costs one line on stderr. Start-up refuses a folder that cannot serve at
    all; a rank that joins later is not kept out by a disk that is full.

    Set ``generation`` when a new one is decided: later lines carry it.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, rank: int, incarnation: int = 0) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.generation = 0
        self._file: int | None = None
        self._held: tuple[LogEvent, float, int] | None = None
        if directory is None:
            return
        path = Path(directory)
        try:
            path.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(path / f"rank{rank:05d}.jsonl", flags, 0o644)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                os.write(self._file, b"\n")  # an earlier incarnation was killed in the middle of a line
        except OSError as error:
            self._give_up(error)

    @property
    def enabled(self) -> bool:
        """False when nothing would be written: lets a caller skip gathering what it would say."""
        return self._file is not None

    def hold(self, event: LogEvent) -> None:
        """Keep what another rank is to write; should that one die first, :meth:`write_held` says it."""
        self._held = (event, time.time(), time.monotonic_ns())

    def write_held(self) -> None:
        """Write what was held last, once. The dead rank may have written it too: readers take either."""
        held, self._held = self._held, None
        if held is not None:
            self._append(*held)

    def write(self, event: LogEvent) -> None:
        """Append one line. Never raises for an unwritable file: says so once and stops logging."""
        self._append(event, time.time(), time.monotonic_ns())

    def _append(self, event: LogEvent, wall: float, monotonic_ns: int) -> None:
        if self._file is None:
            return
        line: dict[str, Any] = {
            "kind": event.kind,
            "wall": wall,
            "monotonic_ns": monotonic_ns,
            "rank": self.rank,
            "incarnation": self.incarnation,
            "generation": self.generation,
        }
        body = {item.name: _to_json(getattr(event, item.name)) for item in fields(event)}
        data = (json.dumps({**line, "event": body}, separators=(",", ":")) + "\n").encode()
        try:
            written = os.write(self._file, data)
            if written != len(data):
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                raise OSError(f"{written} of {len(data)} bytes written")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        why = f"{error}: free space, or give another folder"
        print(f"--elastic-event-log: rank {self.rank} logs no more events: {why}", file=sys.stderr, flush=True)
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


@dataclass(frozen=True)
class EventRecord:
    """A line read back. ``event`` is None for a kind this version does not know; ``fields`` has it raw."""

    kind: str
    wall: float
    monotonic_ns: int
    rank: int
    incarnation: int
    generation: int
    event: LogEvent | None
    fields: dict[str, Any]


def _parse(line: bytes) -> EventRecord:
    raw = json.loads(line)
    body: dict[str, Any] = raw["event"]
    event = None
    if (known := EVENT_KINDS.get(raw["kind"])) is not None:
        hints = get_type_hints(known)
        event = known(**{f.name: _from_json(hints[f.name], body[f.name]) for f in fields(known) if f.name in body})
    return EventRecord(
        raw["kind"], raw["wall"], raw["monotonic_ns"], raw["rank"], raw["incarnation"], raw["generation"], event, body
    )


def _after_torn(line: bytes) -> bytes:
    """The whole line behind a torn one that lacks its newline (inside a JSON string the quotes would be escaped)."""
    last = line.rfind(_FIRST)
    return line[last:] if last > 0 and line.startswith(_FIRST) and not _is_json(line) else line


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _torn(line: bytes) -> bool:
    """True if ``line`` can be the beginning of one of our lines."""
    return line[: len(_FIRST)] == _FIRST[: len(line)] and not line.endswith(b"}}")


def read_events(directory: str | os.PathLike[str]) -> list[EventRecord]:
    """All events of a run, by wall time (within a rank, in the order written).

    Lines cut short by the death of their writer are left out. Raises ``ValueError`` with file
    and line for anything else that is not an event, ``FileNotFoundError`` for a missing directory.
    """
    path = Path(directory)
    if not path.is_dir():
        raise FileNotFoundError(f"no event log directory {path}")
    records: list[EventRecord] = []
    for file in sorted(path.glob("rank*.jsonl")):
        lines = file.read_bytes().split(b"\n")
        latest = -math.inf
        for number, line in enumerate(lines, 1):
            if number == len(lines):
                break  # empty, or cut short
            try:
                record = _parse(_after_torn(line))
            except (ValueError, KeyError, TypeError) as error:
                if isinstance(error, json.JSONDecodeError) and _torn(line):
                    continue  # cut short, an incarnation follows
                raise ValueError(f"{file}:{number}: not an event: {error!r}") from error
            latest = max(latest, record.wall)  # a clock set back must not reorder a rank's own lines
            records.append(record if record.wall == latest else _at(record, latest))
    return sorted(records, key=lambda record: record.wall)


def _at(record: EventRecord, wall: float) -> EventRecord:
    return EventRecord(**{**{item.name: getattr(record, item.name) for item in fields(record)}, "wall": wall})
