"""One trial of ``tools.bench.peers``: a contender's job, a fault from outside, and the figures of both.

A job trains until it is ended from outside. With a fault it runs some steps whole, is hit half a step after a commit,
and is watched until it has recovered, and is whole again where a lost rank comes back, and some steps more; or until
no process of it is left; or until the patience ends. A job that a 'kill' leaves whole is hit again, some times.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools.bench import _peer_contenders as contenders
from tools.bench._peer_contenders import CONTENDERS, Place
from tools.bench._peer_figures import (
    History,
    Strike,
    figures_of,
    losses_by_step,
    normal_step,
    read_own_log,
    read_peer_log,
)
from tools.bench._peer_processes import Command, Job, words_of
from tools.bench.peers_programs.layouts import LAYOUTS, PLAIN, Layout
from tools.training_log import iterations_of

__all__ = ["BASELINES", "FAULTS", "STEPS", "Fault", "Setting", "Trial", "run_trial"]

STEPS = 600
"""More than any job gets to; all have the same number, since it decides the order of Megatron's samples."""
WHOLE_STEPS, TAIL_STEPS = 8, 5
"""Steps before a fault; steps after the recovery, or after the return of a lost rank."""
START_SECONDS = 150.0
PORTS = 8


@dataclass(frozen=True)
class Fault:
    """A signal to some ranks, or to the coordinator where there are none."""

    number: signal.Signals
    ranks: Callable[[int], tuple[int, ...]]
    returns: bool = True
    """Whether what was lost may be started again."""


FAULTS: Mapping[str, Fault] = {
    "kill": Fault(signal.SIGKILL, lambda ranks: (ranks - 1,)),
    "stay": Fault(signal.SIGKILL, lambda ranks: (ranks - 1,), returns=False),
    "rank0": Fault(signal.SIGKILL, lambda ranks: (0,)),
    "coordinator": Fault(signal.SIGKILL, lambda ranks: ()),
    "two": Fault(signal.SIGKILL, lambda ranks: (1, 2)),
    "stop": Fault(signal.SIGSTOP, lambda ranks: (ranks - 1,)),
}
BASELINES = {"plain": (contenders.plain, "torch"), "megatron": (contenders.megatron, "")}
"""Start and environment of the jobs that steady overhead is measured against."""


@dataclass(frozen=True)
class Setting:
    """What all trials of a run share."""

    pythons: Mapping[str, Path]
    """Interpreter by environment."""
    data: Path
    ranks: int
    calm_steps: int
    patience: float
    losses: int
    """Under 'kill', one after the other in the same job, where a lost rank comes back."""
    scratch: Path = field(default_factory=lambda: Path("/dev/shm"))
    """Logs and checkpoints lie in memory, the best that a user could do for a checkpoint at every step."""


@dataclass(frozen=True)
class Trial:
    """One job of one contender (or baseline)."""

    contender: str
    fault: str
    """Of :data:`FAULTS`, or 'calm'."""
    number: int
    layout: str = PLAIN.name

    @property
    def name(self) -> str:
        layout = () if self.layout == PLAIN.name else (self.layout,)
        return ".".join((self.contender, *layout, self.fault, str(self.number)))


def run_trial(trial: Trial, setting: Setting) -> dict[str, Any]:
    """Run one job; return its figures as JSON values. Raises ``RuntimeError`` with its output if it does not train."""
    started = time.monotonic()
    start: Callable[[Place], list[Command]]
    if trial.contender in BASELINES:
        start, environment = BASELINES[trial.contender]
        read, comes_back, loses_replica = read_peer_log if environment else None, False, False
    else:
        contender = CONTENDERS[trial.contender]
        start, environment = contender.start, contender.environment
        read, comes_back = read_own_log if contender.own else read_peer_log, contender.returns
        loses_replica = contender.loses_replica
    returns = trial.fault == "calm" or FAULTS[trial.fault].returns
    with tempfile.TemporaryDirectory(prefix="peers-", dir=setting.scratch) as name:
        folder, port = Path(name), contenders.free_ports(PORTS)
        python = setting.pythons.get(environment, Path())
        layout = LAYOUTS[trial.layout]
        place = Place(python, folder, setting.data, setting.ranks, STEPS, port, returns, layout)
        job = Job(start(place), folder)
        try:
            watched = Watched(job, read, setting, comes_back, layout if loses_replica else PLAIN)
            found = watched.calm() if trial.fault == "calm" else watched.hit(trial.fault)
        finally:
            job.end()
    return {
        **asdict(trial),
        **found,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "took_s": round(time.monotonic() - started, 1),
        "load": round(os.getloadavg()[0], 1),
    }


