"""The launcher under faults that no orderly test would think of; seeds are printed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from pathlib import Path

import psutil

from tests.integration.launcher_cluster import Cluster, children, cluster, is_alive

FOREVER = ("--seconds", "6000")


def agreed_everywhere(job: Cluster) -> None:
    """Every generation was decided with the same members wherever it was decided, and named no dead incarnation."""
    by_generation: dict[int, set[str]] = {}
    for event in job.of("decided"):
        summary = str((event["members"], event["joined"], event["reason"], event["lost"]))
        by_generation.setdefault(event["generation"], set()).add(summary)
    assert all(len(summaries) == 1 for summaries in by_generation.values()), by_generation


def test_random_kills_and_stops_in_one_job_always_end_in_a_full_generation() -> None:
    seed = int(os.environ.get("CHAOS_SEED", time.time_ns() % 10_000))
    print(f"CHAOS_SEED={seed}")
    rng = random.Random(seed)
    options = (*FOREVER, "--report-seconds", "0.05", "--elastic-quarantine-after", "0")  # else chance puts a node out
    with cluster(3, nodes=2, script_options=options) as job:
        everybody = list(range(6))
        generation = job.wait_members(everybody)
        for _ in range(6):
            for victim in rng.sample(everybody, rng.choice([1, 1, 2, 3])):
                time.sleep(rng.choice([0.0, 0.01, 0.06]))
                with contextlib.suppress(ProcessLookupError):
                    job.kill(victim, rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
            generation = job.wait_members(everybody, minimum=generation + 1)
        agreed_everywhere(job)
        os.kill(job.agents[0].pid, signal.SIGTERM)
        assert [job.exit_code(node) for node in (0, 1)] == [3, 3]


def test_killing_the_parent_of_the_workers_loses_them_all_and_starts_anew() -> None:
    with cluster(3, script_options=FOREVER) as job:
        job.wait_members([0, 1, 2])
        (zygote,) = children(job.agents[0].pid)
        first = [job.pid(rank) for rank in (0, 1, 2)]
        os.kill(zygote, signal.SIGKILL)
        job.wait_members([0, 1, 2], minimum=2)
        assert not any(is_alive(pid) for pid in first)


def test_a_stopped_agent_is_given_up_its_workers_fence_themselves_and_it_comes_back() -> None:
    options = (*FOREVER, "--elastic-detection-timeout", "0.6")
    with cluster(2, nodes=2, script_options=options) as job:
        job.wait_members([0, 1, 2, 3])
        fenced = [job.pid(2), job.pid(3)]
        os.kill(job.agents[1].pid, signal.SIGSTOP)
        generation = job.wait_members([0, 1], minimum=2)
        assert not any(is_alive(pid) for pid in fenced), "they must be gone before the others go on without them"
        lost = job.of("decided", generation=generation)[0]["lost"]
        assert [entry[0] for entry in lost] == [2, 3] and all("unreachable" in entry[2] for entry in lost)
        os.kill(job.agents[1].pid, signal.SIGCONT)
        job.wait_members([0, 1, 2, 3], minimum=generation + 1)


def test_an_agent_killed_between_freeze_and_decide() -> None:
    with cluster(2, nodes=2, script_options=(*FOREVER, "--report-seconds", "0.7")) as job:
        job.wait_members([0, 1, 2, 3])
        job.kill(0)
        job.wait(lambda: len(job.of("freeze", generation=2)) == 3, "everybody frozen")
        job.agents[1].kill()
        job.wait_members([1], minimum=3)
        job.wait_members([0, 1], minimum=4)
        agreed_everywhere(job)


def test_stopping_worker_and_parent_and_killing_the_agent_leaves_nothing() -> None:
    with cluster(2, script_options=FOREVER) as job:
        job.wait_members([0, 1])
        agent = job.agents[0]
        (zygote,) = children(agent.pid)
        job.kill(1, signal.SIGSTOP)
        os.kill(zygote, signal.SIGSTOP)
        agent.kill()
        agent.wait()
        try:
            assert not job.survivors()
            job.wait(lambda: not is_alive(zygote), "the zygote ends")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(zygote, signal.SIGKILL)


def listening_ports(pid: int) -> list[int]:
    """TCP ports on which ``pid`` listens."""
    connections = psutil.Process(pid).net_connections("tcp")
    return sorted({one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN})


def test_garbage_on_every_port_and_console_harms_no_rank() -> None:
    seed = int(os.environ.get("CHAOS_SEED", time.time_ns() % 10_000))
    print(f"CHAOS_SEED={seed}")
    rng = random.Random(seed)
    with cluster(2, nodes=2, script_options=FOREVER) as job:
        job.wait_members([0, 1, 2, 3])
        ports = listening_ports(job.agents[0].pid)
        assert len(ports) >= 2, "store and presence"
        held = []
        for port in ports:
            for size in (0, 1, 7, 100, 5000, 200_000):
                stranger = socket.create_connection(("127.0.0.1", port))
                with contextlib.suppress(OSError):
                    stranger.sendall(rng.randbytes(size))
                held.append(stranger)
        for size in (0, 3, 100, 70_000):
            console = socket.socket(socket.AF_UNIX)
            console.connect(f"\0megatron-elastic/{job.run_id}/0")
            with contextlib.suppress(OSError):
                console.sendall(rng.randbytes(size))
            held.append(console)
        job.kill(3)
        job.wait_members([0, 1, 2, 3], minimum=3)
        for stranger in held:
            stranger.close()
        job.kill(1)
        job.wait_members([0, 1, 2, 3], minimum=5)


def test_a_worker_that_sends_garbage_to_its_agent_is_lost_and_no_other(tmp_path: Path) -> None:
    program = tmp_path / "garbage.py"
    program.write_text(
        """
import os, sys, time
from megatron.elastic.launch.workers.rehearsal import main
if os.environ["RANK"] == "1" and os.environ["MEGATRON_ELASTIC_INCARNATION"] == "0":
    import threading
    def later():
        time.sleep(1.0)
        os.write(int(os.environ["MEGATRON_ELASTIC_CONTROL_FD"]), b"\\xff" * 64)
    threading.Thread(target=later, daemon=True).start()
sys.exit(main(sys.argv[1:]))
"""
    )
    with cluster(3, command=[str(program), "--elastic"], script_options=FOREVER) as job:
        job.wait_members([0, 1, 2])
        job.wait_members([0, 1, 2], minimum=3)
        causes = [entry for event in job.of("decided") for entry in event["lost"]]
        assert causes and all(rank == 1 and "malformed message" in cause for rank, _, cause in causes)
