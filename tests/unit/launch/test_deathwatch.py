"""A death is heard when it begins, from the lock that a worker's training thread holds, before the process is gone.

Real processes, real kills. Order is asserted, never a time.
"""

from __future__ import annotations

import mmap
import os
import random
import select
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from megatron.elastic._process import LOCK_BYTES, Deathwatch, hold
from megatron.elastic.control import env
from megatron.elastic.control.clock import boot_ns
from megatron.elastic.control.slot import Slot
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.launch.workers.pool import Pool, PoolEvents, Worker
from megatron.elastic.launch.workers.processes import describe_status, ending_status, process_state
from megatron.elastic.launch.workers.zygote_messages import WorkerSpec
from megatron.elastic.launch.workers.zygote_process import ZygoteProcess
from tests.unit.launch.serving import PATIENCE, serve

HEAVY = 256 << 20
"""Bytes that the kernel has to take apart, page by page, before a process is gone."""


class Holder:
    """A forked process whose one thread holds a lock, and ends at a signal or when told to."""

    def __init__(self, memory: int = 0, code: int | None = None) -> None:
        self.shared = mmap.mmap(-1, mmap.PAGESIZE)
        self.lock = memoryview(self.shared)[:LOCK_BYTES]
        ready, told = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            hold(self.lock)
            heap = mmap.mmap(-1, max(memory, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            heap.madvise(mmap.MADV_NOHUGEPAGE)
            for at in range(0, memory, mmap.PAGESIZE):
                heap[at] = 1
            os.write(ready[1], b"!")
            os.read(told[0], 1)
            os._exit(code or 0)
        self.pidfd = os.pidfd_open(self.pid)
        self._told = told[1]
        assert os.read(ready[0], 1) == b"!"
        for fd in (ready[0], ready[1], told[0]):
            os.close(fd)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def leave(self) -> None:
        os.write(self._told, b"!")

    def end(self) -> None:
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        os.close(self._told)


def is_readable(fd: int, seconds: float = 0.0) -> bool:
    return bool(select.select([fd], [], [], seconds)[0])


@pytest.mark.parametrize("how", ["killed", "left"])
def test_a_death_is_heard_and_its_status_known_before_the_process_is_gone(how: str) -> None:
    deathwatch, first = Deathwatch(), 0
    for number in range(6):
        holder = Holder(HEAVY, code=7)
        assert deathwatch.watch(number, holder.lock)
        assert not is_readable(deathwatch.fileno()) and deathwatch.take() == []
        (holder.kill if how == "killed" else holder.leave)()
        assert is_readable(deathwatch.fileno(), PATIENCE)
        status = ending_status(holder.pid)
        first += not is_readable(holder.pidfd)
        assert deathwatch.take() == [number] and deathwatch.take() == []
        assert status is not None
        assert describe_status(status) == ("signal SIGKILL" if how == "killed" else "exit code 7")
        assert is_readable(holder.pidfd, PATIENCE)
        deathwatch.forget(number)
        holder.end()
    # Such a process takes tens of milliseconds to be taken apart; once this test may have had to wait as long.
    assert first >= 5, f"heard before the process was gone: {first} of 6"


def test_each_death_is_heard_once_and_none_that_is_not_watched_or_did_not_happen() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    deathwatch, holders = Deathwatch(), [Holder() for _ in range(12)]
    watched, dead, heard, forgotten = set[int](), set[int](), list[int](), set[int]()
    for _ in range(60):
        number, deed = chance.randrange(12), chance.choice(("watch", "kill", "forget", "take"))
        if deed == "watch" and number not in watched | forgotten:
            assert deathwatch.watch(number, holders[number].lock)  # also one that is dead already
            watched.add(number)
        elif deed == "kill" and number not in dead:
            holders[number].kill()
            dead.add(number)
        elif deed == "forget" and number not in dead:
            deathwatch.forget(number)
            watched.discard(number)
            forgotten.add(number)
        elif deed == "take":
            heard += deathwatch.take()
    end = time.monotonic() + PATIENCE
    while set(heard) != watched & dead and time.monotonic() < end:
        if is_readable(deathwatch.fileno(), 1.0):
            heard += deathwatch.take()
    for number, holder in enumerate(holders):
        deathwatch.forget(number)
        holder.end()
    assert sorted(heard + deathwatch.take()) == sorted(watched & dead)


def test_a_free_lock_is_not_waited_for() -> None:
    assert not Deathwatch().watch(1, mmap.mmap(-1, mmap.PAGESIZE))
    with pytest.raises(ValueError, match="LOCK_BYTES"):
        Deathwatch().watch(1, bytearray(8))


def test_nothing_is_left_of_those_who_were_waited_for() -> None:
    before, holder = threads_and_descriptors(), Holder()
    for _ in range(5):
        deathwatch = Deathwatch()
        for number in range(4):
            assert deathwatch.watch(number, holder.lock)
        deathwatch.forget(0)
        del deathwatch
    holder.end()
    assert threads_and_descriptors() == before


def threads_and_descriptors() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


PROGRAM = f"""
import mmap, threading, time
from megatron.elastic.control.client import WorkerMembership

heap = mmap.mmap(-1, {HEAVY}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
heap.madvise(mmap.MADV_NOHUGEPAGE)
for at in range(0, {HEAVY}, mmap.PAGESIZE):
    heap[at] = 1
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
WorkerMembership.from_env().start(lambda generation: None)
time.sleep(600)
"""


def test_a_worker_has_ended_before_it_is_gone_and_its_end_is_told_once(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(PROGRAM)
    loop, ends = Loop(), list[tuple[Worker, int, bool]]()

    def said(worker: Worker, _: object) -> None:
        pool.watch_lock(worker)
        loop.after(0.0, lambda: os.kill(worker.pid, signal.SIGKILL))

    def ended(worker: Worker, status: int) -> None:
        ends.append((worker, status, pool.keeps(worker.rank) and not is_readable(worker.pidfd)))

    pool = Pool(loop, (), PoolEvents(said, ended, lambda ready: None), ZygoteProcess.execute(()))
    try:
        # On a busy machine a worker may be gone before this process looks: another worker shows it.
        for number in range(1, 13):
            if sum(early for _, _, early in ends) == 2:
                break
            start(pool, script, number)
            serve(loop, lambda: bool(ends) and not pool.keeps(0))
            assert [status for _, status, _ in ends] == [signal.SIGKILL] * number
            assert process_state(ends[-1][0].pid) in (None, "Z")
    finally:
        pool.close()
        loop.close()
    assert sum(early for _, _, early in ends) == 2, "the end of a worker was told only when it was gone"


def start(pool: Pool, script: Path, number: int) -> None:
    mine, theirs = socket.socketpair()
    fd, slot = Slot.create("test")
    environ = {"RANK": "0", env.SLOTS: "1", env.INCARNATION: str(number), env.HOST: "here", env.DOMAIN: "here"}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    spec = WorkerSpec.of(number, "script", str(script), (), environ)
    out = os.open(os.devnull, os.O_WRONLY)
    pool.fork(spec, Worker(number, 0, 0, number, mine, slot), fd, theirs, out, os.dup(2))


def test_a_worker_that_starts_has_the_lease_of_its_node(tmp_path: Path) -> None:
    """Without one it would go on if its agent were stopped before the next renewal."""
    script = tmp_path / "worker.py"
    script.write_text("import time; time.sleep(600)")
    loop, events = Loop(), PoolEvents(lambda *_: None, lambda *_: None, lambda _: None)
    pool = Pool(loop, (), events, ZygoteProcess.execute(()))
    try:
        for number, (until, over) in enumerate([(0, False), (boot_ns() + 10**12, False), (1, True)], 1):
            pool.extend_leases(until)
            start(pool, script, number)
            assert [worker.slot.lease_over() for worker in pool.workers.values()] == [over] * number
    finally:
        pool.close()
        loop.close()


def test_the_end_of_the_training_thread_ends_its_process(tmp_path: Path) -> None:
    """A thread that ends alone leaves a process nobody could compute with: it is killed before anybody hears of it."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import threading, time\nfrom megatron.elastic.control.client import WorkerMembership\n"
        "membership = WorkerMembership.from_env()\n"
        "threading.Thread(target=membership.start, args=(lambda generation: None,)).start()\ntime.sleep(600)\n"
    )
    loop, ends = Loop(), list[int]()
    pool = Pool(
        loop,
        (),
        PoolEvents(
            lambda worker, _: pool.watch_lock(worker), lambda _, status: ends.append(status), lambda ready: None
        ),
        ZygoteProcess.execute(()),
    )
    try:
        start(pool, script, 1)
        serve(loop, lambda: bool(ends) and not pool.keeps(0))
        assert ends == [signal.SIGKILL]
    finally:
        pool.close()
        loop.close()
