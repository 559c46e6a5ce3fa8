"""An agent's view of its workers, from their slots and from the kernel, without a message."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep as pause
from typing import Any, cast

import pytest

from megatron.elastic.control.membership import Activity
from megatron.elastic.control.slot import Slot
from megatron.elastic.control.suspicion import Idle
from megatron.elastic.control.timing import Timing
from megatron.elastic.launch.agent.watch import Watch
from megatron.elastic.launch.workers.pool import Worker
from megatron.elastic.launch.workers.processes import process_state

TIMING = Timing.derive(5.0)


class Node:
    """One worker, a real process, and the watch over it; ``now``: the agent's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("megatron.elastic.launch.agent.watch.time.monotonic", lambda: self.now)
        self.child = subprocess.Popen(["sleep", "600"])
        self._fd, self.slot = Slot.create("test")
        self.worker = Worker(1, 0, 0, 0, cast(Any, None), self.slot, pid=self.child.pid)
        self.stopped: list[Worker] = []
        self.watch = Watch(TIMING, self.stopped.append)

    def look(self, seconds: float = TIMING.look) -> None:
        """The next look, ``seconds`` after the last."""
        self.now += seconds
        self.watch.look([self.worker])

    def looks(self, seconds: float) -> None:
        """As many looks as there are in so much time."""
        for _ in range(round(seconds / TIMING.look)):
            self.look()

    def send(self, number: signal.Signals, state: str) -> None:
        self.child.send_signal(number)
        for _ in range(500):
            if (process_state(self.child.pid) or "gone") in state:
                return
            pause(0.01)
        raise AssertionError(f"the child is in state {process_state(self.child.pid)}")

    def idle(self) -> Idle:
        found = self.watch.idle(self.worker)
        assert found is not None
        return found

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        self.slot.close()
        os.close(self._fd)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node(monkeypatch)
    yield made
    made.close()


def test_a_stopped_worker_is_reported_after_the_time_allowed_and_not_before(node: Node) -> None:
    node.look()
    node.send(signal.SIGSTOP, "T")
    node.looks(0.9 * TIMING.stopped)
    assert node.stopped == []
    node.send(signal.SIGCONT, "SR")
    node.look()
    node.send(signal.SIGSTOP, "T")
    node.looks(0.9 * TIMING.stopped)
    assert node.stopped == [], "it went on in between"
    node.looks(0.3 * TIMING.stopped)
    assert node.worker in node.stopped


def test_a_time_in_which_the_agent_did_not_run_counts_against_no_worker(node: Node) -> None:
    """A suspended machine must not lose ranks when it wakes up."""
    node.look()
    node.send(signal.SIGSTOP, "T")
    node.look()
    node.look(seconds=100 * TIMING.stopped)
    assert node.stopped == []
    idle = node.watch.idle(node.worker)
    assert idle is not None and idle.seconds == 0.0
    node.looks(1.2 * TIMING.stopped)
    assert node.worker in node.stopped, "but the time since then does"


def test_a_worker_is_idle_since_it_last_made_progress(node: Node) -> None:
    assert node.watch.idle(node.worker) is None, "not seen yet"
    node.slot.publish(Activity(7, "reduce", (1, 2)))
    node.look()
    node.look()
    node.now += 0.5
    idle = node.watch.idle(node.worker)
    assert idle is not None
    assert (idle.step, idle.phase, idle.waiting_for) == (7, "reduce", (1, 2))
    assert idle.seconds == pytest.approx(TIMING.look + 0.5)
    assert idle.limit == TIMING.hang_unknown, "nobody knows yet how long this phase takes"
    node.slot.publish(Activity(7, "reduce", (2,)))
    node.look()
    idle = node.watch.idle(node.worker)
    assert idle is not None and idle.seconds == 0.0 and idle.waiting_for == (2,)


@contextmanager
def slot_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The worker's clock in ns, which the slot reads."""
    clock = [time.monotonic_ns()]
    monkeypatch.setattr("megatron.elastic.control.slot.time.monotonic_ns", lambda: clock[0])
    yield clock


def test_a_phase_may_take_many_times_as_long_as_it_took_but_a_hang_sets_no_example(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slot_time(monkeypatch) as clock:
        for seconds, limit in ((8.0, 10.0), (2.0, 10.0), (30.0, 30.0)):
            node.slot.publish(Activity(1, "save"))
            clock[0] += round(seconds * 1e9)
            node.slot.publish(Activity(1, "compute"))
            node.slot.publish(Activity(1, "save"))
            node.look()
            idle = node.watch.idle(node.worker)
            assert idle is not None and idle.phase == "save"
            longest = 8.0 if limit == 10.0 else 30.0
            assert idle.limit == max(TIMING.hang, TIMING.hang_factor * longest)
        node.slot.publish(Activity(1, "save"))
        clock[0] += round(2 * TIMING.hang_factor * 30.0 * 1e9)
        node.slot.publish(Activity(1, "compute"))
        node.slot.publish(Activity(1, "save"))
        node.look()
        idle = node.watch.idle(node.worker)
        assert idle is not None and idle.limit == TIMING.hang_factor * 30.0


def test_a_worker_that_is_gone_is_forgotten(node: Node) -> None:
    node.look()
    node.watch.look([])
    assert node.watch.idle(node.worker) is None


class Clock:
    """The clock that worker and agent share, ns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = time.monotonic_ns()
        monkeypatch.setattr("megatron.elastic.launch.agent.watch.time.monotonic_ns", lambda: self.ns)

    def advance(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)


def test_a_wait_that_the_worker_has_not_seen_for_long_is_not_believed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its control thread tells waits in native code, and does not run while such code holds the interpreter's lock."""
    clock = Clock(monkeypatch)
    node.slot.publish(Activity(-1, "communication", (1, 2)))
    node.slot.watched()
    clock.advance(0.9 * TIMING.unseen)
    node.look()
    assert node.idle().waiting_for == (1, 2)
    clock.advance(0.2 * TIMING.unseen)
    node.looks(2 * TIMING.hang)
    idle = node.idle()
    assert idle.waiting_for == () and idle.limit == TIMING.hang_unknown, "it may do anything, and for how long?"
    node.slot.watched()
    node.look()
    assert node.idle().waiting_for == (1, 2), "it waits indeed"
    assert node.idle().seconds == 0.0, "it has run meanwhile"


def test_what_the_training_thread_tells_is_believed_however_long_ago(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    node.slot.publish(Activity(-1, "communication", (3,)))
    node.slot.watched()
    node.slot.publish(Activity(3, "reduce", (1, 2)))
    clock.advance(2 * TIMING.hang)
    node.looks(2 * TIMING.hang)
    assert node.idle().waiting_for == (1, 2)
