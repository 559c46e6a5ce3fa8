"""Common parts of every benchmark and of every test with real processes.

- :class:`Ranks` forks ranks that talk to their parent over a pipe, so that the
  parent can kill one at a named point and collect the answers of the others.
- :func:`machine` describes where figures were taken, :func:`median_of` repeats a
  measurement, :func:`print_result` writes the one JSON object that ends a bench.

No process outlives the ``with`` block: leftovers are killed by pid.
"""

from __future__ import annotations

import functools
import gc
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist

__all__ = [
    "Failed",
    "Here",
    "Machine",
    "Ranks",
    "Spread",
    "fork",
    "keep_inherited",
    "machine",
    "median_of",
    "print_result",
]


class Failed(RuntimeError):
    """A rank raised; the text is its traceback."""


@dataclass(frozen=True)
class Here:
    """A rank's side of the harness."""

    rank: int
    size: int
    port: int
    pipe: Connection

    def store(self) -> dist.TCPStore:
        """A client of the parent's store, the same at each call; never block in it, other threads need it too."""
        return self._client

    @functools.cached_property
    def _client(self) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=60))

    def exchange(self, topic: str, value: Any, ranks: Iterable[int]) -> dict[int, Any]:
        """Every one of ``ranks`` puts a JSON value under ``topic``; all values, by rank."""
        store = self.store()
        store.set(f"exchange/{topic}/{self.rank}", json.dumps(value))
        keys = {rank: f"exchange/{topic}/{rank}" for rank in ranks}
        while not store.check(list(keys.values())):
            time.sleep(0.001)
        return {rank: json.loads(store.get(key)) for rank, key in keys.items()}

    def tell(self, what: Any) -> None:
        """Send a message to the parent."""
        self.pipe.send(("said", what))

    def ask(self) -> Any:
        """Wait for a message of the parent."""
        return self.pipe.recv()


def fork(process: BaseProcess) -> None:
    """Start a process of ``multiprocessing`` in which nothing is collected before :func:`keep_inherited`.

    Objects of the parent that are garbage may own threads that do not exist in the child, such as groups of torch.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        process.start()
    finally:
        if collects:
            gc.enable()


def keep_inherited() -> None:
    """In a process of :func:`fork`, collect garbage from now on, but never what the parent made."""
    gc.freeze()
    gc.enable()


class Ranks:
    """``size`` forked processes running ``body(here)``; more by :meth:`start`."""

    def __init__(self, size: int, body: Callable[[Here], Any], seconds: float = 60.0) -> None:
        self._body = body
        self._size = size
        self._deadline = time.monotonic() + seconds
        self._pipes: dict[int, Connection] = {}
        self._inbox: dict[int, list[tuple[str, Any]]] = {}
        self._processes: dict[int, Any] = {}

    def __enter__(self) -> Ranks:
        torch.set_num_threads(1)
        # The store has a process of its own: a thread of this one could hold a lock just as a rank is forked.
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        self._server = context.Process(target=_serve, args=(theirs,), daemon=True)
        fork(self._server)
        self._port = int(ours.recv())
        for rank in range(self._size):
            self.start(rank)
        return self

    def start(self, rank: int, body: Callable[[Here], Any] | None = None) -> None:
        """Fork ``rank``; in place of an earlier process of that rank, if there was one."""
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        here = Here(rank, self._size, self._port, theirs)
        process = context.Process(target=_run, args=(body or self._body, here), daemon=True)
        fork(process)
        theirs.close()
        self._pipes[rank], self._processes[rank], self._inbox[rank] = ours, process, []

    def hear(self, rank: int) -> Any:
        """Next word of ``rank``. Raises :class:`Failed` when it raised or died, ``TimeoutError``."""
        return self._next(rank)[1]

    def results(self, ranks: Iterable[int]) -> dict[int, Any]:
        """The result of ``body`` in each of ``ranks``."""
        return {rank: self.hear(rank) for rank in ranks}

    def say(self, rank: int, what: Any) -> None:
        self._pipes[rank].send(what)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Send a signal; the time at which it was sent (``time.monotonic``)."""
        sent = time.monotonic()
        os.kill(self.pid(rank), number)
        return sent

    def pid(self, rank: int) -> int:
        return int(self._processes[rank].pid)

    def exit_code(self, rank: int, seconds: float = 30.0) -> int | None:
        """Exit status of the process of ``rank`` (negative: by that signal); None if it runs after ``seconds``."""
        self._processes[rank].join(seconds)
        return cast("int | None", self._processes[rank].exitcode)

    def _next(self, rank: int) -> tuple[str, Any]:
        """The next message of ``rank``; a failure of any other rank meanwhile is raised at once."""
        while not self._inbox.setdefault(rank, []):
            left = max(0.0, self._deadline - time.monotonic())
            open_pipes = {pipe: peer for peer, pipe in self._pipes.items() if not pipe.closed}
            ready = multiprocessing.connection.wait(list(open_pipes), left)
            if not ready:
                raise TimeoutError(f"rank {rank} said nothing in time")
            for pipe in ready:
                self._receive(open_pipes[cast(Connection, pipe)], rank)
        return self._inbox[rank].pop(0)

    def _receive(self, peer: int, wanted: int) -> None:
        try:
            kind, what = self._pipes[peer].recv()
        except (EOFError, ConnectionResetError):
            self._pipes[peer].close()
            if peer == wanted:
                self._processes[peer].join(1.0)
                raise Failed(f"rank {peer} died (exit code {self._processes[peer].exitcode})") from None
            return
        if kind == "raised":
            raise Failed(f"rank {peer}:\n{what}")
        self._inbox.setdefault(peer, []).append((str(kind), what))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.join(timeout=0.0 if kind else 5.0)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()
        os.kill(self._server.pid or 0, signal.SIGKILL)
        self._server.join()
        for pipe in self._pipes.values():
            pipe.close()


def _serve(pipe: Connection) -> None:
    keep_inherited()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
    pipe.send(store.port)
    while os.getppid() != 1:
        time.sleep(0.5)
    os._exit(0)


def _run(body: Callable[[Here], Any], here: Here) -> None:
    keep_inherited()
    torch.set_num_threads(1)
    try:
        here.pipe.send(("returned", body(here)))
    except BaseException:
        here.pipe.send(("raised", traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@dataclass(frozen=True)
class Machine:
    """Where a figure was taken."""

    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    torch: str
    load: float


def machine() -> Machine:
    """This machine, and how busy it is (1-minute load average)."""
    model = "unknown"
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        model,
        len(os.sched_getaffinity(0)),
        round(pages / 2**30, 1),
        platform.release(),
        platform.python_version(),
        torch.__version__,
        round(os.getloadavg()[0], 2),
    )


@dataclass(frozen=True)
class Spread:
    """A repeated measurement."""

    median: float
    low: float
    high: float
    trials: int


def median_of(values: Sequence[float]) -> Spread:
    """Median, extremes and count of ``values`` (at least one)."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


def print_result(bench: str, figures: dict[str, Any]) -> None:
    """The one JSON object that ends a bench, on one line."""
    print(json.dumps({"bench": bench, "machine": asdict(machine()), **figures}, default=asdict), flush=True)
