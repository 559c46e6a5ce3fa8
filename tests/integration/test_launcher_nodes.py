"""Agents of several nodes: a second one for the same place, connections that break, with real processes."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from megatron.elastic.control import env
from megatron.elastic.control.exits import ExitCode
from tests.integration.launcher_cluster import PATIENCE, REHEARSAL, ROOT, Cluster, cluster
from tests.integration.ports import free_port

_PIDFD_GETFD = 438
RARELY = ("--seconds", "600")
SOON = ("--elastic-detection-timeout", "0.5")


def sockets_of(pid: int) -> list[socket.socket]:
    """Duplicates of the TCP connections that process ``pid`` has open."""
    libc, pidfd, found = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid), []
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            target = ""
            with suppress(FileNotFoundError):  # closed since the folder was read
                target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:"):
                fd = libc.syscall(_PIDFD_GETFD, pidfd, int(name), 0)
                if fd < 0:
                    raise OSError(ctypes.get_errno(), "pidfd_getfd")
                one = socket.socket(fileno=fd)
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    found.append(one)
    finally:
        os.close(pidfd)
    return found


def cut_connections(agent: int, store_port: int) -> int:
    """End every connection of an agent but those to the store, for both sides; how many there were."""
    cut = 0
    for one in sockets_of(agent):
        with one:
            try:
                there = one.getpeername()[1]
            except OSError:
                continue
            if there != store_port:
                one.shutdown(socket.SHUT_RDWR)
                cut += 1
    return cut


def may_take_sockets() -> str:
    child = subprocess.Popen([sys.executable, "-c", "import socket, time; s = socket.socket(); time.sleep(60)"])
    try:
        time.sleep(0.2)
        sockets_of(child.pid)
        return ""
    except OSError as error:
        return str(error)
    finally:
        child.kill()
        child.wait()


def second_agent(job: Cluster, node: int, script_options: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """The same command once more, to its end."""
    command = [
        *(sys.executable, "-m", "megatron.elastic.launch", "--nnodes", str(job.nodes), "--node-rank", str(node)),
        *("--master-port", str(job.port), "--nproc-per-node", str(job.workers), "--rdzv-id", job.run_id),
        *(*REHEARSAL, *script_options),
    ]
    return subprocess.run(
        command, cwd=ROOT, env=job.environ, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@pytest.mark.slow
def test_a_second_agent_for_a_place_that_is_taken_gives_up_and_disturbs_no_other() -> None:
    with cluster(1, nodes=2, script_options=(*RARELY, *SOON)) as job:
        job.wait_members([0, 1])
        ended = second_agent(job, 1, (*RARELY, *SOON))
        assert ended.returncode == 1
        assert "--node-rank 1 is already taken by another agent" in ended.stderr + ended.stdout
        before = job.pid(1)
        job.kill(0)  # a change after it, in which nothing else is lost
        generation = job.wait_members([0, 1], minimum=2)
        lost = {tuple(entry) for e in job.of("decided") if e["generation"] <= generation for entry in e["lost"]}
        assert lost == {(0, 0, "signal SIGKILL")} and job.pid(1) == before
        assert "unreachable" not in job.text()


@pytest.mark.slow
@pytest.mark.parametrize(("node", "missing"), [(0, "node 1 of 2"), (1, "the first agent (node 0)")])
def test_an_agent_says_for_whom_it_waits_again_and_again(node: int, missing: str) -> None:
    port = free_port()
    command = [
        *(sys.executable, "-m", "megatron.elastic.launch", "--nnodes", "2", "--node-rank", str(node)),
        *("--master-port", str(port), "--rdzv-id", "alone", "--rdzv-conf", "join_timeout=10", *REHEARSAL),
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), env.SECRET: "5e" * 16}
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=PATIENCE)
    told = re.escape(f"[launch] waiting for {missing} at 127.0.0.1:{port} (")
    seconds = [int(text) for text in re.findall(told + r"(\d+) s\)", ended.stderr)]
    assert len(seconds) >= 2 and seconds[0] < seconds[1], ended.stderr
    assert ended.returncode == 1 and "error: " in ended.stderr and "Traceback" not in ended.stderr


def test_a_connection_between_agents_that_breaks_costs_no_node() -> None:
    if why := may_take_sockets():
        pytest.skip(f"cannot take another process's sockets: {why}")
    with cluster(1, nodes=2, script_options=(*RARELY, *SOON)) as job:
        job.wait_members([0, 1])
        for _ in range(3):
            end = time.monotonic() + 60
            while not cut_connections(job.agents[1].pid, job.port):
                assert time.monotonic() < end, "the agent calls again"
                time.sleep(0.05)
        job.kill(0)
        generation = job.wait_members([0, 1], minimum=3)
        lost = {tuple(entry) for e in job.of("decided") if e["generation"] <= generation for entry in e["lost"]}
        assert lost == {(0, 0, "signal SIGKILL")}
        assert "unreachable" not in job.text()


def test_ranks_that_are_lost_with_their_node_count_for_the_limit_of_an_hour() -> None:
    with cluster(2, nodes=2, script_options=(*RARELY, *SOON, "--elastic-max-losses-per-hour", "1")) as job:
        job.wait_decided(1, 4)
        job.agents[1].kill()
        assert job.exit_code(0) == ExitCode.DETERMINISTIC, job.text()[-4000:]
        assert "2 ranks were lost within an hour, more than --elastic-max-losses-per-hour 1" in job.text()
