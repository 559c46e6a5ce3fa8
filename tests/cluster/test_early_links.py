"""A waiting rank connects to the members that it was told last, on a thread of its own, until it is admitted."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from megatron.elastic.comm.address import Address
from megatron.elastic.engine.transaction.early_links import EarlyLinks
from tests.cluster.checks import check
from tests.cluster.cluster import run
from tests.cluster.fabric import ClusterFabric, Wire
from tests.cluster.scheduler import ClusterThreads, Process, Scheduler

TIMEOUT = 7.0


class Connecting(ClusterFabric):
    """Notes the rounds of connecting; each takes as many turns of other threads as chance wants."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire, 9, 10, 0, "host9")
        self.rounds: list[tuple[int, ...]] = []
        self.under_way = 0

    def prepare(self, members: Mapping[int, Address], timeout: float) -> int:
        assert timeout == TIMEOUT and not self.under_way, "one round at a time"
        self.under_way = 1
        self.rounds.append(tuple(members))
        self.scheduler.wait(lambda: False, 0.001 * self.scheduler.random.randint(0, 5))
        self.under_way = 0
        return len(members)


def members(count: int) -> dict[int, Address]:
    return {rank: Address(rank, 0, f"host{rank}") for rank in range(count)}


@pytest.mark.parametrize("seed", range(20))
def test_the_members_told_last_are_connected_to_and_none_after_the_end(seed: int) -> None:
    scheduler = Scheduler(seed)
    fabric, process = Connecting(Wire(scheduler)), Process("waits")
    threads = ClusterThreads(scheduler, process)

    def body() -> None:
        links = EarlyLinks(fabric, TIMEOUT, threads)
        for count in range(1, 6):
            links.members_are(members(count))
            threads.sleep(0.001 * scheduler.random.randint(0, 3))
        scheduler.wait(lambda: bool(fabric.rounds) and fabric.rounds[-1] == tuple(range(5)) and not fabric.under_way)
        links.stop()
        links.members_are(members(7))
        links.stop()

    scheduler.spawn(process, "trains", body)
    scheduler.run()  # ends only when the connecting thread has ended
    fabric.close()
    assert fabric.rounds == sorted(set(fabric.rounds), key=len), "each round is of newer members than the one before"
    assert max(map(len, fabric.rounds)) == 5


def test_a_rank_is_stopped_while_it_waits_and_has_no_connection() -> None:
    scheduler = Scheduler(0)
    fabric, process = Connecting(Wire(scheduler)), Process("waits")

    def body() -> None:
        links = EarlyLinks(fabric, TIMEOUT, ClusterThreads(scheduler, process))
        scheduler.wait(lambda: False, 1.0)
        links.members_are({})  # there is no member to connect to
        scheduler.wait(lambda: False, 1.0)
        links.stop()

    scheduler.spawn(process, "trains", body)
    scheduler.run()
    fabric.close()
    assert fabric.rounds == []


def test_a_newcomer_connects_to_the_members_before_it_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[tuple[int, tuple[int, ...]]] = []

    def prepare(self: ClusterFabric, members: Mapping[int, Address], timeout: float) -> int:
        assert self.generation == 0, "not linked to anybody yet"
        rounds.append((self.rank, tuple(sorted(members))))
        return 0

    monkeypatch.setattr(ClusterFabric, "prepare", prepare)
    cluster = run("steps=6 seed=3 back=0.02 kill:rank=2,step=1,point=after_reduce")
    check(cluster)
    assert set(rounds) == {(2, (0, 1, 3))}
