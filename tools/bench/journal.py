"""Work of the first agent at a loss, by number of nodes: it serves the store and hears the other agents.

    python -m tools.bench.journal [--nodes 16 64 128 256 512]

A real server, and of each other agent the real connections, over loopback. All agents at once say what their 8 ranks
report, and each reads what all said. Two ways, one after the other:

alone   each agent appends an entry of its own
joint   agents tell the first one, which appends what it was told in few entries

So many agents share this machine's cores, so the time until all have read is that of their own work here; of the first
agent, processor time counts.

server_s   processor time of the process of the first agent
all_s      time until every agent has read every report
entries    entries of the journal

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

from megatron.elastic.comm.address import Address, EndpointValue
from megatron.elastic.control.channel import Credentials
from megatron.elastic.control.events import Entry, Event, Part, Reported, Together
from megatron.elastic.control.journal import Journal
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.signer import Signer
from megatron.elastic.control.store import Store
from megatron.elastic.control.store_client import reach
from megatron.elastic.control.store_server import serve
from megatron.elastic.control.timing import Timing
from megatron.elastic.launch.agent.agent_place import AgentPlace
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.launch.agent.own_events import JointEntries, told
from megatron.elastic.launch.agent.presence import Presence
from tools.bench._common import print_result
from tools.bench.agreement import RANKS_OF_A_NODE, report

CREDENTIALS = Credentials("5e" * 16, "bench")
SIGNER = Signer(CREDENTIALS)
HOST = "127.0.0.1"
SECONDS = 120.0
PROCESSES = 2
TIMING = Timing.derive(SECONDS)
WAYS = ("alone", "joint")


def main() -> None:
    """Measure all sizes and print a line each and the JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 64, 128, 256, 512])
    rows = []
    for nodes in parser.parse_args().nodes:
        rows.append({"nodes": nodes, **{way: measure(nodes, way) for way in WAYS}})
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    print_result("journal", {"rows": rows})


def measure(nodes: int, way: str) -> dict[str, float]:
    """Return the figures of one loss with that many agents beside the first one."""
    server = Started.of(_serve, nodes)
    port = server.told()
    agents = [
        Started.of(_agents, port, range(1 + first, 1 + nodes, PROCESSES), nodes, way) for first in range(PROCESSES)
    ]
    for agent in agents:
        agent.told()
    before = server.asked()
    began = time.monotonic()
    for agent in agents:
        agent.connection.send(None)
    entries = max(agent.told() for agent in agents)
    seconds = time.monotonic() - began
    spent = server.asked() - before
    for process in (*agents, server):
        process.end()
    return {"server_s": spent, "all_s": seconds, "entries": entries}


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


def _place(node: int, nodes: int, store: Store, loop: Loop) -> AgentPlace:
    ranks = {one: tuple(range(RANKS_OF_A_NODE * one, RANKS_OF_A_NODE * (one + 1))) for one in range(1 + nodes)}
    all_nodes = {one: Node(f"node{one}", here, agent=str(one)) for one, here in ranks.items()}
    return AgentPlace(node, str(node), all_nodes, store, SIGNER, TIMING, loop)


def _nothing(*_: object) -> None:
    """No agent of a benchmark is lost."""


def _serve(pipe: Connection, nodes: int) -> None:
    served, loop = serve(HOST, 0, CREDENTIALS), Loop()
    place, writer = _place(0, nodes, served, loop), Journal(served, SIGNER)
    entries = JointEntries(place.nodes, loop, partial(_append, writer))
    presence = Presence(place, _nothing, _nothing, entries.hear, _nothing)
    loop.post(lambda: presence.start(HOST, HOST))
    threading.Thread(target=loop.run, daemon=True).start()
    pipe.send(served.port)
    while True:
        pipe.recv()
        used = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(used.ru_utime + used.ru_stime)


def _agents(pipe: Connection, port: int, here: range, total: int, way: str) -> None:
    """Say and follow for the nodes ``here``, when told; tell when all have read what ``total`` nodes said."""
    store, loop = reach(HOST, port, CREDENTIALS, SECONDS), Loop()
    connected = threading.Semaphore(0)
    says: list[Callable[[], None]]
    parts = {node: (Part(node, 0, 1, _reported(node)),) for node in here}
    if way == "joint":
        callers = {
            node: Presence(
                _place(node, total, store, loop), _nothing, lambda _: connected.release(), _nothing, _nothing
            )
            for node in here
        }
        for presence in callers.values():
            loop.post(partial(presence.start, HOST, HOST))
        threading.Thread(target=loop.run, daemon=True).start()
        for _ in here:
            connected.acquire()
        says = [partial(loop.post, partial(_say, callers[node], told(parts[node]))) for node in here]
    else:
        ends = {node: Journal(reach(HOST, port, CREDENTIALS, SECONDS), SIGNER) for node in here}
        says = [threading.Thread(target=_append, args=(ends[node], Together(parts[node]))).start for node in here]
    readers = [Journal(reach(HOST, port, CREDENTIALS, SECONDS), SIGNER) for _ in here]
    followers = [threading.Thread(target=_follow, args=(journal, total)) for journal in readers]
    for follower in followers:
        follower.start()
    pipe.send(0.0)
    pipe.recv()
    for say in says:
        say()
    for follower in followers:
        follower.join()
    pipe.send(readers[0].position)
    pipe.recv()


def _reported(node: int) -> Reported:
    ranks = range(RANKS_OF_A_NODE * node, RANKS_OF_A_NODE * (node + 1))
    where: dict[str, EndpointValue] = {"ip": "10.0.0.1", "port": 1, "broken": []}
    return Reported(2, tuple(Entry(Address(rank, 1, f"node{node}", where), report()) for rank in ranks))


def _say(presence: Presence, body: bytes) -> None:
    assert presence.say(body), "the connection takes no more"


def _append(journal: Journal, event: Event) -> None:
    for _ in journal.append(event):
        pass


def _follow(journal: Journal, total: int) -> None:
    read = 0
    while read < total:
        read += sum(len(entry.parts) for _, entry in journal.follow(SECONDS) if isinstance(entry, Together))


if __name__ == "__main__":
    main()
