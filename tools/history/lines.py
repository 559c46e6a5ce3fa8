"""The lines of a job's event log, read without any code of the engine.

A folder holds one file a rank (``rank00000.jsonl``). Each incarnation of the rank appends to it, so the order of the
lines of a file is the order in which they were written. A rank that is killed may leave a cut last line: it is
counted, and left out. Anything else that is not an event is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Life", "Line", "Log", "Unreadable", "read"]

_FIRST = b'{"kind":'


class Unreadable(ValueError):
    """The folder holds no event log, or a file with something else in it."""


class Life(NamedTuple):
    """One incarnation of a rank."""

    rank: int
    incarnation: int

    def __str__(self) -> str:
        return f"rank {self.rank}.{self.incarnation}"


@dataclass(frozen=True)
class Line:
    """One event. ``fields``: what it says, by name."""

    file: str
    number: int
    kind: str
    life: Life
    generation: int
    monotonic_ns: int
    fields: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"

    @property
    def step(self) -> int:
        return int(self.fields["step"])

    @property
    def source(self) -> str:
        return str(self.fields.get("source", ""))

    @property
    def digest(self) -> str:
        return str(self.fields["digest"])


@dataclass(frozen=True)
class Log:
    """All lines of a folder, file by file in the order written. ``cut``: lines that a killed rank left unfinished."""

    lines: tuple[Line, ...]
    cut: int = 0


def read(folder: Path) -> Log:
    """Read the event log in ``folder``. Raises :class:`Unreadable`."""
    files = sorted(folder.glob("rank*.jsonl"))
    if not files:
        raise Unreadable(f"{folder}: no event log (files rank*.jsonl, of --elastic-event-log)")
    lines: list[Line] = []
    cut = 0
    for file in files:
        for number, raw in _raw_lines(file.read_bytes()):
            line = _line(file.name, number, raw)
            if line is None:
                cut += 1
            else:
                lines.append(line)
    return Log(tuple(lines), cut)


def _raw_lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line; a line that a later incarnation wrote behind a cut one is apart."""
    for number, raw in enumerate(content.split(b"\n"), 1):
        if not raw:
            continue
        last = raw.rfind(_FIRST)
        if last > 0 and not _is_json(raw):
            yield number, raw[:last]
            yield number, raw[last:]
        else:
            yield number, raw


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except ValueError:
        return False
    return True


def _line(file: str, number: int, raw: bytes) -> Line | None:
    """Return the event of a line; None if the line is cut short."""
    if not _is_json(raw):
        if raw[: len(_FIRST)] == _FIRST[: len(raw)]:
            return None
        raise Unreadable(f"{file}:{number}: not an event: {raw[:80]!r}")
    try:
        found = json.loads(raw)
        life = Life(int(found["rank"]), int(found["incarnation"]))
        times = int(found["generation"]), int(found["monotonic_ns"])
        return Line(file, number, str(found["kind"]), life, *times, dict(found["event"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"{file}:{number}: not an event: {error!r}") from None