@dataclass(frozen=True)
class Watched:
    """A job under way. ``read`` reads its log; None: plain Megatron, whose log is its output."""

    job: Job
    read: Callable[[Path], History] | None
    setting: Setting
    returns: bool
    """Whether this contender starts a lost rank again."""
    units: Layout = PLAIN
    """Its replicas are what the contender loses at once."""

    def calm(self) -> dict[str, Any]:
        """Let it train, undisturbed."""
        if self.read is None:
            self._wait(lambda: self.job.output.count("elapsed time per iteration") >= self.setting.calm_steps)
        else:
            self._wait(lambda: self._least_steps() >= self.setting.calm_steps)
        megatron = iterations_of(self.job.output.splitlines())
        if megatron:
            times = [iteration.seconds for step, iteration in sorted(megatron.items()) if step > 3]
            step = sorted(times)[len(times) // 2]
        else:
            step = normal_step(self._history().commits)
        losses = losses_by_step(self._history()) if self.read else {n: i.loss for n, i in megatron.items()}
        return {"step_s": step, "losses": losses}

    def hit(self, name: str) -> dict[str, Any]:
        """Let it train, inject the fault ``name``, watch."""
        fault, strikes = FAULTS[name], []
        self._wait(lambda: self._least_steps() >= WHOLE_STEPS)
        for _ in range(self.setting.losses if name == "kill" else 1):
            strikes.append(self._strike(fault))
            if not self._watch(strikes[-1], fault):
                break
        output, history = self.job.output, self._history()
        ends = [strike.wall for strike in strikes[1:]] + [float("inf")]
        parts = [history.until(end) for end in ends]
        figures = [figures_of(part, one, self.setting.ranks) for part, one in zip(parts, strikes, strict=True)]
        return {
            "figures": [asdict(one) for one in figures],
            "struck_step": max(commit.step for commit in history.commits if commit.wall < strikes[0].wall) + 1,
            "losses": losses_by_step(history),
            "words": "" if figures[-1].mttr_s is not None else words_of(output),
        }

    def _strike(self, fault: Fault) -> Strike:
        """Send the signal half a step after a commit."""
        ranks = fault.ranks(self.setting.ranks)
        known = self.job.ranks()
        pids = [known[rank] for rank in ranks] or self.job.coordinators()
        step = normal_step(self._history().commits)
        seen = len(self._history().commits)
        self._wait(lambda: len(self._history().commits) > seen)
        time.sleep(step / 2)
        together = frozenset[int]().union(*(self.units.replica_of(rank) for rank in ranks))
        return Strike(self.job.strike(pids, fault.number), frozenset(ranks), together - set(ranks))

    def _watch(self, strike: Strike, fault: Fault) -> bool:
        """Watch what becomes of it. Return whether it is whole again and has trained on."""
        end = time.time() + self.setting.patience
        comes_back = self.returns and fault.returns and bool(strike.ranks) and fault.number == signal.SIGKILL
        milestone: float | None = None
        while time.time() < end and self.job.processes():
            time.sleep(0.25)
            if time.time() - strike.wall > 1.0:
                self.job.restart_services()
            history = self._history()
            figures = figures_of(history, strike, self.setting.ranks)
            if figures.mttr_s is None or (comes_back and figures.whole_after_s is None):
                continue
            milestone = milestone or time.time()
            later = [c for c in history.commits if c.began >= milestone]
            if len(later) >= TAIL_STEPS * len(strike.survivors(self.setting.ranks)):
                return comes_back
        return False

    def _history(self) -> History:
        assert self.read is not None
        return self.read(self.job.folder)

    def _least_steps(self) -> int:
        steps = dict.fromkeys(range(self.setting.ranks), 0)
        for commit in self._history().commits:
            steps[commit.rank] = max(steps[commit.rank], commit.step)
        return min(steps.values())

    def _wait(self, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + START_SECONDS
        while not ready():
            if time.monotonic() > end or not self.job.processes():
                raise RuntimeError(f"the job does not train\n{_shortened(self.job.output)}")
            time.sleep(0.02)


def _shortened(output: str) -> str:
    return re.sub(r"\n{2,}", "\n", output)[-5000:]
