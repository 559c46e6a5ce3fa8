"""The launcher's view of processes, and its loop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron.elastic.control.wire import ProtocolError
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.launch.workers.processes import (
    MessageSocket,
    describe_status,
    exit_status,
    kill_group,
    process_state,
    sweep_scratch,
    sweep_segments,
)
from megatron.elastic.launch.workers.zygote_messages import Exited, Fork, FromZygote, Ready, WorkerSpec

ENVIRON = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}


def wait_for(claim: object, seconds: float = 30.0) -> None:
    assert callable(claim)
    end = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_the_status_of_a_dead_process_is_readable_before_it_is_reaped() -> None:
    child = subprocess.Popen(["sleep", "600"])
    assert exit_status(child.pid) is None
    child.send_signal(signal.SIGSTOP)
    wait_for(lambda: process_state(child.pid) == "T")
    child.kill()
    wait_for(lambda: process_state(child.pid) == "Z")
    status = exit_status(child.pid)
    assert status is not None and describe_status(status) == "signal SIGKILL"
    child.wait()
    assert process_state(child.pid) is None and exit_status(child.pid) is None
    assert describe_status(7 << 8) == "exit code 7"


def test_a_death_signal_reaches_a_child_whose_parent_was_killed() -> None:
    program = (
        "import os, time\n"
        "from megatron.elastic.launch.workers.processes import die_with_parent\n"
        "me = os.getpid()\n"
        "child = os.fork()\n"
        "if child == 0:\n    die_with_parent(me); print(os.getpid(), flush=True); time.sleep(600)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=ENVIRON)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    wait_for(lambda: process_state(child) in (None, "Z"))
    parent.wait()


def test_asking_for_a_death_signal_too_late_ends_the_child_at_once() -> None:
    module = "megatron.elastic.launch.workers.processes"
    program = f"from {module} import die_with_parent; die_with_parent(1); print('alive')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRON)
    assert done.returncode == 128 + signal.SIGKILL and done.stdout == ""


def test_killing_a_group_takes_what_the_leader_started() -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); input()"
    leader = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert leader.stdout is not None
    grandchild = int(leader.stdout.readline())
    kill_group(leader.pid)
    leader.wait()
    wait_for(lambda: process_state(grandchild) in (None, "Z"))
    kill_group(leader.pid)


def test_messages_carry_descriptors_and_the_end_is_none() -> None:
    one, two = MessageSocket.pair(FromZygote, Fork)
    reading, writing = os.pipe()
    fork = Fork(WorkerSpec(1, "script", b"name \xff.py", ("é".encode(),), {"A": b"\xfe"}, True))
    one.send(fork, [writing])
    os.close(writing)
    received = two.receive()
    assert received is not None and received[0] == fork
    os.write(received[1][0], b"through")
    os.close(received[1][0])
    assert os.read(reading, 100) == b"through"
    os.close(reading)
    one.send(Ready(()))
    with pytest.raises(ProtocolError):
        two.receive()
    two.send(Exited(1, 9))
    assert one.receive() == (Exited(1, 9), [])
    one.close()
    assert two.receive() is None
    two.close()


def test_only_segments_of_the_prefix_are_swept() -> None:
    names = [f"/dev/shm/mel-test{os.getpid()}-0-x", f"/dev/shm/mel-test{os.getpid()}-1-x"]
    for name in names:
        open(name, "w").close()
    sweep_segments(f"mel-test{os.getpid()}-0-")
    assert [os.path.exists(name) for name in names] == [False, True]
    os.unlink(names[1])


def test_a_segment_that_a_process_has_open_is_not_swept_though_it_bears_a_dead_ones_number(tmp_path: Path) -> None:
    """As of a process in another PID namespace that shares /dev/shm, or one that was given the number anew."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    program = f"""
import mmap, os
for how in ("open", "mapped", "left"):
    fd = os.open(f"/dev/shm/torch_{dead.pid}_{{how}}", os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(fd, 4096)
    if how == "mapped":
        kept = mmap.mmap(fd, 4096)
    if how != "open":
        os.close(fd)
print("made", flush=True)
input()
"""
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "made\n"

    def sweep() -> set[str]:
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        (scratch / str(dead.pid)).touch()
        sweep_scratch(str(scratch))
        assert not scratch.exists()
        return {name.rpartition("_")[2] for name in os.listdir("/dev/shm") if name.startswith(f"torch_{dead.pid}_")}

    try:
        assert sweep() == {"open", "mapped"}
    finally:
        other.kill()
        other.wait()
    assert sweep() == set(), "nobody has them open any more"


def test_the_loop_keeps_order_takes_calls_from_threads_and_forgets_within_a_batch() -> None:
    loop, log = Loop(), list[str]()
    pairs = [socket.socketpair() for _ in range(2)]

    def readable() -> None:
        log.append("readable")
        for mine, _ in pairs:  # whichever comes first forgets both
            loop.forget(mine.fileno())

    for mine, theirs in pairs:
        theirs.send(b"x")
        loop.watch(mine.fileno(), lambda _mask: readable())
    loop.after(0.02, lambda: log.append("later"))
    loop.after(0.01, lambda: log.append("sooner"))
    loop.after(0.05, lambda: threading.Thread(target=lambda: loop.post(loop.stop)).start())
    loop.run()
    assert log == ["readable", "sooner", "later"]
    loop.close()
    for pair in pairs:
        for end in pair:
            end.close()


def test_a_signal_is_handled_on_the_loop() -> None:
    loop, seen = Loop(), list[int]()
    before = signal.getsignal(signal.SIGUSR1)
    loop.on_signal(signal.SIGUSR1, lambda number: (seen.append(number), loop.stop())[0])
    os.kill(os.getpid(), signal.SIGUSR1)
    loop.run()
    signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]
    loop.close()


def test_a_process_counts_its_own_threads() -> None:
    program = (
        "import threading\n"
        "from megatron.elastic.launch.workers.processes import thread_count\n"
        "before, done = thread_count(), threading.Event()\n"
        "threading.Thread(target=done.wait).start()\n"
        "print(thread_count() - before)\n"
        "done.set()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRON)
    assert done.stdout == "1\n"
