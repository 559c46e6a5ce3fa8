"""A training job whose workers are killed and stopped from outside, at any instant; seeds are printed.

The kill walk (``tests/integration/kill_walk.py``) comes to every named point. Here nobody knows where a worker is: it
may be in a system call, evaluating, writing its share of a checkpoint, or not be back yet from the loss before.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from megatron.elastic.observe.events import read_events
from tests.integration.elastic_job import ROOT, JobResult, elastic_command, environment_of
from tests.integration.kill_walk import (
    DRAINED,
    DROPOUT,
    MANY,
    PHASES,
    RATES,
    ROUNDING,
    TWO,
    Watch,
    cached,
    compare,
    kept,
)
from tests.integration.launcher import Launcher, start_launcher
from tests.integration.launcher_cluster import descendants, is_alive
from tests.scenario.scenario import Layout

SECONDS = 600.0
LOSSES = 30
STOPPED = 0.12
"""Share of workers that are stopped instead of killed."""
SUCCESSOR_TOO = 0.3
"""Share of the ranks that take a lost one's place and are killed as well, on their way back."""
SUCCESSORS = 2
"""At most so many in a row: the launcher gives a rank up after three starts that failed before it had joined."""


def workers(launcher: int) -> dict[int, int]:
    """Rank → process of every worker that has come far enough to open its event log.

    Processes that load its data have the log open too; they are its children.
    """
    found = dict[int, int]()
    for pid in descendants(launcher):
        with contextlib.suppress(psutil.Error):
            files = [file.path for file in psutil.Process(pid).open_files()]
            ranks = {int(log[1]) for log in (re.search(r"rank(\d+)\.jsonl$", file) for file in files) if log}
            if len(ranks) == 1 and is_alive(pid):
                found.setdefault(ranks.pop(), pid)
    return found


class Havoc:
    """Losses one after the other in a running job; a rank more is lost only when all the others are back in a step."""

    def __init__(
        self,
        job: Launcher | subprocess.Popen[str],
        watch: Watch,
        ranks: int,
        rng: random.Random,
        seconds: float = SECONDS,
    ) -> None:
        self._job, self._watch, self._rng = job, watch, rng
        self.lost = Counter(dict.fromkeys(range(ranks), 0))
        self._end = time.monotonic() + seconds

    def wait_until_whole(self) -> None:
        """Until the newest life of every rank has taken part in a step."""
        while not set(self.lost.items()) <= self._watch.lives:
            assert time.monotonic() < self._end and self._job.poll() is None, f"not whole again after {self.lost}"
            time.sleep(0.05)
            self._watch.look()

    def strike(self) -> None:
        """Lose one rank, at times its successor too, and that one's."""
        self.wait_until_whole()
        time.sleep(self._rng.uniform(0.0, 1.2))
        here, rank = workers(self._job.pid), self._rng.randrange(len(self.lost))
        self._lose(rank, here[rank], signal.SIGSTOP if self._rng.random() < STOPPED else signal.SIGKILL)
        before = here[rank]
        for _ in range(SUCCESSORS):
            if self._rng.random() >= SUCCESSOR_TOO:
                break
            time.sleep(self._rng.uniform(0.0, 3.0))
            after = workers(self._job.pid).get(rank, before)
            if after != before:
                self._lose(rank, after, signal.SIGKILL)
            before = after

    def _lose(self, rank: int, pid: int, how: signal.Signals) -> None:
        os.kill(pid, how)
        self.lost[rank] += 1
        print(f"{how.name} to rank {rank}, life {self.lost[rank]}", flush=True)


