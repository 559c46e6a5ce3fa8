"""An agent whose place is taken: by a living agent, or in a run of which no agent lives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron.elastic.control.channel import Credentials
from megatron.elastic.control.exits import ExitCode
from megatron.elastic.control.keys import Keys, LocalStore
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.signer import Signer
from megatron.elastic.control.timing import Timing
from megatron.elastic.launch.agent.agent_place import AgentPlace
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.launch.agent.old_run import PlaceWait, await_end

TIMING = Timing.derive(0.05)
NODES = (0, 1)


class Etcd(LocalStore):
    """A store with an earlier run in it; ``closed``: its entries are no longer kept alive."""

    def __init__(self) -> None:
        super().__init__(Keys())
        self.closed = threading.Event()
        self.put("launch", b"earlier")
        self.renew(0)

    def clone(self) -> Etcd:
        return self

    def renew(self, number: int) -> None:
        for node in NODES:
            self.put(f"lease/{node}", b"%d" % number)

    def close(self) -> None:
        self.closed.set()


@contextmanager
def renewing(store: Etcd) -> Iterator[None]:
    """An agent renews its lease meanwhile."""
    done = threading.Event()

    def renew() -> None:
        number = 0
        while not done.wait(TIMING.beat):
            number += 1
            store.renew(number)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_run_of_which_an_agent_lives_is_joined() -> None:
    store = Etcd()
    with renewing(store):
        assert not await_end(store, NODES, TIMING, lambda what: _told([]))
    assert not store.closed.is_set(), "the entries are kept alive"


@contextmanager
def _told(found: list[str], what: str = "") -> Iterator[None]:
    found.append(what)
    yield


@pytest.mark.parametrize("after", [None, b"new"], ids=["expired", "begun anew by another agent"])
def test_a_run_of_which_no_agent_lives_is_waited_out(after: bytes | None) -> None:
    store, told = Etcd(), list[str]()

    def expire() -> None:
        store.closed.wait()
        store.delete("launch")
        if after is not None:
            store.put("launch", after)

    expiry = threading.Thread(target=expire)
    expiry.start()
    assert await_end(store, NODES, TIMING, lambda what: _told(told, what))
    expiry.join()
    assert len(told) == 1 and "earlier run" in told[0]


def test_a_run_of_which_an_agent_was_only_slow_is_joined_after_all() -> None:
    store = Etcd()

    def renew() -> None:
        store.closed.wait()
        store.renew(1)

    slow = threading.Thread(target=renew)
    slow.start()
    assert await_end(store, NODES, TIMING, lambda what: _told([])), "the agents meet again"
    slow.join()


@pytest.mark.parametrize("taken", [True, False])
def test_an_agent_that_gets_no_place_is_refused_where_another_has_it_and_else_started_again(
    taken: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    store, loop, codes = Etcd(), Loop(), list[int]()

    def stop(code: int) -> None:
        codes.append(code)
        loop.stop()

    nodes = {node: Node(f"host{node}", (node,)) for node in NODES}
    place = AgentPlace(1, "token", nodes, store, Signer(Credentials("ab" * 16, "run")), TIMING, loop)
    PlaceWait(place, "run", lambda: False, stop).start()
    if taken:
        with renewing(store):
            loop.run()
    else:
        loop.run()
    loop.close()
    assert codes == [ExitCode.FAILED if taken else ExitCode.STATE_LOST]
    said = capsys.readouterr().err
    assert ("--node-rank 1 is already taken" in said) == taken and ("start it again" in said) != taken
