"""Real agents, real workers, real kills: a cluster of agents on this machine for launcher tests.

Workers print one JSON line an event; a thread a node collects them, and tests
wait for events, never for time. When a cluster is closed, whatever of it still
lives is a test failure, and is ended by process id.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.elastic.control import env
from tests.integration.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
REHEARSAL = ["-m", "megatron.elastic.launch.workers.rehearsal", "--elastic"]
PATIENCE = 120.0
Event = dict[str, Any]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    found, tasks = list[int](), list[Path]()
    with contextlib.suppress(OSError):
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    for task in tasks:
        with contextlib.suppress(OSError):  # that thread has ended, others may have children
            found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    direct = children(pid)
    return direct + [deep for child in direct for deep in descendants(child)]


class Cluster:
    """``nodes`` agents, each a failure domain, of ``workers`` workers that run ``command`` (default: the rehearsal)."""

    def __init__(
        self,
        workers: int,
        nodes: int = 1,
        command: list[str] | None = None,
        options: tuple[str, ...] = (),
        script_options: tuple[str, ...] = (),
        environ: dict[str, str] | None = None,
        node_options: Mapping[int, tuple[str, ...]] | None = None,
    ) -> None:
        self._node_options = node_options or {}
        self.workers, self.nodes = workers, nodes
        self.port = free_port()
        self.run_id = f"test-{os.getpid()}-{self.port}"
        self.events: list[Event] = []
        self.output: list[str] = []
        self.agents: dict[int, subprocess.Popen[str]] = {}
        self._changed = threading.Condition()
        self._command = [*(command or REHEARSAL), *script_options]
        self._options = options
        secret = {env.SECRET: secrets.token_hex(16)}
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **secret, **(environ or {})}
        self._seen_pids: set[int] = set()
        for node in range(nodes):
            self.start_agent(node)

    def start_agent(self, node: int) -> None:
        where = ["--nnodes", str(self.nodes), "--node-rank", str(node), "--master-port", str(self.port)]
        what = ["--nproc-per-node", str(self.workers), "--rdzv-id", self.run_id]
        more = self._node_options.get(node, ())
        agent = subprocess.Popen(
            [sys.executable, "-m", "megatron.elastic.launch", *where, *what, *self._options, *more, *self._command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"MEGATRON_ELASTIC_DOMAIN": f"node{node}", **self.environ},
            cwd=ROOT,
            start_new_session=True,
        )
        self.agents[node] = agent
        threading.Thread(target=self._collect, args=(agent,), daemon=True).start()

    def _collect(self, agent: subprocess.Popen[str]) -> None:
        assert agent.stdout is not None
        for line in agent.stdout:
            event = None
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
            with self._changed:
                self.output.append(line)
                if event is not None:
                    self.events.append(event)
                    self._seen_pids.add(event.get("pid", 0))
                self._changed.notify_all()

    def wait(self, claim: Callable[[], bool], what: str) -> None:
        """Until ``claim`` holds over what was printed; fails loudly after a generous time."""
        end = time.monotonic() + PATIENCE
        with self._changed:
            while not claim():
                self._changed.wait(0.2)
                if time.monotonic() > end:
                    raise AssertionError(f"not within {PATIENCE} s: {what}\n" + "".join(self.output[-60:]))

    def of(self, kind: str, **fields: object) -> list[Event]:
        return [e for e in self.events if e["event"] == kind and all(e.get(k) == v for k, v in fields.items())]

    def wait_decided(self, generation: int, ranks: int) -> list[Event]:
        """``ranks`` members have learnt of ``generation`` (or a later one)."""

        def claim() -> bool:
            return len({e["rank"] for e in self.of("decided") if e["generation"] >= generation}) >= ranks

        self.wait(claim, f"generation {generation} decided on {ranks} ranks")
        return self.of("decided", generation=generation)

    def wait_members(self, members: list[int], minimum: int = 1) -> int:
        """Every one of ``members`` is in a decision with exactly these members; returns its generation."""
        found = [0]

        def claim() -> bool:
            for event in reversed(self.of("decided")):
                g = event["generation"]
                informed = {e["rank"] for e in self.of("decided", generation=g)}
                if g >= minimum and event["members"] == members and informed >= set(members):
                    found[0] = g
                    return True
            return False

        self.wait(claim, f"a decision with members {members}")
        return found[0]

    def wait_text(self, text: str) -> None:
        self.wait(lambda: any(text in line for line in self.output), f"output {text!r}")

    def pid(self, rank: int) -> int:
        """Process id of the newest incarnation of ``rank``."""
        return int(self.of("begin", rank=rank)[-1]["pid"])

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(rank), number)

    def exit_code(self, node: int = 0) -> int:
        return self.agents[node].wait(PATIENCE)

    def text(self) -> str:
        return "".join(self.output)

    def survivors(self, seconds: float = 20.0) -> list[int]:
        """Processes of this cluster that still live ``seconds`` after the agents are gone."""
        end = time.monotonic() + seconds
        while True:
            left = [pid for pid in self._seen_pids if pid and is_alive(pid)]
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.05)

    def close(self) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                for pid in descendants(agent.pid):
                    self._seen_pids.add(pid)
                agent.kill()
                agent.wait()
        left = self.survivors()
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"processes {left} outlived their launcher\n{self.text()}"

    def port_is_free(self) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError:
                return False
            return True


@contextlib.contextmanager
def cluster(workers: int, nodes: int = 1, **options: Any) -> Iterator[Cluster]:
    """A cluster that leaves nothing behind."""
    made = Cluster(workers, nodes, **options)
    try:
        yield made
    finally:
        made.close()
