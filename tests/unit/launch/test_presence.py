"""Connections between agents, over real sockets: who gets in, and what a broken one means."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import TypeVar

import pytest

from megatron.elastic.control.channel import Credentials
from megatron.elastic.control.keys import Keys, LocalStore
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.signer import Signer
from megatron.elastic.control.timing import Timing
from megatron.elastic.control.wire import ProtocolError
from megatron.elastic.launch.agent.agent_place import AgentPlace
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.launch.agent.presence import Presence

T = TypeVar("T")
SEAL = Signer(Credentials("ab" * 16, "run"))
TIMING = Timing.derive(5.0)
HOST = "127.0.0.1"


class Agents:
    """The first agent's side, and as many callers as a test wants.

    ``told``: (by, doubt or trust, node); ``heard``: (node, life, body) of what was said; ``broken``: whose connection
    broke, as that agent was told.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.store = LocalStore(Keys())
        self.nodes = {n: Node(f"h{n}", (n,), agent=f"agent{n}") for n in range(3)}
        self.told: list[tuple[int, str, int]] = []
        self.heard: list[tuple[int, int, bytes]] = []
        self.broken: list[int] = []
        self.made: dict[int, Presence] = {}
        self._stack = stack
        self.start(0)
        value = self.store.wait("presence", 20)
        assert value is not None
        self.port = int(json.loads(SEAL.open("presence", value) or b"")["port"])

    def start(self, node: int, token: str | None = None) -> Presence:
        loop = Loop()
        presence = Presence(
            AgentPlace(node, token or f"agent{node}", self.nodes, self.store, SEAL, TIMING, loop),
            doubt=lambda other: self.told.append((node, "doubt", other)),
            trust=lambda other: self.told.append((node, "trust", other)),
            hear=self.hear,
            broken=lambda: self.broken.append(node),
        )
        loop.post(lambda: presence.start(HOST, HOST))
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        self._stack.callback(loop.close)
        self._stack.callback(thread.join, 20)
        self._stack.callback(loop.post, loop.stop)
        self.made[node] = presence
        return presence

    def hear(self, node: int, epoch: int, body: bytes) -> None:
        if body == b"nonsense":
            raise ProtocolError("not what agents say")
        self.heard.append((node, epoch, body))

    def call(self) -> tuple[socket.socket, str]:
        """A connection of a stranger, and the number it was given."""
        connection = self._stack.enter_context(socket.create_connection((HOST, self.port), timeout=20))
        return connection, connection.recv(100).decode().strip()

    def told_times(self, *what: object) -> int:
        return self.told.count(what)  # type: ignore[arg-type]

    def cut(self, node: int) -> None:
        """As a device on the way would: both ends see the end of the connection."""
        call = self.made[node]._call
        assert call is not None
        call.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def agents() -> Iterator[Agents]:
    with ExitStack() as stack:
        yield Agents(stack)


