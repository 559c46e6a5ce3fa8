"""A lost rank is started again when its process could join the job."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from megatron.elastic.comm.address import Address
from megatron.elastic.control.events import Decided, Entry, Event, Lost, Waiting
from megatron.elastic.control.failures import Failures
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.membership import Activity, Loss
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.timing import Timing
from megatron.elastic.launch.agent.respawn import Respawn

TIMING = Timing.derive(1.0)
LOST = Lost((Loss(0, 0, "host0", "signal SIGKILL"),), (1,))


class Started(NamedTuple):
    at: float
    rank: int
    incarnation: int


class LeasedNode:
    """Node 0 of two with rank 0. Implements the restarts' ``Processes`` and ``Timers``, on a clock of its own."""

    def __init__(self) -> None:
        self.state = Generations({number: Node(f"host{number}", (number,)) for number in range(2)})
        for rank in range(2):
            self.state.apply(Waiting((Entry(Address(rank, 0, f"host{rank}"), ""),)))
        self.state.apply(Decided(1, 0))
        failures = Failures()
        failures.admitted(0, 0)
        self.respawn = Respawn(0, self.state, failures, self, self, TIMING, list[Event]().append)
        self.seconds, self.lease_until = 0.0, TIMING.fence
        self.started: list[Started] = []
        self._calls: list[tuple[float, Callable[[], None]]] = []

    def now(self) -> float:
        return self.seconds

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self._calls.append((self.seconds + seconds, call))

    def wait_until(self, seconds: float) -> None:
        while self._calls and min(self._calls, key=lambda item: item[0])[0] <= seconds:
            item = min(self._calls, key=lambda item: item[0])
            self._calls.remove(item)
            self.seconds = max(self.seconds, item[0])
            item[1]()
        self.seconds = seconds

    def running(self) -> Collection[int]:
        return [each.rank for each in self.started]

    def remains(self, rank: int) -> bool:
        return False

    def lease_left(self) -> float:
        return self.lease_until - self.seconds

    def start(self, rank: int, incarnation: int, newcomer: bool) -> None:
        self.started.append(Started(self.seconds, rank, incarnation))

    def kill(self, rank: int, why: str) -> bool:
        raise AssertionError(f"rank {rank} is killed: {why}")

    def activity(self, rank: int) -> Activity:
        raise AssertionError("no member is on this node")


def lost_at(seconds: float) -> LeasedNode:
    node = LeasedNode()
    node.wait_until(seconds)
    node.state.apply(LOST)
    node.respawn.record_losses(LOST)
    return node


def test_no_rank_starts_before_its_nodes_lease_is_renewed() -> None:
    """The first lease has run out and ended rank 0; the agent renews the lease 1 s later."""
    node = lost_at(TIMING.fence)
    node.wait_until(TIMING.fence + 1)
    assert node.started == [], "it would end itself at once, and count as a failed start"
    node.lease_until = node.seconds + TIMING.fence
    node.wait_until(TIMING.fence + 1.5)
    ((at, rank, incarnation),) = node.started
    assert at < TIMING.fence + 1.1 and (rank, incarnation) == (0, 1)


def test_with_a_fresh_lease_a_rank_starts_at_once() -> None:
    node = lost_at(0.5)
    node.wait_until(0.6)
    assert [each.rank for each in node.started] == [0]
