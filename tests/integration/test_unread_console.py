"""A launcher whose console is not read, as after Ctrl-S or with a paused pager, goes on with its work."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.elastic.control import env
from megatron.elastic.control.exits import ExitCode
from tests.integration.launcher_cluster import PATIENCE, REHEARSAL, ROOT, Event, descendants, is_alive


@contextmanager
def full_pipe() -> Iterator[int]:
    """The writing end of a pipe that takes nothing more."""
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        try:
            while True:
                os.write(writing, b"x" * 512)
        except BlockingIOError:
            os.set_blocking(writing, True)
        yield writing
    finally:
        os.close(reading)
        os.close(writing)


def events(logs: Path) -> list[Event]:
    lines = [line for log in logs.rglob("stdout.log") for line in log.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


def wait_for(claim: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not claim():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def test_the_loss_of_a_rank_is_recovered_from_and_the_job_drains(tmp_path: Path) -> None:
    options = ["--nproc-per-node", "2", "--redirects", "3", "--log-dir", str(tmp_path)]
    with full_pipe() as console:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "megatron.elastic.launch", *options, *REHEARSAL, "--seconds", "600"],
            stdout=console,
            stderr=console,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", env.SECRET: secrets.token_hex(16)},
            cwd=ROOT,
        )
        there = set[int]()
        try:

            def decided(generation: int) -> bool:
                found = [event for event in events(tmp_path) if event["event"] == "decided"]
                return {e["rank"] for e in found if e["generation"] >= generation} == {0, 1}

            wait_for(lambda: decided(1), "the job starts")
            pids = {event["rank"]: event["pid"] for event in events(tmp_path) if event["event"] == "begin"}
            os.kill(pids[1], signal.SIGKILL)
            wait_for(lambda: decided(3), "rank 1 was lost in generation 2 and joins in generation 3")
            assert is_alive(pids[0])
            there |= set(descendants(launcher.pid))
            launcher.terminate()
            assert launcher.wait(PATIENCE) == ExitCode.DRAINED
        finally:
            there |= set(descendants(launcher.pid))
            launcher.kill()
            launcher.wait()
            wait_for(lambda: not any(is_alive(pid) for pid in there), "no process outlives the launcher")
