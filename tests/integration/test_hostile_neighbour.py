"""A process on the network knows the job's host and ports, and the job does not notice: same losses, nothing lost.

Two agents with two ranks each (four in the long test) train; the neighbour (:mod:`hostile_neighbour`) finds every port
they listen at, and floods, garbles, half-opens and guesses at all of them at once.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from tests.integration.elastic_job import ROOT, JobResult, RunningJob, elastic_command, elastic_job, environment_of
from tests.integration.hostile_neighbour import Neighbour, listening, listening_ports
from tests.integration.launcher_cluster import descendants
from tests.integration.ports import free_port
from tests.integration.test_leaving import QUIET, RARELY

STEPS = 100_000
"""So many that a job goes on until it is told to stop."""
SECONDS = 300.0
LONG = 600.0
EVEN = ("--elastic-fail-slow", "off")
"""A rank that other work makes slow is given fewer micro-batches, and then sums round differently."""


def two_agents(stack: ExitStack, folder: Path, ranks: int, seconds: float) -> list[RunningJob]:
    """Launchers of both nodes, with ``ranks`` each; they train until they are told to stop."""
    plain = elastic_command(
        folder / "events", ranks, 1, 2, STEPS, *QUIET, *RARELY, *EVEN, "--save", str(folder / "saved")
    )
    at = plain.index("--nproc-per-node")
    where = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    where += ["--rdzv-id", uuid.uuid4().hex[:12], "--node-rank"]
    return [
        stack.enter_context(
            RunningJob(folder / "events", [*plain[:at], *where, str(node), *plain[at:]], seconds, named=False)
        )
        for node in range(2)
    ]


def disturbed_run(folder: Path, ranks: int, steps: int, hostile_seconds: float) -> JobResult:
    """At least ``steps`` steps on twice ``ranks``, with a hostile neighbour for so long, then a drain."""
    with ExitStack() as stack:
        first, last = two_agents(stack, folder, ranks, SECONDS + hostile_seconds)
        last.wait_for(r"iteration +1/")  # the last rank prints
        pids = [job.launcher.pid for job in (first, last)]
        ports = listening_ports(pids + [pid for launcher in pids for pid in descendants(launcher)])
        assert len(ports) >= 2 + 2 * ranks, "the store, presence and the links of all ranks"
        print("hostile to ports", ports)
        acted = be_hostile_to(ports, hostile_seconds)
        assert acted == {name for name in vars(Neighbour) if not name.startswith("_")}, "it did everything"
        last.wait_for(rf"iteration +{steps}/")
        first.launcher.send_signal(signal.SIGTERM)
        results = [job.finish() for job in (first, last)]
        assert [result.code for result in results] == [3, 3], "".join(result.output[-3000:] for result in results)
        return results[1]


def be_hostile_to(ports: list[int], seconds: float) -> set[str]:
    """Run the neighbour for ``seconds`` in a process of its own; returns what it did at least once."""
    command = [sys.executable, "-m", "tests.integration.hostile_neighbour"]
    done = subprocess.run(
        [*command, str(seconds), "7", ",".join(map(str, ports))],
        cwd=ROOT,
        env=environment_of(),
        capture_output=True,
        text=True,
        timeout=seconds + 90,
        check=True,
    )
    print(done.stdout)
    return {name.partition(",")[0] for name in json.loads(done.stdout)}


def check_undisturbed(folder: Path, ranks: int, seconds: float) -> None:
    """The losses are those of as many ranks on one node, whom nobody disturbs."""
    disturbed = disturbed_run(folder / "disturbed", ranks, 5, seconds)
    assert not disturbed.of("loss") and "lost" not in disturbed.output, disturbed.output[-3000:]
    steps = max(disturbed.committed)
    end = ("--exit-interval", str(min(steps, 8)))
    alone = elastic_job(folder / "alone", 2 * ranks, 1, 2, STEPS, *QUIET, *RARELY, *EVEN, *end)
    assert alone.code == 0, alone.output[-3000:]
    compared = sorted(set(alone.committed) & set(disturbed.committed))
    assert len(compared) >= 5 and sorted(disturbed.committed) == list(range(1, steps + 1))
    assert [disturbed.committed[step] for step in compared] == [alone.committed[step] for step in compared]


@pytest.mark.slow
def test_a_neighbour_without_the_secret_changes_nothing(tmp_path: Path) -> None:
    check_undisturbed(tmp_path, 2, 4.0)


@pytest.mark.slow
def test_a_job_on_one_node_listens_on_the_loopback_address_alone(tmp_path: Path) -> None:
    command = elastic_command(tmp_path / "events", 2, 1, 1, 100_000, *QUIET, *RARELY, "--save", str(tmp_path / "saved"))
    with RunningJob(tmp_path / "events", command) as job:
        job.wait_for(r"iteration +1/")
        pids = [job.launcher.pid, *descendants(job.launcher.pid)]
        bound = {address for address, _ in listening(pids)}
        ports = [port for _, port in listening(pids)]
        assert bound == {"0100007F"} and len(ports) >= 3, "127.0.0.1, as the kernel writes it: the store and two ranks"
        for port in ports:
            with pytest.raises((RuntimeError, OSError)), pytest.MonkeyPatch.context() as quiet:
                quiet.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
                TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
        job.launcher.send_signal(signal.SIGTERM)
        assert job.finish().code == 3


@pytest.mark.slow
def test_nor_does_it_within_ten_minutes(tmp_path: Path) -> None:
    check_undisturbed(tmp_path, 4, LONG)


@dataclass
class Spent:
    """Steps of a job in some time, and the processor time of all its processes."""

    steps: int = 0
    processor_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def a_step(self) -> float:
        """Processor seconds a step."""
        return self.processor_seconds / self.steps


LISTENER = """
import asyncio

