"""The jobs of a proof: one command each, on the devices of this machine or on one of them.

Invariants: a job that fails or takes too long is a result (:attr:`Ran.fault`), never the end of the proof. Jobs that
run at once have no more ranks in all than the machine has cores, unless one has more by itself.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from megatron.elastic.observe.events import EventRecord, read_events
from tools.bench._jobs import PRETRAIN, QUIET, ROOT, command, environment

__all__ = ["DRAINED", "Cores", "Machine", "Ran", "on_platform"]

DRAINED = 3
"""Exit code of a job that was told to end."""
_OWN_CHECKPOINTS = {"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"}
"""Transformer Engine may read the scales of FP8 in checkpoints, which are pickles: the proof has written them."""
_Result = TypeVar("_Result")
_LEAVING = 30.0
"""Seconds in which a job that is told to end must have ended."""


@dataclass(frozen=True)
class Ran:
    """A job that has ended."""

    code: int
    output: str
    seconds: float
    events: list[EventRecord] = field(default_factory=list)

    @cached_property
    def losses(self) -> dict[int, float]:
        """Step → loss: of the event log with all digits, else as Megatron prints it."""
        steps = [record.fields for record in self.events if record.kind == "step"]
        if steps:
            return {step["step"]: step["losses"]["lm loss"] for step in steps if step["losses"]}
        found = {int(i): float(v) for i, v in re.findall(r"iteration\s+(\d+)/.*?lm loss: (\S+)", self.output)}
        if len(found) > 1:  # with its second step Megatron prints the mean of a process's first two
            first, second = list(found)[:2]
            found[second] = 2 * found[second] - found[first]
        return found

    @cached_property
    def milliseconds(self) -> list[float]:
        """Of each step, as Megatron prints it."""
        return [float(value) for value in re.findall(r"elapsed time per iteration \(ms\): (\S+)", self.output)]

    @property
    def memory_mb(self) -> dict[int, float]:
        """Rank → most device memory that was allocated, MB, as Megatron prints it after the first steps."""
        found = re.findall(r"\[Rank (\d+)\] .*?max allocated: ([\d.]+)", self.output)
        return {int(rank): float(value) for rank, value in found}

    @property
    def fault(self) -> str:
        """The end of the output of a job that failed; else nothing."""
        return "" if self.code in (0, DRAINED) else f"exit code {self.code}\n{self.output[-2000:]}"

    def of(self, kind: str) -> list[EventRecord]:
        """Events of one kind."""
        return [record for record in self.events if record.kind == kind]


def on_platform(platform: str, **more: str) -> dict[str, str]:
    """The variables of a process on ``platform``, which a package on PYTHONPATH may bring."""
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"ELASTIC_PLATFORM": platform, "CUDA_DEVICE_MAX_CONNECTIONS": "1", **_OWN_CHECKPOINTS, **more}
    return {**environment(), "PYTHONPATH": os.pathsep.join(places), **settings}


class Cores:
    """The processor cores that jobs share, one for each rank."""

    def __init__(self, count: int) -> None:
        self._count = self._free = count
        self._freed = threading.Condition()

    @contextmanager
    def held(self, ranks: int) -> Iterator[None]:
        """Hold a core for each of ``ranks``, or all of them if there are fewer; wait until they are free."""
        wanted = min(ranks, self._count)
        with self._freed:
            self._freed.wait_for(lambda: self._free >= wanted)
            self._free -= wanted
        try:
            yield
        finally:
            with self._freed:
                self._free += wanted
                self._freed.notify_all()


@dataclass(frozen=True)
class Machine:
    """Devices of one platform, as ``ELASTIC_PLATFORM`` names it. ``one``: variables that leave one device visible.

    ``script``: what jobs run.
    """

    platform: str
    devices: int
    one: Mapping[str, str]
    folder: Path
    script: str = PRETRAIN
    cores: Cores = field(default_factory=lambda: Cores(os.cpu_count() or 1))

    def environment(self, one_device: bool = False) -> dict[str, str]:
        """The variables of a job."""
        return on_platform(self.platform, **(self.one if one_device else {}))

    def side_by_side(self, calls: Sequence[Callable[[], _Result]]) -> list[_Result]:
        """Return what ``calls`` return; their jobs run at once, as far as there are cores. For what is not timed."""
        with ThreadPoolExecutor(max(1, len(calls))) as threads:
            return list(threads.map(lambda call: call(), calls))

    def job(
        self,
        name: str,
        ranks: int,
        *flags: str,
        elastic: bool = True,
        one_device: bool = False,
        seconds: float = 180.0,
        until: Callable[[list[EventRecord], str], bool] | None = None,
        given: Mapping[str, str] = MappingProxyType({}),
    ) -> Ran:
        """Run the script on ``ranks`` processes. ``until``: the job has no end, and is told to end then.

        ``given``: further variables.
        """
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        events = folder / "events"
        own = ("--elastic", "--elastic-event-log", str(events)) if elastic else ()
        words = command(ranks, *QUIET, *flags, *own, script=self.script)
        said = folder / "output.txt"
        with self.cores.held(ranks), said.open("w") as out:
            began = time.monotonic()
            running = subprocess.Popen(
                words, cwd=ROOT, env={**self.environment(one_device), **given}, stdout=out, stderr=subprocess.STDOUT
            )
            code = _followed(running, events, said, began + seconds, until)
        found = read_events(events) if events.is_dir() else []
        return Ran(code, said.read_text(errors="replace"), time.monotonic() - began, found)


def _followed(
    running: subprocess.Popen[bytes],
    events: Path,
    said: Path,
    end: float,
    until: Callable[[list[EventRecord], str], bool] | None,
) -> int:
    """Return the exit code of a job, which ends at its own end, when ``until`` holds, or at ``end``."""
    try:
        while running.poll() is None and time.monotonic() < end:
            if until is not None and events.is_dir() and until(read_events(events), said.read_text(errors="replace")):
                running.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    running.wait(_LEAVING)
                break
            time.sleep(0.5)
    finally:
        if running.poll() is None:
            running.kill()
    return running.wait()
