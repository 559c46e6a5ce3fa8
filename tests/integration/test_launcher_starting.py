"""Launchers that end while they start, by a signal or with the first of them: real processes, before any worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.elastic.control import env
from megatron.elastic.control.exits import ExitCode
from tests.integration.launcher_cluster import PATIENCE, REHEARSAL, ROOT, children, descendants, is_alive
from tests.integration.ports import free_port

CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def no_container() -> str:
    """Why no process can be the first of a PID namespace here; empty when one can."""
    try:
        return subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, check=False).stderr.strip()
    except OSError as error:
        return str(error)


class Waiting:
    """The launcher of a node of ``nodes``, of three by default, the last of which never comes.

    ``prefix``: a program that starts it.
    """

    def __init__(
        self, log: Path, prefix: tuple[str, ...], script: list[str], node: int, port: int, nodes: int = 3
    ) -> None:
        self._log = log
        where = ["--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", "1", "--master-port", str(port)]
        with log.open("w") as out:
            self.started = subprocess.Popen(
                [*prefix, sys.executable, "-m", "megatron.elastic.launch", *where, *script],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", env.SECRET: "5e" * 16},
                cwd=ROOT,
            )
        self._inside = bool(prefix)

    @property
    def pid(self) -> int:
        """Process id of the launcher itself."""
        return children(self.started.pid)[0] if self._inside else self.started.pid

    def text(self) -> str:
        return self._log.read_text()

    def wait_until(self, claim: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not claim():
            assert self.started.poll() is None and time.monotonic() < end, self.text()
            time.sleep(0.02)

    def imports(self) -> bool:
        """True once it has begun to load torch."""
        try:
            return "libtorch" in Path(f"/proc/{self.pid}/maps").read_text()
        except (OSError, IndexError):
            return False

    def waits(self) -> bool:
        return "waiting for node" in self.text()


@contextmanager
def waiting(
    folder: Path,
    prefix: tuple[str, ...] = (),
    script: list[str] = REHEARSAL,
    node: int = 0,
    port: int = 0,
    nodes: int = 3,
) -> Iterator[Waiting]:
    job = Waiting(folder / f"log{node}", prefix, script, node, port or free_port(), nodes)
    try:
        yield job
    finally:
        if job.started.poll() is None:
            job.started.kill()
        job.started.wait()


def check_ended(job: Waiting, code: int) -> None:
    """The launcher ends with ``code`` after SIGTERM, and its zygote with it."""
    there = descendants(job.pid)
    os.kill(job.pid, signal.SIGTERM)
    assert job.started.wait(PATIENCE) == code, job.text()
    end = time.monotonic() + PATIENCE
    while left := [pid for pid in there if is_alive(pid)]:
        assert time.monotonic() < end, f"processes {left} outlived their launcher"
        time.sleep(0.02)
    assert "Traceback" not in job.text()


@pytest.mark.parametrize("prefix", [(), CONTAINER], ids=["process", "container"])
def test_sigterm_ends_a_launcher_that_waits_for_another_as_a_drained_job(tmp_path: Path, prefix: tuple[str]) -> None:
    if prefix and (why := no_container()):
        pytest.skip(why)
    with waiting(tmp_path, prefix) as job:
        job.wait_until(job.waits)
        check_ended(job, ExitCode.DRAINED)
        assert "SIGTERM before the workers were started" in job.text()


def test_sigterm_ends_a_launcher_that_imports_as_a_drained_job(tmp_path: Path) -> None:
    with waiting(tmp_path) as job:
        job.wait_until(job.imports)
        check_ended(job, ExitCode.DRAINED)


@pytest.mark.slow
def test_sigterm_during_the_start_of_a_program_that_is_not_elastic_is_no_drain(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("")
    with waiting(tmp_path, script=[str(program)]) as job:
        job.wait_until(job.waits)
        check_ended(job, 128 + signal.SIGTERM)


def test_a_launcher_whose_first_one_ends_while_both_wait_tells_so_and_may_be_started_again(tmp_path: Path) -> None:
    port = free_port()
    with waiting(tmp_path, port=port) as first, waiting(tmp_path, node=1, port=port) as second:
        first.wait_until(first.waits)
        second.wait_until(second.waits)
        check_ended(first, ExitCode.DRAINED)
        assert second.started.wait(PATIENCE) == ExitCode.STATE_LOST, second.text()
        assert "before the job had started: start it again" in second.text() and "Traceback" not in second.text()


def test_launchers_that_were_given_other_flags_end_before_a_worker_starts(tmp_path: Path) -> None:
    port = free_port()
    ours, theirs = [*REHEARSAL, "--lr", "1e-4"], [*REHEARSAL, "--lr=1e-3"]
    with (
        waiting(tmp_path, script=ours, port=port, nodes=2) as first,
        waiting(tmp_path, script=theirs, node=1, port=port, nodes=2) as second,
    ):
        for job in (first, second):
            assert job.started.wait(PATIENCE) == ExitCode.FAILED, job.text()
        assert "node 1 was started with --lr 1e-3, this one with --lr 1e-4: give all nodes the same" in first.text()
        assert "node 0 was started with --lr 1e-4, this one with --lr 1e-3: give all nodes the same" in second.text()
