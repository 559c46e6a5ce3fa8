"""The start of a node's worker: output, environment, scratch folder; and a check that starts one alone."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.elastic.control import env
from megatron.elastic.control.channel import Credentials
from megatron.elastic.control.history import JobHistory
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.signer import Signer
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.launch.agent.rendezvous import JobMembers
from megatron.elastic.launch.arguments import BadCommand, JobSpec, parse
from megatron.elastic.launch.check import check
from megatron.elastic.launch.workers.logs import WorkerLogs
from megatron.elastic.launch.workers.node_workers import NodeWorkers
from megatron.elastic.launch.workers.pool import Pool, PoolEvents, Worker
from megatron.elastic.launch.workers.spawn import Spawner
from megatron.elastic.launch.workers.zygote_messages import WorkerSpec
from megatron.elastic.launch.workers.zygote_process import ZygoteProcess
from tests.unit.launch.serving import serve

RANKS = (4, 5)
"""Of the second of two nodes; the others have two ranks each, too."""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def job(script: str, *options: str) -> JobSpec:
    return parse(["--nproc-per-node", "2", *options, script, "--lr", "1"], {})


# -- output ----------------------------------------------------------------------------------


def write(logs: WorkerLogs, local: int, out: str, err: str) -> None:
    for fd, text in zip(logs.open(local), (out, err), strict=True):
        os.write(fd, text.encode())
        os.close(fd)


def test_output_goes_to_the_console_unless_its_rank_is_not_shown(
    script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = WorkerLogs(job(script, "--local-ranks-filter", "1"), RANKS)
    write(logs, 0, "hidden", "hidden")
    write(logs, 1, "said", "warned")
    assert capfd.readouterr() == ("said", "warned")
    assert logs.last_lines(0) == logs.last_lines(1) == ()
    logs.close()


def test_files_grow_with_each_life_of_a_rank_and_their_end_is_what_a_lost_one_said_last(
    script: str, tmp_path: Path
) -> None:
    logs = WorkerLogs(job(script, "--log-dir", str(tmp_path / "logs"), "--redirects", "3"), RANKS)
    write(logs, 0, "step 1\n", "")
    assert logs.last_lines(0) == ("step 1",), "it has said nothing on standard error"
    write(logs, 0, "step 1\n", "x" * 100_000 + "\nfirst life\n\nTraceback\n")
    write(logs, 0, "step 2\n", "second life\n" + "".join(f"line {number}\n" for number in range(20)))
    assert logs.last_lines(0) == tuple(f"line {number}" for number in range(10, 20))
    assert logs.last_lines(0, 22)[:2] == ("Traceback", "second life")
    assert logs.last_lines(1) == ()
    (err,) = (tmp_path / "logs").rglob("0/stderr.log")
    assert "first life" in err.read_text() and set(logs.error_files) == {0, 1}
    logs.close()


def test_lines_on_the_console_may_name_the_rank_and_their_role(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "<${role_name} ${rank}/${local_rank}> ")
    spec = replace(
        job(script, "--log-dir", str(tmp_path / "logs"), "--tee", "3", "--role", "trainer"),
        line_prefix="<${role_name} ${rank}/${local_rank}> ",
    )
    logs = WorkerLogs(spec, RANKS)
    write(logs, 0, "from zero\n", "")
    write(logs, 1, "from one\n", "warned\n")
    logs.close()
    said = capsys.readouterr()
    assert "<trainer 4/0> from zero" in said.out and "<trainer 5/1> from one" in said.out
    assert "<trainer 5/1> warned" in said.err


def test_a_folder_that_cannot_be_written_is_refused_with_its_flag(script: str, tmp_path: Path) -> None:
    """Between the reading of the command line and the start of workers the folder may go."""
    spec = job(script, "--log-dir", str(tmp_path / "logs"), "--redirects", "3")
    assert spec.logs is not None
    (tmp_path / "file").write_text("")
    with pytest.raises(BadCommand, match="--log-dir"):
        WorkerLogs(replace(spec, logs=replace(spec.logs, folder=str(tmp_path / "file"))), RANKS)


# -- start ------------------------------------------------------------------------------------


@dataclass
class Forks:
    """Stands for the pool: notes what is to be forked, and closes what a pool takes over."""

    specs: list[WorkerSpec] = field(default_factory=list)

    def fork(self, spec: WorkerSpec, worker: Worker, slot_fd: int, theirs: socket.socket, out: int, err: int) -> None:
        assert spec.number == worker.number
        self.specs.append(spec)
        theirs.close()
        for fd in (slot_fd, out, err):
            os.close(fd)


@dataclass
class Started:
    """A spawner of the second node, and what it has started."""

    spawner: Spawner
    forks: Forks
    workers: list[Worker] = field(default_factory=list)

    def start(self, rank: int, incarnation: int = 0, newcomer: bool = False, ended_in: int = -1) -> dict[str, str]:
        self.workers.append(self.spawner.start(rank, incarnation, newcomer, ended_in))
        spec = self.forks.specs[-1]
        return {name: spec.variable(name) for name in spec.environ}


@pytest.fixture
def started(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield from make_started(job(script))


def make_started(spec: JobSpec) -> Iterator[Started]:
    forks = Forks()
    made = Started(second_node(spec, cast(Pool, forks)), forks)
    yield made
    for worker in made.workers:
        worker.channel.close()
        worker.slot.close()
    made.spawner.sweep(all_of_node=True)


def second_node(spec: JobSpec, pool: Pool) -> Spawner:
    members = JobMembers(
        node=2,
        store=cast(Any, SimpleNamespace(embedded=True)),
        store_place="host0:29500",
        program_store=None,
        signer=Signer(Credentials("ab" * 16, "run")),
        nodes={number: Node(f"host{number}", (2 * number, 2 * number + 1)) for number in range(3)},
        nominal=4,
        host="host2",
        returning=False,
        master_addr="host0",
        master_port=29501,
        address="10.0.0.2",
        agent="token",
        unlike="",
    )
    return Spawner(spec, members, pool, WorkerLogs(spec, RANKS))


def test_a_worker_has_torchruns_environment_and_that_of_the_elastic_runtime(started: Started) -> None:
    environ = started.start(5, incarnation=2, newcomer=True)
    theirs = {"RANK": "5", "LOCAL_RANK": "1", "GROUP_RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert theirs.items() <= environ.items()
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("host0", "29501")
    assert environ["TORCHELASTIC_RESTART_COUNT"] == "2", "torch keeps the keys of two lives apart by it"
    own = {env.SLOTS: "6", env.INCARNATION: "2", env.NEWCOMER: "1", env.NODE: "2", env.HOST: "host2"}
    assert own.items() <= environ.items() and environ[env.STORE] == "host0:29500"
    worker = started.workers[0]
    assert (worker.rank, worker.local_rank, worker.incarnation) == (5, 1, 2)
    assert started.start(5)[env.NEWCOMER] == "0"
    assert started.start(5)[env.ENDED_IN] == "-1" and started.start(5, ended_in=7)[env.ENDED_IN] == "7"


def test_no_two_lives_share_a_number_or_a_scratch_folder_and_all_are_swept(started: Started) -> None:
    first, second = started.start(4), started.start(4, incarnation=1)
    assert started.workers[0].number != started.workers[1].number
    assert first[env.SCRATCH] != second[env.SCRATCH]
    folder = Path(first[env.SCRATCH]).parent
    assert folder == Path(second[env.SCRATCH]).parent and folder.is_dir()
    segments = [Path(f"/dev/shm/{first[env.SEGMENT_PREFIX]}left"), Path("/dev/shm/mel-of-another-job")]
    for segment in segments:
        segment.touch()
    started.spawner.sweep(all_of_node=False)
    assert not folder.exists() and segments[0].exists(), "another agent's workers may use what is in memory"
    started.spawner.sweep(all_of_node=True)
    assert not segments[0].exists() and segments[1].exists()
    segments[1].unlink()


def test_each_worker_may_see_one_device_as_its_first(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "6,7")
        for started in make_started(job(script, "--virtual-local-rank")):
            environ = started.start(5)
            assert (environ["LOCAL_RANK"], environ[env.POSITION], environ[name]) == ("0", "1", "7")
            monkeypatch.delenv(name)
            assert started.start(5)[name] == "1"


def test_ranks_of_a_node_are_started_and_killed_as_processes(script: str) -> None:
    Path(script).write_text("import time; time.sleep(600)")
    loop, ends = Loop(), list[tuple[int, int]]()

    def ended(worker: Worker, status: int) -> None:
        del workers.by_rank[worker.rank]
        ends.append((worker.rank, status))

    pool = Pool(loop, (), PoolEvents(lambda *_: None, ended, lambda _: None), ZygoteProcess.execute(()))
    spawner = second_node(job(script), pool)
    workers = NodeWorkers(pool, spawner, JobHistory())
    try:
        for rank in RANKS:
            workers.start(rank, 0, False)
        assert workers.running() == RANKS and workers.activity(4).phase == "launch"
        assert workers.kill(4, "a test") and not workers.kill(4, "again"), "only the first is news"
        serve(loop, lambda: not workers.remains(4))
        assert ends == [(4, signal.SIGKILL)] and workers.running() == (5,) and workers.remains(5)
        workers.start(4, 1, True)
        assert set(workers.running()) == set(RANKS) and workers.by_rank[4].incarnation == 1
    finally:
        pool.close()
        loop.close()
        spawner.sweep(all_of_node=True)


# -- a check alone ----------------------------------------------------------------------------


def test_a_check_runs_one_process_with_the_sizes_of_the_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.sh"
    program.write_text('#!/bin/sh\necho "$RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $@"\nexit 3\n')
    program.chmod(0o755)
    command = ["--nnodes", "2", "--node-rank", "0", "--master-port", "1", "--nproc-per-node", "4", "--no-python"]
    spec = parse([*command, str(program), "--lr", "1"], {env.SECRET: "ab" * 16})
    assert check(spec) == 3
    assert capfd.readouterr().out == "0 8 4 --lr 1\n"


def test_a_check_fails_where_the_launcher_would_refuse_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    spec = replace(parse(["--no-python", "/bin/true"], {}), refused="too many spares")
    assert check(spec) == 1
    assert capfd.readouterr().err == "error: too many spares\n"