def until(claim: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not claim():
        assert time.monotonic() < end
        time.sleep(0.005)


def hello(nonce: str, node: int = 1, epoch: int = 0, agent: str = "agent1") -> bytes:
    body = {"node": node, "epoch": epoch, "agent": agent, "nonce": nonce}
    return SEAL.sign("presence/hello", json.dumps(body).encode()) + b"\n"


def test_a_connection_that_breaks_is_a_doubt_which_the_next_one_takes_back(agents: Agents) -> None:
    agents.start(1)
    until(lambda: (0, "trust", 1) in agents.told)
    for times in (1, 2):
        until(lambda: agents.made[1]._call is not None)
        agents.cut(1)
        until(lambda t=times: agents.told_times(0, "doubt", 1) == t)  # type: ignore[misc]
        until(lambda t=times: agents.told_times(0, "trust", 1) == t + 1)  # type: ignore[misc]
    assert all(node == 1 for by, _, node in agents.told if by == 0)


def test_what_was_recorded_opens_no_second_connection(agents: Agents) -> None:
    first, nonce = agents.call()
    recorded = hello(nonce)
    first.sendall(recorded)
    assert first.recv(100) == b"accepted\n"
    second, other = agents.call()
    assert other != nonce
    second.sendall(recorded)
    assert second.recv(100) == b""
    second.close()
    assert first.fileno() >= 0 and agents.told == [(0, "trust", 1)], "and it casts no doubt on the agent"


@pytest.mark.parametrize("claim", [{"agent": "another"}, {"epoch": 1}, {"node": 7}])
def test_an_agent_that_does_not_hold_the_place_is_not_let_in(agents: Agents, claim: dict[str, object]) -> None:
    connection, nonce = agents.call()
    connection.sendall(hello(nonce, **claim))  # type: ignore[arg-type]
    assert connection.recv(100) == b"" and agents.told == []


@pytest.mark.parametrize("said", [b"\n", b"hello\n", b"\xff" * 5000, b'"\n'])
def test_a_peer_that_says_something_else_is_dropped(agents: Agents, said: bytes) -> None:
    connection, _ = agents.call()
    connection.sendall(said)
    with suppress(ConnectionResetError):  # it was dropped with what it had yet to read
        assert connection.recv(100) == b""
    agents.start(1)
    until(lambda: (0, "trust", 1) in agents.told)


def test_idle_strangers_keep_no_agent_out(agents: Agents) -> None:
    strangers = [agents.call()[0] for _ in range(70)]
    agents.start(1)
    agents.start(2)
    until(lambda: {(0, "trust", 1), (0, "trust", 2), (1, "trust", 0), (2, "trust", 0)} <= set(agents.told))
    assert not any(what == "doubt" for _, what, _ in agents.told)
    assert strangers[0].recv(1) == b"", "the oldest gave way"


def test_an_agent_that_took_its_place_anew_introduces_itself_anew_without_a_doubt(agents: Agents) -> None:
    presence = agents.start(1)
    until(lambda: (0, "trust", 1) in agents.told and presence._call is not None)
    agents.nodes[1].epoch = 1
    presence.start(HOST, HOST)
    until(lambda: agents.told_times(0, "trust", 1) == 2)
    assert agents.told_times(0, "doubt", 1) == 0


def on_loop(presence: Presence, call: Callable[[], T]) -> T:
    """The result of ``call`` on the loop of an agent."""
    results: list[T] = []
    presence._loop.post(lambda: results.append(call()))
    until(lambda: bool(results))
    return results[0]


def connected(agents: Agents, node: int) -> Presence:
    presence = agents.start(node)
    until(lambda: (node, "trust", 0) in agents.told)
    return presence


def test_what_agents_say_is_heard_whole_and_each_in_its_order(agents: Agents) -> None:
    callers = {node: connected(agents, node) for node in (1, 2)}
    said = [b"%d/" % number + b"x" * (number * 500) for number in range(20)]
    for body in said:
        for presence in callers.values():
            assert on_loop(presence, lambda p=presence, b=body: p.say(b))  # type: ignore[misc]
    until(lambda: len(agents.heard) == 2 * len(said))
    for node in callers:
        assert [body for by, life, body in agents.heard if (by, life) == (node, 0)] == said


def test_a_line_may_come_in_pieces(agents: Agents) -> None:
    connection, nonce = agents.call()
    connection.sendall(hello(nonce))
    assert connection.recv(100) == b"accepted\n"
    lines = [SEAL.sign(f"presence/said/{nonce}/{number}", b"%d" % number) + b"\n" for number in range(3)]
    connection.sendall(lines[0] + lines[1][:20])
    until(lambda: len(agents.heard) == 1)
    connection.sendall(lines[1][20:30])
    connection.sendall(lines[1][30:] + lines[2])
    until(lambda: [body for _, _, body in agents.heard] == [b"0", b"1", b"2"])


def test_nothing_is_said_without_a_connection(agents: Agents) -> None:
    presence = connected(agents, 1)
    on_loop(presence, presence.call_again)
    assert not on_loop(presence, lambda: presence.say(b"hello")) and not agents.heard
    until(lambda: 1 in agents.broken)
    until(lambda: on_loop(presence, lambda: presence.say(b"again")))
    until(lambda: agents.heard == [(1, 0, b"again")])


def test_a_first_agent_that_reads_nothing_makes_no_other_one_wait(agents: Agents) -> None:
    presence, held = connected(agents, 1), threading.Event()

    def reads_nothing() -> None:
        held.wait(20)

    agents.made[0]._loop.post(reads_nothing)
    body = os.urandom(1 << 20)
    until(lambda: not on_loop(presence, lambda: presence.say(body)))
    held.set()
    until(lambda: 1 in agents.broken)


def test_what_no_agent_says_ends_its_connection(agents: Agents) -> None:
    presence = connected(agents, 1)
    assert on_loop(presence, lambda: presence.say(b"nonsense"))
    until(lambda: agents.told_times(0, "doubt", 1) == 1)
    until(lambda: agents.told_times(0, "trust", 1) == 2)
    assert not agents.heard


@pytest.mark.parametrize("place", ["presence/said/{nonce}/1", "presence/said/another/0", "presence/hello"])
def test_a_line_that_was_signed_for_another_place_is_not_heard(agents: Agents, place: str) -> None:
    connection, nonce = agents.call()
    connection.sendall(hello(nonce))
    assert connection.recv(100) == b"accepted\n"
    connection.sendall(SEAL.sign(place.format(nonce=nonce), b"hello") + b"\n")
    assert connection.recv(100) == b"" and not agents.heard


def test_an_agent_that_is_the_first_one_no_more_hears_nothing(agents: Agents) -> None:
    presence = connected(agents, 1)
    agents.nodes[0].agent = "another"
    assert on_loop(presence, lambda: presence.say(b"hello"))
    until(lambda: 1 in agents.broken)
    assert not agents.heard
    connection, nonce = agents.call()
    connection.sendall(hello(nonce, 2, agent="agent2"))
    assert connection.recv(100) == b"", "nor does it accept a connection"
