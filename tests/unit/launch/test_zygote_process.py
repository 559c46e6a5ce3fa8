"""A zygote serves alike whether it is forked from its agent or started in a new interpreter, and ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
    import os, select, signal, socket, sys, threading
    import torch
    import megatron.elastic.launch.agent.agent
    from megatron.elastic.control.slot import Slot
    from megatron.elastic.launch.workers.zygote_messages import Fork, WorkerSpec
    from megatron.elastic.launch.workers.zygote_process import ZygoteProcess, may_fork

    def messages(zygote):
        while True:
            poll = select.poll()
            poll.register(zygote.socket, select.POLLIN)
            assert poll.poll(60_000), "the zygote is silent"
            received = zygote.socket.receive()
            if received is None:
                return
            yield received

    assert may_fork(), "a thread that an import starts would make every start of a job slower"
    zygote = getattr(ZygoteProcess, sys.argv[1])(("torch",))
    os.kill(zygote.pid, signal.SIGTERM)  # as Slurm signals all processes of a step, whatever they do
    heard = messages(zygote)
    next(heard)
    print(os.readlink(f"/proc/{zygote.pid}/fd/0"), os.getsid(zygote.pid) == zygote.pid)
    print(open(f"/proc/{zygote.pid}/comm").read(), end="")
    fd, _ = Slot.create("test")
    control, theirs = socket.socketpair()
    spec = WorkerSpec.of(1, "script", sys.argv[2], ("a", "\\udcff"), {"RANK": "3"})
    out = os.dup(1)
    zygote.socket.send(Fork(spec), [theirs.fileno(), fd, out, os.dup(2)])
    for _ in range(2):
        next(heard)
    print(open(sys.argv[3]).read())
    zygote.kill() if sys.argv[4] == "kill" else zygote.socket.close()
    print(zygote.wait(60.0), zygote.wait())
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    print("with a thread:", may_fork())
"""
WORKER = """
    import os, sys
    loaded = "torch" in sys.modules
    with open(sys.argv[0] + ".told", "w") as out:
        name = open("/proc/self/comm").read().strip()
        print(name, ascii(sys.argv[1:]), os.environ["RANK"], loaded, sys.stdin.read() == "", end="", file=out)
    raise SystemExit(7)
"""


@pytest.mark.parametrize("end", ["kill", "close"])
@pytest.mark.parametrize("way", ["fork", "execute"])
def test_a_zygote_runs_workers_and_ends(tmp_path: Path, way: str, end: str) -> None:
    program, worker = tmp_path / "program.py", tmp_path / "worker.py"
    program.write_text(textwrap.dedent(PROGRAM))
    worker.write_text(textwrap.dedent(WORKER))
    done = subprocess.run(
        [sys.executable, str(program), way, str(worker), f"{worker}.told", end],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "/dev/null True",
        "elastic-zygote",
        "rank3 ['a', '\\udcff'] 3 True True",
        "True True",
        "with a thread: False",
    ]