@dataclass
class Reshaping:
    """Requests for other sizes, one after the other, while ranks are lost."""

    run_id: str
    through: tuple[Layout, ...]
    told: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def going_round(self) -> Iterator[None]:
        """Beside the block, from its begin to its end."""
        asking = threading.Thread(target=self.go_round)
        asking.start()
        try:
            yield
        finally:
            self.ended.set()
            asking.join(SECONDS)

    def go_round(self) -> None:
        """Ask for the sizes in turn until ``ended``; each request is over before the next."""
        for sizes in itertools.cycle(self.through):
            if self.ended.is_set():
                return
            words = ["--tp", str(sizes.tensor), "--pp", str(sizes.pipeline), "--dp", str(sizes.data)]
            words += ["--cp", str(sizes.context)] if sizes.context > 1 else []
            words += ["--ep", str(sizes.experts)] if sizes.experts > 1 else []
            asked = subprocess.run(
                [sys.executable, "-m", "megatron.elastic.ctl", "reshape", *words, "--run-id", self.run_id],
                cwd=ROOT,
                env=environment_of(),
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            self.told.append(asked.stdout.strip() or asked.stderr.strip())


def survived(
    folder: Path,
    layout: Layout,
    seed: int,
    losses: int,
    run_id: str = "",
    during: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> JobResult:
    """A job of ``layout`` that lost ranks at any instant, each named once, no step lost, its losses undisturbed."""
    saved = ("--save", str(folder / "saved"))
    flags = (*DROPOUT, *RATES, *PHASES, *TWO, *saved, *cached(folder))
    command = elastic_command(
        folder / "events",
        layout.ranks,
        layout.tensor,
        layout.pipeline,
        MANY,
        *flags,
        launch=("--rdzv-id", run_id) if run_id else (),
    )
    watch = Watch(folder / "output.txt", folder / "events")
    with watch.said.open("w") as out:
        job = start_launcher(command, environment_of(), out)
        try:
            havoc = Havoc(job, watch, layout.ranks, random.Random(seed))
            havoc.wait_until_whole()
            with during():
                while havoc.lost.total() < losses:
                    havoc.strike()
                havoc.wait_until_whole()
            job.send_signal(signal.SIGTERM)
            job.wait(60.0)
        finally:
            if job.poll() is None:
                job.kill()
            code = job.wait()
    result = JobResult(code, watch.said.read_text(), read_events(folder / "events"))
    assert result.code == DRAINED, result.output[-6000:]
    told = {(record.fields["lost_rank"], record.fields["lost_incarnation"]) for record in result.of("loss")}
    assert told == {(rank, life) for rank, count in havoc.lost.items() for life in range(count)}
    assert all(record.fields["lost_steps"] == 0 for record in result.of("recovery"))
    steps = max(result.committed)
    assert set(result.committed) == set(range(1, steps + 1))
    assert compare(result, kept(folder / "undisturbed", layout, steps)) < ROUNDING
    return result


def a_seed() -> int:
    """The seed of ``CHAOS_SEED``, else one of the clock; printed."""
    seed = int(os.environ.get("CHAOS_SEED", time.time_ns() % 10_000))
    print(f"CHAOS_SEED={seed}")
    return seed


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(1, 2, 2), Layout(2, 2, 2)], ids=["pp2dp2", "tp2pp2dp2"])
def test_losses_at_any_instant_change_no_loss_of_training(tmp_path: Path, layout: Layout) -> None:
    survived(tmp_path, layout, a_seed(), LOSSES)


@pytest.mark.slow
def test_losses_at_any_instant_on_the_way_through_other_sizes(tmp_path: Path) -> None:
    """TP 2 x PP 2 x DP 2 becomes TP 1 x PP 4 x DP 2, TP 4 x PP 1 x DP 2 and itself again, at least once."""
    reshaping = Reshaping(f"reshape-{os.getpid()}", (Layout(1, 4, 2), Layout(4, 1, 2), Layout(2, 2, 2)))

    result = survived(tmp_path, Layout(2, 2, 2), a_seed(), LOSSES, reshaping.run_id, reshaping.going_round)
    print(*reshaping.told, sep="\n")
    assert all("since step" in line for line in reshaping.told), reshaping.told
    sizes = [tuple(map(int, found)) for found in re.findall(r"reshape: TP (\d), PP (\d), DP (\d) since", result.output)]
    assert {(1, 4, 2), (4, 1, 2), (2, 2, 2)} <= set(sizes), sizes
