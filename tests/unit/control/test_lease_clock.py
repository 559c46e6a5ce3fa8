"""A lease runs out while the machine is suspended.

A time namespace shows a process what a machine that woke up would: ``CLOCK_BOOTTIME`` is
ahead by the time of the suspension, ``CLOCK_MONOTONIC`` is not.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.elastic.control.slot import Slot

ROOT = Path(__file__).resolve().parents[3]
SUSPENDED = ["unshare", "--fork", "--kill-child", "--time", "--boottime"]
WORKER = """
import socket, sys, time
from megatron.elastic.control.client import WorkerMembership
from megatron.elastic.control.slot import Slot
channel, slot = (int(text) for text in sys.argv[1:])
WorkerMembership(0, 0, 1, socket.socket(fileno=channel), Slot(slot), "node").start(lambda generation: None)
time.sleep(60)
"""


def why_not() -> str:
    try:
        made = subprocess.run([*SUSPENDED, "1", "true"], capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return made.stderr.strip()


@pytest.mark.skipif(bool(why_not()), reason=f"no time namespaces: {why_not()}")
def test_a_worker_ends_itself_when_its_lease_ran_out_while_the_machine_was_suspended() -> None:
    fd, slot = Slot.create("test")
    mine, theirs = socket.socketpair()
    slot.extend_lease(time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 50 * 10**9)
    command = [sys.executable, "-c", WORKER, str(theirs.fileno()), str(fd)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    workers = [
        subprocess.Popen(
            [*before, *command],
            pass_fds=(theirs.fileno(), fd),
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for before in ([*SUSPENDED, "100"], [*SUSPENDED, "1"])
    ]
    try:
        _, said = workers[0].communicate(timeout=40)
        assert "the lease of this node ran out" in said
        assert workers[1].poll() is None, "its lease holds: its machine was suspended for one second"
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        mine.close()
        theirs.close()
        os.close(fd)
