"""Users' programs under the launcher: environment, logs, exit codes, children, signals."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.elastic.control import env
from megatron.elastic.control.answers import Acceptance, JobStatus
from megatron.elastic.control.requests import Status, Stop
from megatron.elastic.ctl import ask
from megatron.elastic.launch.limits import files_needed
from tests.integration.launcher_cluster import PATIENCE, ROOT, cluster, is_alive
from tests.integration.ports import free_port

HEADER = """
import json, os, signal, sys, time
def say(event, **fields):
    line = json.dumps({"event": event, "rank": int(os.environ["RANK"]), "pid": os.getpid(), **fields})
    os.write(1, line.encode() + b"\\n")
"""

MEMBER = (
    HEADER
    + """
from megatron.elastic.control.client import WorkerMembership
from megatron.elastic.comm.address import Address
from megatron.elastic.comm.errors import GenerationChanged
from megatron.elastic.control.membership import Activity
m = WorkerMembership.from_env()
m.start(lambda g: None)
def agree():
    while True:
        try:
            return m.decide(Address(m.rank, m.incarnation, m.host), "", 100)
        except GenerationChanged:
            pass
d = agree()
say("begin", incarnation=m.incarnation)
say("decided", generation=d.generation, members=list(d.members), lost=[[l.cause, list(l.last_lines)] for l in d.lost])
"""
)


def write(tmp_path: Path, body: str, header: str = HEADER) -> list[str]:
    path = tmp_path / "program.py"
    path.write_text(header + body)
    return [str(path)]


def run(arguments: list[str], timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "megatron.elastic.launch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environ, cwd=ROOT)


def test_workers_get_the_environment_torchrun_gives(tmp_path: Path) -> None:
    """The very same program under both; whatever torchrun sets is there, with the same value."""
    body = 'say("env", env=dict(os.environ), argv=sys.argv, main=__name__, path0=sys.path[0])'
    command = [*write(tmp_path, body), "--flag", "x y"]
    clean = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    common = ["--nproc-per-node", "2", "--master-port", str(free_port()), "--rdzv-id", "job", "--nnodes", "1"]
    found = {}
    for module in ("torch.distributed.run", "megatron.elastic.launch"):
        environ = {**clean, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}  # for torchrun's log folder
        done = subprocess.run(
            [sys.executable, "-m", module, *common, *command],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=environ,
            cwd=ROOT,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        found[module] = {line["rank"]: line for line in lines}
        assert set(found[module]) == {0, 1}, done.stderr
    theirs, ours = found.values()
    for rank in (0, 1):
        added = {k: v for k, v in theirs[rank]["env"].items() if clean.get(k) != v}
        # Ours alone: no error file without a log directory, and the parent's own process variables.
        for name in ("TORCHELASTIC_ERROR_FILE", "PYTHONPATH", "LC_CTYPE"):
            added.pop(name, None)
        assert {k: ours[rank]["env"].get(k) for k in added} == added
        for key in ("argv", "main", "path0"):
            assert ours[rank][key] == theirs[rank][key]
        assert ours[rank]["env"]["OMP_NUM_THREADS"] == "1"


def test_the_url_for_messages_is_not_in_a_workers_environment_or_arguments(tmp_path: Path) -> None:
    program = write(tmp_path, 'say("all", env=dict(os.environ), argv=sys.argv)')
    url = "http://127.0.0.1:9/T0KEN"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    for more, given in (((), {env.WEBHOOK: url}), (("--elastic-webhook", url), {})):
        done = subprocess.run(
            [sys.executable, "-m", "megatron.elastic.launch", "--nproc-per-node", "1", *program, *more],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env={**environ, **given},
            cwd=ROOT,
        )
        assert done.returncode == 0 and '"all"' in done.stdout and "T0KEN" not in done.stdout, done.stderr
        assert "a message to 127.0.0.1 was not delivered" in done.stderr and "T0KEN" not in done.stderr


def test_a_module_and_a_program_that_is_not_python(tmp_path: Path) -> None:
    (tmp_path / "some_module.py").write_text(HEADER + 'say("env", name=__name__, argv=sys.argv[1:])')
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    launch = [sys.executable, "-m", "megatron.elastic.launch", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "-m", "some_module", "a"], capture_output=True, text=True, timeout=PATIENCE, env=environ, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert sorted(json.loads(line)["rank"] for line in done.stdout.splitlines()) == [0, 1]
    done = run(["--nproc-per-node", "2", "--no-python", "/bin/sh", "-c", "echo rank=$RANK of $WORLD_SIZE"])
    assert sorted(done.stdout.split("\n"))[1:] == ["rank=0 of 2", "rank=1 of 2"] and done.returncode == 0


def test_a_gloo_job_written_for_torchrun_runs_unchanged(tmp_path: Path) -> None:
    body = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
t = torch.ones(3) * dist.get_rank()
dist.all_reduce(t)
say("sum", value=t.tolist())
dist.destroy_process_group()
"""
    far = ("--master-addr", "192.0.2.77")  # as a script that gives one node's own name: the store is served on loopback
    done = run(["--nproc-per-node", "3", *far, *write(tmp_path, body)])
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["value"] for line in done.stdout.splitlines()] == [[3.0, 3.0, 3.0]] * 3


