"""One JSON line an event (:mod:`event_kinds`).

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
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from megatron.elastic.observe.event_kinds import EVENT_KINDS, LogEvent

__all__ = ["EventLog", "EventRecord", "clock_name", "read_events"]


def clock_name() -> str:
    """Return a name of this process's monotonic clock: that of its machine since the last boot, in its namespace."""
    names = [Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")]
    try:
        return f"{names[0].read_text().strip()} {os.readlink(names[1])}"
    except OSError:  # hidden in some containers: then it is this process's alone
        return f"{os.getpid()} {time.time_ns()}"


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


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

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
        self._told: set[str] = set()
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

    def is_new(self, name: str) -> bool:
        """Return whether ``name`` is asked for the first time: lets a caller tell once what it names."""
        known = name in self._told
        self._told.add(name)
        return not known

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
        line["event"] = body = {item.name: getattr(event, item.name) for item in fields(event)}
        try:
            text = _encode(line)
        except ValueError:  # a number that JSON lacks
            text = _encode({**line, "event": _to_json(body)})
        data = (text + "\n").encode()
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


@cache
def _fields_of(kind: str) -> tuple[tuple[str, Any], ...]:
    """Name and annotation of each field of a known kind; to work them out takes far longer than to read a line."""
    hints = get_type_hints(EVENT_KINDS[kind])
    return tuple((item.name, hints[item.name]) for item in fields(EVENT_KINDS[kind]))


def _parse(raw: dict[str, Any]) -> EventRecord:
    body: dict[str, Any] = raw["event"]
    event = None
    kind = raw["kind"]
    if kind in EVENT_KINDS:
        read = {name: _from_json(hint, body[name]) for name, hint in _fields_of(kind) if name in body}
        event = EVENT_KINDS[kind](**read)
    return EventRecord(
        kind, raw["wall"], raw["monotonic_ns"], raw["rank"], raw["incarnation"], raw["generation"], event, body
    )


def _loaded(line: bytes) -> Any:
    """The line, or the whole one behind a torn one that lacks its newline (in a JSON string quotes are escaped)."""
    try:
        return json.loads(line)
    except ValueError:
        last = line.rfind(_FIRST)
        if last <= 0 or not line.startswith(_FIRST):
            raise
        return json.loads(line[last:])


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
                record = _parse(_loaded(line))
            except (ValueError, KeyError, TypeError) as error:
                if isinstance(error, json.JSONDecodeError) and _torn(line):
                    continue  # cut short, an incarnation follows
                raise ValueError(f"{file}:{number}: not an event: {error!r}") from error
            latest = max(latest, record.wall)  # a clock set back must not reorder a rank's own lines
            records.append(record if record.wall == latest else _at(record, latest))
    return sorted(records, key=lambda record: record.wall)


def _at(record: EventRecord, wall: float) -> EventRecord:
    return EventRecord(**{**{item.name: getattr(record, item.name) for item in fields(record)}, "wall": wall})
