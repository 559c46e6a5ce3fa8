"""Agents watching agents: leases in the store, and a connection that dies with its agent.

- *Lease.* Each agent renews a beat in the store, carrying its workers' idle table.
  Only a success extends the time its workers may act (``fence``), so that they end
  themselves before the others count them lost (``lease``), whatever the reason:
  agent stopped, store unreachable, machine frozen. The beat starts on the agent's
  loop: an agent that does not run does not renew.
- *Presence.* Each agent keeps a connection to the first one. When an agent is
  killed, the kernel closes it at once, which is faster than any lease. Its workers
  are then being killed by the same kernel (death signals). After a loss of the
  first one, which a job survives with its store in etcd, leases alone tell.

A connection that does not introduce itself with this job's seal is dropped.
"""

from __future__ import annotations

import json
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict

from megatron.elastic.control.clock import boot_ns, boot_seconds
from megatron.elastic.control.generations import Node
from megatron.elastic.control.journal import Seal
from megatron.elastic.control.store import Store, StoreLost
from megatron.elastic.control.suspicion import Idle
from megatron.elastic.control.timing import Timing
from megatron.elastic.control.wire import ProtocolError, as_object, as_rank, parse, take_int, take_list, take_str
from megatron.elastic.launch.loop import Loop

__all__ = ["Neighbours", "Table"]

Table = dict[int, tuple[int, Idle]]
"""Rank → (incarnation, what it does and for how long)."""

_HELLO_LIMIT = 4096
_STRANGERS = 64