def ipv6_is_here() -> bool:
    """Return True if this machine has IPv6's loopback address."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


NO_IPV6 = pytest.mark.skipif(not ipv6_is_here(), reason="no IPv6 on this machine")


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("[::1]", marks=NO_IPV6)])
def test_a_gloo_job_written_for_torchrun_runs_on_two_nodes(tmp_path: Path, host: str) -> None:
    body = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
t = torch.ones(3) * dist.get_rank()
dist.all_reduce(t)
say("sum", value=t.tolist())
dist.destroy_process_group()
"""
    with cluster(1, nodes=2, command=write(tmp_path, body), options=("--master-addr", host)) as job:
        assert [job.exit_code(node) for node in (0, 1)] == [0, 0], job.text()
        job.wait(lambda: len(job.of("sum")) == 2, "both have said their sum")
        assert [event["value"] for event in job.of("sum")] == [[1.0, 1.0, 1.0]] * 2


def test_workers_have_random_streams_of_their_own(tmp_path: Path) -> None:
    body = "import random, numpy\nsay('r', a=random.random(), b=float(numpy.random.rand()))"
    done = run(["--nproc-per-node", "3", *write(tmp_path, body)])
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({row["a"] for row in rows}) == 3 and len({row["b"] for row in rows}) == 3


def test_lines_of_workers_that_share_a_pipe_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without buffers, ``print`` writes a line and its end one after the other."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    body = 'for number in range(5000): print("rank", os.environ["RANK"], "says", number)'
    done = run(["--nproc-per-node", "4", *write(tmp_path, body)])
    said = sorted(line for line in done.stdout.splitlines() if "says" in line)
    assert said == sorted(f"rank {rank} says {number}" for rank in range(4) for number in range(5000))


def test_without_elastic_the_first_failure_ends_the_job_with_its_code(tmp_path: Path) -> None:
    body = "time.sleep(0.3)\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(600)"
    done = run(["--nproc-per-node", "3", *write(tmp_path, body)])
    assert done.returncode == 7
    assert done.stderr.count("exit code 7") == 1


def test_membership_outside_the_launcher_says_which_launcher(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *write(tmp_path, "", MEMBER)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode != 0 and "python -m megatron.elastic.launch" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["/nowhere.py"], "training_script"), (["--nnodes", "2", "--node-rank", "5", "X"], "--node-rank")],
)
def test_bad_input_is_one_line_and_exit_code_1(arguments: list[str], word: str) -> None:
    done = run(arguments)
    assert done.returncode == 1 and word in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.parametrize(("soft", "hard"), [(48, 48), (48, 4096), (1024, 4096)])
def test_open_files_are_raised_to_what_is_needed_or_refused_with_one_line(tmp_path: Path, soft: int, hard: int) -> None:
    body = "import resource; say('limit', files=list(resource.getrlimit(resource.RLIMIT_NOFILE)))"
    command = ["--preload", "none", "--nproc-per-node", "4", *write(tmp_path, body)]
    needed = files_needed(1, 4)
    launch = shlex.join([sys.executable, "-m", "megatron.elastic.launch", *command])
    limited = f"ulimit -Sn {soft} && ulimit -Hn {hard} && exec {launch}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", limited], capture_output=True, text=True, timeout=PATIENCE, env=environ, cwd=ROOT
    )
    if hard < needed:
        lines = done.stderr.splitlines()
        assert done.returncode == 1 and len(lines) == 1, done.stderr
        assert f"{needed} open files" in lines[0] and "48" in lines[0] and "ulimit -Hn" in lines[0]
    else:
        limits = [json.loads(line)["files"] for line in done.stdout.splitlines()]
        assert limits == [[max(soft, needed), hard]] * 4 and done.returncode == 0, done.stderr


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(["--nnodes", "1", "--master-port", str(port), *write(tmp_path, "")])
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1 and "--master-port" in lines[0], done.stderr


