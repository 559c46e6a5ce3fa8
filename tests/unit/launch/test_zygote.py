"""The parent of a node's workers: what it tells its agent, and that nothing of a worker is left when either goes."""

from __future__ import annotations

import glob
import os
import select
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megatron.elastic.control import env
from megatron.elastic.control.slot import Slot
from megatron.elastic.launch.workers.processes import MessageSocket
from megatron.elastic.launch.workers.zygote import Zygote
from megatron.elastic.launch.workers.zygote_messages import Exited, Fork, Forked, FromZygote, Ready, WorkerSpec
from megatron.elastic.launch.workers.zygote_process import ZygoteProcess

PATIENCE = 60.0


class Agent:
    """The agent's end of a zygote in a process of its own."""

    def __init__(self, process: ZygoteProcess) -> None:
        self.process = process
        self._slots: list[Slot] = []

    def hear(self) -> tuple[FromZygote, list[int]]:
        """The next message, with its descriptors."""
        poll = select.poll()
        poll.register(self.process.socket, select.POLLIN)
        assert poll.poll(1000.0 * PATIENCE), "the zygote is silent"
        received = self.process.socket.receive()
        assert received is not None, "the zygote has ended"
        return received

    def fork(self, number: int, script: Path, **environ: str) -> int:
        """Have a worker forked; its process id."""
        theirs, mine = socket.socketpair()
        fd, slot = Slot.create("test")
        self._slots.append(slot)
        out, err = os.open(os.devnull, os.O_WRONLY), os.dup(2)
        spec = WorkerSpec.of(number, "script", str(script), (), environ)
        self.process.socket.send(Fork(spec), [theirs.fileno(), fd, out, err])
        for descriptor in (fd, out, err):
            os.close(descriptor)
        theirs.close()
        mine.close()
        message, fds = self.hear()
        assert isinstance(message, Forked) and message.number == number
        os.close(fds[0])
        return message.pid

    def close(self) -> None:
        self.process.socket.close()
        assert self.process.wait(PATIENCE)
        for slot in self._slots:
            slot.close()


@contextmanager
def zygote(modules: Sequence[str] = ()) -> Iterator[Agent]:
    agent = Agent(ZygoteProcess.execute(modules))
    try:
        yield agent
    finally:
        agent.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the zygote and its workers import from."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)]))
    return tmp_path


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def until(claim: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not claim():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_modules_that_fail_or_start_a_thread_are_named_and_workers_then_start_without_them(folder: Path) -> None:
    """A fork copies one thread only; a lock that another one holds would stay locked in the worker."""
    written(folder, "fails_on_import.py", "raise LookupError('no licence')")
    written(
        folder,
        "starts_a_thread.py",
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    )
    worker = written(
        folder,
        "worker.py",
        "import sys\nopen(__file__ + '.seen', 'w').write(str('starts_a_thread' in sys.modules))\n",
    )
    with zygote(("fails_on_import", "json", "starts_a_thread")) as agent:
        message, _ = agent.hear()
        assert isinstance(message, Ready)
        failed, started, slow = message.notes
        assert failed == "could not preload fails_on_import: LookupError: no licence"
        assert started == "preloading starts_a_thread started 1 thread(s)"
        assert "exec instead of fork" in slow
        agent.fork(1, worker)
        assert agent.hear() == (Exited(1, 0), [])
    assert Path(f"{worker}.seen").read_text() == "False"


def test_a_worker_that_is_forked_has_what_was_preloaded(folder: Path) -> None:
    written(folder, "costly.py", "")
    worker = written(
        folder,
        "worker.py",
        """
        import sys, threading
        sys.exit(40 + ('costly' in sys.modules) + 2 * (threading.active_count() == 1))
        """,
    )
    with zygote(("costly",)) as agent:
        assert agent.hear() == (Ready(()), [])
        for number in (1, 2):
            agent.fork(number, worker)
            message, _ = agent.hear()
            assert isinstance(message, Exited) and os.waitstatus_to_exitcode(message.status) == 43


LEAVES_A_CHILD = """
    import os, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(__file__ + ".child", "a") as out:
        out.write(f"{child.pid} ")
    if os.environ["END"] == "now":
        os._exit(7)
    time.sleep(600)
"""


def test_what_a_worker_leaves_in_its_process_group_ends_with_it(folder: Path) -> None:
    worker = written(folder, "worker.py", LEAVES_A_CHILD)
    with zygote() as agent:
        agent.hear()
        agent.fork(1, worker, END="now")
        message, _ = agent.hear()
        assert isinstance(message, Exited) and os.waitstatus_to_exitcode(message.status) == 7
        child = int(Path(f"{worker}.child").read_text())
        until(lambda: not psutil.pid_exists(child))


def test_all_workers_and_what_they_left_go_with_the_agent(folder: Path) -> None:
    worker = written(folder, "worker.py", LEAVES_A_CHILD)
    prefix = f"mel-zygote-{os.getpid()}-"
    segment = Path(f"/dev/shm/{prefix}left")
    segment.touch()
    scratch = folder / "scratch"
    (scratch / "1").mkdir(parents=True)
    child = Path(f"{worker}.child")
    with zygote() as agent:
        agent.hear()
        environ = {"END": "later", env.SEGMENT_PREFIX: prefix, env.SCRATCH: str(scratch / "1")}
        pids = [agent.fork(number, worker, **environ) for number in (1, 2)]
        until(lambda: child.exists() and child.read_text().count(" ") == 2)
        pids += map(int, child.read_text().split())
    until(lambda: not any(map(psutil.pid_exists, pids)))
    assert glob.glob(f"/dev/shm/{prefix}*") == [] and not scratch.exists()


def test_a_zygote_ends_with_the_socket_of_its_agent() -> None:
    ours, theirs = MessageSocket.pair(FromZygote, Fork)
    ours.close()
    assert Zygote(theirs).serve() is None
    theirs.close()