class Neighbours:
    """See the module docstring. Callbacks run on the loop's thread."""

    def __init__(
        self,
        loop: Loop,
        store: Store,
        seal: Seal,
        timing: Timing,
        node: int,
        nodes: Mapping[int, Node],
        extend: Callable[[int], None],
        lost: Callable[[int, int, str], None],
    ) -> None:
        self._loop, self._seal, self._timing = loop, seal, timing
        self._node, self._nodes = node, nodes
        self._extend, self._lost = extend, lost
        self._store = store.clone()
        self._beats: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._count = 0
        self._heard: dict[int, tuple[str, float]] = {}
        self._last_beat = boot_seconds()
        self.tables: dict[int, Table] = {}
        self.seen: dict[int, int] = {}
        """Node → entries of the journal that its agent has read, as of its last beat."""
        self._listener: socket.socket | None = None
        self._callers: dict[int, tuple[socket.socket, bytearray]] = {}
        self._known: dict[int, tuple[int, int]] = {}
        """Descriptor → (node, epoch) of agents that introduced themselves."""
        self._presence: socket.socket | None = None

    def start(self, host: str) -> None:
        """Begin renewing, watching, and listening or calling. ``host``: of the first agent."""
        threading.Thread(target=self._renew, name="lease", daemon=True).start()
        if self._node == 0:
            self._listen(host)
        else:
            threading.Thread(target=self._call, args=(host,), name="presence", daemon=True).start()

    # -- leases ---------------------------------------------------------------

    def beat(self, table: Table, read: int) -> None:
        """Renew this agent's lease (from the loop, every ``timing.beat`` seconds). ``read``: entries of the journal."""
        now = boot_seconds()
        if now - self._last_beat > self._timing.grace + self._timing.beat * 2:
            # This agent did not run for a while: what it has not heard meanwhile proves nothing.
            self._heard = {node: (text, now) for node, (text, _) in self._heard.items()}
        self._last_beat = now
        self._count += 1
        rows = {str(rank): {"incarnation": inc, **asdict(idle)} for rank, (inc, idle) in table.items()}
        epoch = self._nodes[self._node].epoch
        body = json.dumps({"beat": self._count, "epoch": epoch, "read": read, "table": rows})
        if self._beats.empty():
            self._beats.put((boot_ns(), body))

    def forget(self, node: int) -> None:
        """``node`` has a new agent: its silence counts from now on."""
        self._heard.pop(node, None)

    def _renew(self) -> None:
        try:
            while True:
                started, body = self._beats.get()
                place = f"lease/{self._node}"
                self._store.put(place, self._seal.sign(place, body))
                heard = {}
                for number in self._nodes:
                    if number != self._node:
                        heard[number] = self._store.get(f"lease/{number}")
                self._loop.post(lambda s=started, h=heard: self._renewed(s, h))  # type: ignore[misc]
        except StoreLost:
            pass  # the journal's follower tells the loop

    def _renewed(self, started_ns: int, heard: Mapping[int, bytes | None]) -> None:
        self._extend(started_ns + int(self._timing.fence * 1e9))
        now = boot_seconds()
        for number, value in heard.items():
            text = self._seal.open(f"lease/{number}", value) if value is not None else None
            known, since = self._heard.get(number, ("", now))
            if text is not None and text != known:
                self._heard[number] = (text, now)
                self._take_table(number, text)
            else:
                self._heard[number] = (known, since)
                if now - since > self._timing.lease and self._nodes[number].alive:
                    self._lost(number, self._nodes[number].epoch, "node unreachable")

    def _take_table(self, number: int, text: str) -> None:
        table: Table = {}
        try:
            beat = parse(text)
            self.seen[number] = take_int(beat, "read")
            for rank, row in as_object(beat.get("table")).items():
                waiting = tuple(as_rank(item) for item in take_list(row, "waiting_for"))
                seconds, limit = float(row["seconds"]), float(row["limit"])
                idle = Idle(take_int(row, "step"), take_str(row, "phase"), waiting, seconds, limit)
                table[as_rank(rank)] = (take_int(row, "incarnation"), idle)
        except (ProtocolError, KeyError, TypeError, ValueError):
            return
        self.tables[number] = table

    # -- presence ---------------------------------------------------------------

    def _listen(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server(("::" if family == socket.AF_INET6 else "", 0), family=family)
        self._listener.setblocking(False)
        self._loop.watch(self._listener.fileno(), self._accept)
        port = str(self._listener.getsockname()[1])
        self._store.put("presence", self._seal.sign("presence", port))

    def _accept(self, _: int) -> None:
        assert self._listener is not None
        try:
            caller, _address = self._listener.accept()
        except OSError:
            return
        strangers = len(self._callers) - len(self._known)
        if strangers >= _STRANGERS:
            caller.close()
            return
        caller.setblocking(False)
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        fd = caller.fileno()
        self._callers[fd] = (caller, bytearray())
        self._loop.watch(fd, lambda _mask: self._hear(fd))
        self._loop.after(self._timing.lease, lambda: self._drop_stranger(fd, caller))

    def _hear(self, fd: int) -> None:
        caller, buffer = self._callers[fd]
        try:
            data = caller.recv(_HELLO_LIMIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        buffer += data
        if not data or len(buffer) > _HELLO_LIMIT:
            self._drop(fd)
        elif buffer.endswith(b"\n") and fd not in self._known:
            text = self._seal.open("presence/hello", bytes(buffer[:-1]))
            try:
                hello = parse(text or "")
                self._known[fd] = (take_int(hello, "node"), take_int(hello, "epoch"))
                buffer.clear()
            except ProtocolError:
                self._drop(fd)

    def _drop_stranger(self, fd: int, caller: socket.socket) -> None:
        if fd not in self._known and fd in self._callers and self._callers[fd][0] is caller:
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        caller, _ = self._callers.pop(fd)
        self._loop.forget(fd)
        caller.close()
        known = self._known.pop(fd, None)
        if known is not None:
            self._lost(known[0], known[1], "node unreachable (its agent ended)")

    def _call(self, host: str) -> None:
        """Connect to the first agent, introduce ourselves, and hold the connection for life."""
        try:
            store = self._store.clone()
            value = store.wait("presence", self._timing.lease)
            port = self._seal.open("presence", value) if value is not None else None
            if port is None:
                return  # leases alone then tell of our end
            self._presence = socket.create_connection((host, int(port)), timeout=self._timing.lease)
            hello = json.dumps({"node": self._node, "epoch": self._nodes[self._node].epoch})
            self._presence.sendall(self._seal.sign("presence/hello", hello) + b"\n")
            poll = select.poll()
            poll.register(self._presence, select.POLLIN)
            poll.poll()  # readable only at its end
            if not self._store.embedded:  # else the end of the store says it, to the journal's follower
                epoch = self._nodes[0].epoch
                self._loop.post(lambda: self._lost(0, epoch, "node unreachable (its agent ended)"))
        except (OSError, StoreLost, ValueError):
            return

    # -- the end ------------------------------------------------------------------

    def wait_for_goodbyes(self, store: Store, seconds: float) -> None:
        """The first agent leaves last: the others still read the journal's end from its store."""
        end = time.monotonic() + seconds
        for number, node in self._nodes.items():
            if number != self._node and node.alive:
                store.wait(f"bye/{number}", max(0.01, end - time.monotonic()))