async def discard(reader, writer):
    while await reader.read(1 << 16):
        pass
    writer.close()

async def main():
    server = await asyncio.start_server(discard, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""
"""A program that has nothing to do with the job, and takes whatever it is sent."""


@contextmanager
def a_listener() -> Iterator[int]:
    """The port of a :data:`LISTENER`."""
    with subprocess.Popen([sys.executable, "-c", LISTENER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.slow
def test_a_step_costs_no_more_processor_time_than_where_the_neighbour_is_hostile_to_others(tmp_path: Path) -> None:
    """By processor time: on a small machine the neighbour takes cores and caches, as any other process would."""
    with ExitStack() as stack:
        first, last = two_agents(stack, tmp_path, 4, 2 * SECONDS)
        last.wait_for(r"iteration +20/")
        pids = [pid for job in (first, last) for pid in (job.launcher.pid, *descendants(job.launcher.pid))]
        processes = [psutil.Process(pid) for pid in pids]
        targets = {"quiet": [], "elsewhere": [stack.enter_context(a_listener())], "hostile": listening_ports(pids)}

        def now() -> Spent:
            times = [process.cpu_times() for process in processes]
            steps = max(map(int, re.findall(r"iteration +(\d+)/", last.output)))
            return Spent(steps, sum(t.user + t.system for t in times), time.monotonic())

        spent = {kind: Spent() for kind in targets}
        for kind in [*targets] * 5:
            before = now()
            if targets[kind]:
                be_hostile_to(targets[kind], 10.0)
            else:
                time.sleep(10.0)
            after, sums = now(), spent[kind]
            sums.steps += after.steps - before.steps
            sums.processor_seconds += after.processor_seconds - before.processor_seconds
            sums.seconds += after.seconds - before.seconds
        print({kind: (sums, round(sums.a_step, 4), sums.seconds / sums.steps) for kind, sums in spent.items()})
        assert spent["hostile"].a_step < 1.1 * spent["elsewhere"].a_step
        last.launcher.send_signal(signal.SIGTERM)
        assert [job.finish().code for job in (first, last)] == [3, 3]