def test_an_error_before_taking_part_ends_the_job_with_its_code(tmp_path: Path) -> None:
    done = run(["--nproc-per-node", "2", *write(tmp_path, "raise RuntimeError('no such flag')"), "--elastic"])
    assert done.returncode == 1 and "RuntimeError: no such flag" in done.stderr


def test_the_first_rank_is_left_to_say_what_is_wrong_though_another_ends_before_it(tmp_path: Path) -> None:
    body = """
if os.environ["RANK"] == "0":
    time.sleep(1)
from megatron.elastic.mcore.args.bad_input import BadInput, install_hook
install_hook()
raise BadInput("--flag: all ranks find this")
"""
    done = run(["--nproc-per-node", "2", *write(tmp_path, body)])
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if "error" in line] == ["error: --flag: all ranks find this"]


def test_an_error_at_the_same_step_again_ends_the_job_with_code_5_and_the_traceback(tmp_path: Path) -> None:
    body = """
step = 0
while True:
    m.publish(Activity(step, "compute"))
    time.sleep(0.02)
    if m.frozen() > d.generation:
        d = agree()
    if m.rank == min(d.members) and step == 5:
        raise ValueError("sample 77 is broken")
    step = min(step + 1, 5)
"""
    done = run(["--nproc-per-node", "3", *write(tmp_path, body, MEMBER), "--elastic"])
    assert done.returncode == 5, done.stderr
    assert "step 5 fails deterministically" in done.stderr and "ValueError: sample 77 is broken" in done.stderr
    assert "lost rank 0" in done.stderr and "lost rank 1" in done.stderr, "the second failure is on another rank"


@pytest.mark.parametrize(
    "end",
    [
        "raise VendorError('ncclAllReduce: remote process exited')",
        "raise RuntimeError('no answer') from VendorHang('abort did not return within 5 s')",
        "exit_into_respawn(VendorHang('abort did not return within 5 s'))",
    ],
)
def test_faults_of_a_communication_library_at_the_same_step_are_no_error_of_the_program(
    tmp_path: Path, end: str
) -> None:
    body = f"""
from megatron.elastic.comm.vendor.library import VendorError, VendorHang, exit_into_respawn
while len(d.members) > 1:
    m.publish(Activity(5, "compute"))
    if m.rank == min(d.members):
        {end}
    while m.frozen() == d.generation:
        time.sleep(0.01)
    d = agree()
m.finish(0)
"""
    done = run(["--nproc-per-node", "3", "--no-respawn", *write(tmp_path, body, MEMBER), "--elastic"])
    assert done.returncode == 0, done.stderr
    assert "lost rank 0" in done.stderr and "lost rank 1" in done.stderr and "deterministic" not in done.stderr


def test_finish_with_a_code_is_the_jobs_code(tmp_path: Path) -> None:
    done = run(["--nproc-per-node", "2", *write(tmp_path, "m.finish(4); sys.exit(4)", MEMBER), "--elastic"])
    assert done.returncode == 4 and "lost rank" not in done.stderr


def test_adapt_imports_the_adaptor_before_the_script_and_nothing_does_without(tmp_path: Path) -> None:
    command = write(tmp_path, "say('there', adaptor='megatron.elastic.adaptor' in sys.modules)")
    for options, expected in (([], False), (["--adapt"], True), (["--adapt", "--preload", "none"], True)):
        done = run([*options, *command])
        assert done.returncode == 0 and json.loads(done.stdout)["adaptor"] is expected, done.stderr


def test_what_a_program_leaves_to_its_exit_is_done_whatever_its_background_threads_do(tmp_path: Path) -> None:
    body = """
import atexit, threading, time, torch
threading.Thread(target=lambda: [torch.randn(64).sort() for _ in iter(int, 1)], daemon=True).start()
threading.Thread(target=lambda: (time.sleep(0.3), say("thread"))).start()
atexit.register(lambda: print('{"kind": "handler"}', end=""))
raise SystemExit(7)
"""
    done = run(["--nproc-per-node", "1", *write(tmp_path, body)])
    assert done.returncode == 7, done.stderr
    assert '"thread"' in done.stdout and '"handler"' in done.stdout, done.stdout
    assert "terminate" not in done.stderr


