"""Processes of one peer's job: started with a mark, found by it, hit by a signal, ended by their ids.

Some peers leave the process group and the session of their parent (monitors that are daemons, workers of a launcher
that was killed). All inherit the mark in their environment, so none is missed.

Invariant: when :meth:`Job.end` returns, no process with the mark is alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tools.bench._jobs import ROOT, environment

__all__ = ["Command", "Job", "words_of"]

_MARK = "PEER_TRIAL"
_TELLING = re.compile(
    r"error|exception|timed? ?out|fail|exit (code|status)|lost|unreachable|refused|abort", re.IGNORECASE
)
_NOISE = re.compile(r"^\s*(File \"|\^|~)|warning|%\||\.{4,} ", re.IGNORECASE)
"""Places in a traceback, progress bars, and Megatron's listing of its arguments."""


@dataclass(frozen=True)
class Command:
    """A process to start: the coordinator of the job, a launcher, or a rank."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    coordinator: bool = False
    first_seconds: float = 0.0
    """How long to wait before the next command is started."""
    again: bool = False
    """Start it again a second after it was killed, as a supervisor of services does."""


def words_of(text: str, longest: int = 240) -> str:
    """Return the last line of an output that tells of a failure; empty if there is none."""
    lines = [line.strip() for line in text.splitlines() if _TELLING.search(line) and not _NOISE.search(line)]
    return lines[-1][-longest:] if lines else ""


class Job:
    """The processes that some commands started, in a folder that gets their output and logs."""

    def __init__(self, commands: Sequence[Command], folder: Path) -> None:
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self._output = (folder / "output.txt").open("ab")
        self._commands = list(commands)
        self._running = []
        for command in self._commands:
            self._running.append(self._start(command))
            time.sleep(command.first_seconds)

    def _start(self, command: Command) -> subprocess.Popen[bytes]:
        surroundings = environment(PYTHONUNBUFFERED="1", **{_MARK: self._mark}, **command.environment)
        return subprocess.Popen(
            command.words,
            cwd=ROOT,
            env=surroundings,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def ended(self) -> bool:
        """Return whether every command has ended."""
        return all(process.poll() is not None for process in self._running)

    @property
    def output(self) -> str:
        """Return all that the processes have written so far."""
        return (self.folder / "output.txt").read_text(errors="replace")

    def processes(self) -> list[int]:
        """Return the ids of all living processes of the job, whichever started them."""
        wanted, found = f"{_MARK}={self._mark}".encode(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def ranks(self) -> dict[int, int]:
        """Return rank → process, for every process that has opened its log."""
        return self._ranks_by_start() or self._ranks_by_open_log()

    def _ranks_by_start(self) -> dict[int, int]:
        """From the first lines of peers' logs; the newest process of a rank counts."""
        newest: dict[int, tuple[float, int]] = {}
        for path in self.folder.glob("rank*.*.jsonl"):
            with contextlib.suppress(json.JSONDecodeError, IndexError):
                line = json.loads(path.read_text().splitlines()[0])
                newest[line["rank"]] = max(newest.get(line["rank"], (0.0, 0)), (line["wall"], line["pid"]))
        return {rank: pid for rank, (_, pid) in newest.items()}

    def _ranks_by_open_log(self) -> dict[int, int]:
        """From the event logs that this project's ranks hold open."""
        found = {}
        for pid in self.processes():
            with contextlib.suppress(psutil.Error):
                for file in psutil.Process(pid).open_files():
                    match = re.search(r"/rank(\d+)\.jsonl$", file.path)
                    if match:
                        found[int(match[1])] = pid
        return found

    def strike(self, pids: Sequence[int], number: signal.Signals) -> float:
        """Send a signal to all ``pids``; return when (seconds since 1970)."""
        sent = time.time()
        for pid in pids:
            os.kill(pid, number)
        return sent

    def coordinators(self) -> list[int]:
        """Return the ids of the coordinators."""
        return [run.pid for run, told in zip(self._running, self._commands, strict=True) if told.coordinator]

    def restart_services(self) -> None:
        """Start those killed commands again that a supervisor would."""
        for index, command in enumerate(self._commands):
            if command.again and self._running[index].poll() is not None:
                self._running[index] = self._start(command)

    def end(self, seconds: float = 20.0) -> None:
        """Kill every process of the job. Raises ``RuntimeError`` if one is alive after ``seconds``."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._running:
                process.poll()
            time.sleep(0.05)
        self._output.close()
        if left := self.processes():
            raise RuntimeError(f"processes {left} of a peer's job do not end")
