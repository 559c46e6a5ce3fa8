"""A training job whose workers are killed and stopped from outside, at any instant; seeds are printed.

The kill walk (``tests/integration/kill_walk.py``) comes to every named point. Here nobody knows where a worker is: it
may be in a system call, evaluating, writing its share of a checkpoint, or not be back yet from the loss before.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from megatron.elastic.observe.events import read_events
from tests.integration.elastic_job import JobResult, elastic_command, environment_of
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


def workers(launcher: int) -> dict[int, int]:
    """Rank → process of every worker that has come far enough to open its event log."""
    found = {}
    for pid in descendants(launcher):
        with contextlib.suppress(OSError):
            files = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
            ranks = {int(log[1]) for log in (re.search(r"rank(\d+)\.jsonl$", file) for file in files) if log}
            if len(ranks) == 1 and is_alive(pid):
                found[ranks.pop()] = pid
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
        while self._rng.random() < SUCCESSOR_TOO:
            time.sleep(self._rng.uniform(0.0, 3.0))
            after = workers(self._job.pid).get(rank, before)
            if after != before:
                self._lose(rank, after, signal.SIGKILL)
            before = after

    def _lose(self, rank: int, pid: int, how: signal.Signals) -> None:
        os.kill(pid, how)
        self.lost[rank] += 1
        print(f"{how.name} to rank {rank}, life {self.lost[rank]}", flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(1, 2, 2), Layout(2, 2, 2)], ids=["pp2dp2", "tp2pp2dp2"])
def test_losses_at_any_instant_change_no_loss_of_training(tmp_path: Path, layout: Layout) -> None:
    seed = int(os.environ.get("CHAOS_SEED", time.time_ns() % 10_000))
    print(f"CHAOS_SEED={seed}")
    saved = ("--save", str(tmp_path / "saved"))
    command = elastic_command(
        tmp_path / "events",
        layout.ranks,
        layout.tensor,
        layout.pipeline,
        MANY,
        *DROPOUT,
        *RATES,
        *PHASES,
        *TWO,
        *saved,
        *cached(tmp_path),
    )
    watch = Watch(tmp_path / "output.txt", tmp_path / "events")
    with watch.said.open("w") as out:
        job = start_launcher(command, environment_of(), out)
        try:
            havoc = Havoc(job, watch, layout.ranks, random.Random(seed))
            while havoc.lost.total() < LOSSES:
                havoc.strike()
            havoc.wait_until_whole()
            job.send_signal(signal.SIGTERM)
            job.wait(60.0)
        finally:
            if job.poll() is None:
                job.kill()
            code = job.wait()
    result = JobResult(code, watch.said.read_text(), read_events(tmp_path / "events"))
    assert result.code == DRAINED, result.output[-6000:]
    told = {(record.fields["lost_rank"], record.fields["lost_incarnation"]) for record in result.of("loss")}
    assert told == {(rank, life) for rank, count in havoc.lost.items() for life in range(count)}
    assert all(record.fields["lost_steps"] == 0 for record in result.of("recovery"))
    steps = max(result.committed)
    assert set(result.committed) == set(range(1, steps + 1))
    assert compare(result, kept(tmp_path / "undisturbed", layout, steps)) < ROUNDING
