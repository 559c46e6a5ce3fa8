"""A job's machine can be made unsteady: what its processes see of the wall clock and of the disk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.chaos.unsteady import Unsteady

PROGRAM = """
import os, sys, threading, time

def told(*values):
    print(*values, flush=True)
    sys.stdin.readline()

def tries(path):
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    before = time.monotonic()
    os.write(file, b"x")
    os.fsync(file)
    return time.monotonic() - before

told("ready")
before = time.monotonic()
threading.Event().wait(0.2)
told(time.time(), time.monotonic() - before, tries(sys.argv[1]))
told(tries(sys.argv[1]))
"""


def test_a_clock_that_jumps_and_a_slow_disk_are_what_the_process_sees(tmp_path: Path) -> None:
    unsteady = Unsteady(tmp_path / "unsteady")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "file")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **unsteady.environment}
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def after(line: str) -> list[float]:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            return [float(word) for word in process.stdout.readline().split()]

        assert process.stdout.readline() == "ready\n"
        unsteady.clock(-7200)
        wall, waited, quick = after("jumped")
        assert abs(time.time() - 7200 - wall) < 600 and 0.2 <= waited < 60, "waits do not follow the jump"
        unsteady.disk(0.3)
        (slow,) = after("slow")
        assert slow >= 0.6 > quick, "one write and one sync"
        process.stdin.close()
        assert process.wait(60) == 0
