"""Work of the embedded store at a loss, by number of nodes.

    python -m tools.bench.journal [--nodes 16 64 128 256]

A real server, and of each node's agent the two real connections that append to and follow the journal, over loopback.
All agents at once append the report of their 8 ranks, and each reads what all appended. So many agents share this
machine's cores, so the time until all have read is that of their own work here; of the server, processor time counts.

server_s   processor time of the process that serves the store
all_s      time until every agent has read every report
bytes      of one node's entry, as it is kept

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from megatron.elastic.comm.address import Address, EndpointValue
from megatron.elastic.control.channel import Credentials
from megatron.elastic.control.events import Entry, Reported
from megatron.elastic.control.journal import Journal
from megatron.elastic.control.signer import Signer
from megatron.elastic.control.store_client import reach
from megatron.elastic.control.store_server import serve
from tools.bench._common import print_result
from tools.bench.agreement import RANKS_OF_A_NODE, report

CREDENTIALS = Credentials("5e" * 16, "bench")
SECONDS = 60.0
PROCESSES = 2


def main() -> None:
    """Measure all sizes and print a line each and the JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 64, 128, 256])
    rows = []
    for nodes in parser.parse_args().nodes:
        rows.append(measure(nodes))
        print("  ".join(f"{key} {value:.3g}" for key, value in rows[-1].items()), flush=True)
    print_result("journal", {"rows": rows})


def measure(nodes: int) -> dict[str, float]:
    """Return the figures of one loss."""
    server = Started.of(_serve)
    port = server.told()
    agents = [Started.of(_agents, port, range(first, nodes, PROCESSES), nodes) for first in range(PROCESSES)]
    entry_bytes = max(agent.told() for agent in agents)
    before = server.asked()
    began = time.monotonic()
    for agent in agents:
        agent.connection.send(None)
    for agent in agents:
        agent.told()
    seconds = time.monotonic() - began
    spent = server.asked() - before
    for process in (*agents, server):
        process.end()
    return {"nodes": nodes, "server_s": spent, "all_s": seconds, "bytes": entry_bytes}


@dataclass(frozen=True)
class Started:
    """A process and the pipe to it."""

    process: multiprocessing.Process
    connection: Connection

    @classmethod
    def of(cls, target: object, *arguments: object) -> Started:
        """Start ``target(pipe, *arguments)``."""
        here, there = multiprocessing.Pipe()
        process = multiprocessing.Process(target=target, args=(there, *arguments), daemon=True)  # type: ignore[arg-type]
        process.start()
        return cls(process, here)

    def told(self) -> float:
        """Return the next number that the process sends. Raises ``TimeoutError``."""
        if not self.connection.poll(SECONDS):
            raise TimeoutError(f"nothing from process {self.process.pid} in {SECONDS:.0f} s")
        number: float = self.connection.recv()
        return number

    def asked(self) -> float:
        """Ask for the next number, and return it."""
        self.connection.send(None)
        return self.told()

    def end(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.join()


def _serve(pipe: Connection) -> None:
    served = serve("127.0.0.1", 0, CREDENTIALS)
    pipe.send(served.port)
    while True:
        pipe.recv()
        used = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(used.ru_utime + used.ru_stime)


def _agents(pipe: Connection, port: int, nodes: range, total: int) -> None:
    """Append and follow for ``nodes``, when told; say when all have read the entries of ``total`` nodes."""
    signer = Signer(CREDENTIALS)
    events = [_reported(node) for node in nodes]
    ends = [Journal(reach("127.0.0.1", port, CREDENTIALS, SECONDS), signer) for _ in range(2 * len(nodes))]
    threads = [
        *(threading.Thread(target=_append, args=pair) for pair in zip(ends[: len(nodes)], events, strict=True)),
        *(threading.Thread(target=_follow, args=(journal, total)) for journal in ends[len(nodes) :]),
    ]
    pipe.send(len(signer.sign("journal/0", str(events[0]).encode())))
    pipe.recv()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send(0.0)
    pipe.recv()


def _reported(node: int) -> Reported:
    ranks = range(RANKS_OF_A_NODE * node, RANKS_OF_A_NODE * (node + 1))
    where: dict[str, EndpointValue] = {"ip": "10.0.0.1", "port": 1, "broken": []}
    return Reported(2, tuple(Entry(Address(rank, 1, f"node{node}", where), report(rank)) for rank in ranks))


def _append(journal: Journal, event: Reported) -> None:
    for _ in journal.append(event):
        pass


def _follow(journal: Journal, total: int) -> None:
    while journal.position < total:
        for _ in journal.follow(SECONDS):
            pass


if __name__ == "__main__":
    main()