def test_a_worker_that_hangs_on_its_way_out_is_ended(tmp_path: Path) -> None:
    """Behind the program's end, as in a thread or a handler; the program itself may work on for longer."""
    body = "import atexit\nm.finish(0)\nif m.rank == 1: atexit.register(time.sleep, 600)"
    done = run(["--nproc-per-node", "2", "--shutdown-timeout", "1", *write(tmp_path, body, MEMBER), "--elastic"])
    assert done.returncode == 0 and "lost rank" not in done.stderr
    assert "rank 1 did not end within 1 s (--shutdown-timeout)" in done.stderr


def test_last_log_lines_reach_the_summary_and_the_survivors(tmp_path: Path) -> None:
    body = """
if m.rank == 1 and m.incarnation == 0:
    print("about to die: disk on fire", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGSEGV)
while m.frozen() < 2: time.sleep(0.01)
if d.generation < 2:  # else the loss came before the first decision was read
    d = agree()
    say("decided", generation=d.generation, lost=[[l.cause, list(l.last_lines)] for l in d.lost])
m.finish(0)
"""
    logs = tmp_path / "logs"
    options = ["--nproc-per-node", "2", "--log-dir", str(logs), "--tee", "3", "--no-respawn"]
    done = run([*options, *write(tmp_path, body, MEMBER), "--elastic"])
    assert done.returncode == 0, done.stderr
    assert "lost rank 1" in done.stderr and "signal SIGSEGV" in done.stderr
    assert "| about to die: disk on fire" in done.stderr
    assert "[default0]:" in done.stdout, "torchrun's prefix of teed lines"
    told = [line for line in done.stdout.splitlines() if "disk on fire" in line]
    assert len(told) == 1 and "[default0]" in told[0]
    assert list(logs.rglob("1/stderr.log"))


def test_redirected_output_stays_off_the_console_and_filtered_ranks_are_silent(tmp_path: Path) -> None:
    command = write(tmp_path, 'say("hello")')
    done = run(["--nproc-per-node", "2", "--redirects", "3", "--log-dir", str(tmp_path / "logs"), *command])
    assert done.stdout == "" and len(list((tmp_path / "logs").rglob("stdout.log"))) == 2
    done = run(["--nproc-per-node", "3", "--local-ranks-filter", "0,2", *command])
    assert sorted(json.loads(line)["rank"] for line in done.stdout.splitlines()) == [0, 2]


CHILDREN = """
import subprocess
from multiprocessing import get_context, util
def share():
    open(f"/dev/shm/torch_{os.getpid()}_1_1", "w").close()  # as when torch is killed before it has taken the name away
    time.sleep(600)
child = get_context("fork").Process(target=share)
child.start()
lock = get_context("spawn").Lock()  # a named one
while not os.path.exists(f"/dev/shm/torch_{child.pid}_1_1"): time.sleep(0.01)
other = subprocess.Popen(["sleep", "600"])
say("children", pids=[child.pid, other.pid], folder=util.get_temp_dir(), lock=lock._semlock.name)
while True:
    time.sleep(0.05)
    if m.frozen() > d.generation: d = agree(); say("decided", generation=d.generation, members=list(d.members))
"""


def test_what_a_worker_started_or_put_on_disk_ends_with_it_and_with_the_launcher(tmp_path: Path) -> None:
    """Processes, shared memory, semaphores, sockets: what a process that is killed leaves behind."""
    command, scratch = write(tmp_path, CHILDREN, MEMBER), tmp_path / "t"
    scratch.mkdir()
    options, environ = ("--no-respawn",), {"TMPDIR": str(scratch)}
    with cluster(2, command=command, script_options=("--elastic",), options=options, environ=environ) as job:
        job.wait(lambda: len(job.of("children")) == 2, "children started")
        pids = {event["rank"]: event["pids"] for event in job.of("children")}
        folders = {event["rank"]: Path(event["folder"]) for event in job.of("children")}
        assert all(folder.is_dir() and scratch in folder.parents for folder in folders.values())
        segments = {rank: Path(f"/dev/shm/torch_{first}_1_1") for rank, (first, _) in pids.items()}
        assert all(segment.exists() for segment in segments.values())
        semaphores = {"sem." + event["lock"].removeprefix("/") for event in job.of("children")}
        assert len(semaphores & set(os.listdir("/dev/shm"))) == 2
        job.kill(1)
        job.wait(lambda: bool(job.of("decided", generation=2)), "the survivor goes on")
        job.wait(lambda: not any(is_alive(pid) for pid in pids[1]), "children of the dead end")
        job.wait(lambda: not folders[1].exists() and not segments[1].exists(), "and what it left on disk and in memory")
        assert all(is_alive(pid) for pid in pids[0]) and folders[0].is_dir() and segments[0].exists()
        job.agents[0].kill()
        job.wait(lambda: not any(is_alive(pid) for pid in pids[0]), "children end with the launcher")
        job.wait(lambda: not list(scratch.iterdir()), "nothing is left on disk")
        job.wait(lambda: not segments[0].exists(), "nothing is left in memory")
        job.wait(lambda: not semaphores & set(os.listdir("/dev/shm")), "no semaphore is left")


def test_ctrl_c_twice_ends_at_once_and_leaves_nothing() -> None:
    with cluster(2, script_options=("--seconds", "600", "--step-seconds", "300")) as job:
        job.wait_members([0, 1])
        os.kill(job.agents[0].pid, signal.SIGINT)
        job.wait_text("the job saves a checkpoint")
        os.kill(job.agents[0].pid, signal.SIGINT)
        assert job.exit_code() == 128 + signal.SIGINT
        assert not job.survivors() and job.port_is_free()


def test_a_drain_that_takes_too_long_is_ended_after_the_grace() -> None:
    options = ("--shutdown-timeout", "1")
    with cluster(2, options=options, script_options=("--seconds", "600", "--step-seconds", "300")) as job:
        job.wait_members([0, 1])
        os.kill(job.agents[0].pid, signal.SIGTERM)
        assert job.exit_code() == 128 + signal.SIGTERM
        assert not job.survivors()


def test_a_job_stopped_for_good_ends_with_status_0_on_every_node() -> None:
    """Status 3 would have a scheduler queue it again."""
    with cluster(1, nodes=2, script_options=("--seconds", "600")) as job:
        job.wait_members([0, 1])
        assert ask(job.run_id, 1, Stop()) == Acceptance("stop", job.run_id, ())
        assert [job.exit_code(node) for node in (0, 1)] == [0, 0]
        assert {event["rank"] for event in job.of("drained")} == {0, 1}
        job.wait_text("stopped as asked (ctl stop)")


def test_ctl_shows_and_drains_a_running_job() -> None:
    def ctl(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "megatron.elastic.ctl", *arguments]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environ, cwd=ROOT)

    with cluster(3, script_options=("--seconds", "600")) as job:
        job.wait_members([0, 1, 2])
        at_once = ask(job.run_id, 0, Status())
        assert isinstance(at_once, JobStatus) and set(at_once.workers_here) == {0, 1, 2}
        done = ctl("status", "--json", "--run-id", job.run_id)
        status = json.loads(done.stdout)
        assert status["members"] == [0, 1, 2] and status["generation"]["decided"] == 1
        assert set(status["workers_here"]) == {"0", "1", "2"}
        assert ctl("checkpoint", "--run-id", job.run_id).returncode == 0
        job.wait(lambda: {e["rank"] for e in job.of("asks", what="checkpoint")} == {0, 1, 2}, "everybody saves")
        wrong = ctl("drain", "--run-id", "no-such-job")
        assert wrong.returncode == 1 and "Traceback" not in wrong.stderr
        assert "job 'no-such-job' does not run on this machine" in wrong.stderr
        assert "no such ranks" in ctl("drain", "--run-id", job.run_id, "--ranks", "9").stderr
        for ends in ("drain", "stop"):  # a name left out is not taken for this job's
            unnamed = ctl(ends)
            assert unnamed.returncode == 1 and job.run_id in unnamed.stderr and "--run-id" in unnamed.stderr
        assert "stop takes no --ranks" in ctl("stop", "--run-id", job.run_id, "--ranks", "1").stderr
        accepted = json.loads(ctl("drain", "--run-id", job.run_id).stdout)
        assert accepted == {"answer": "accepted", "accepted": "drain", "run_id": job.run_id, "ranks": []}
        assert job.exit_code() == 3
