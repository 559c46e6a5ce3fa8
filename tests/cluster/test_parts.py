"""The scheduler and the fabric of a cluster: what they promise to the code that runs on them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import CommError, GenerationChanged, PeerLost
from megatron.elastic.comm.fabric import Fabric
from tests.cluster.cluster import RANKS, on_each_rank
from tests.cluster.fabric import ClusterFabric, Style
from tests.cluster.scheduler import ClusterThreads, Deadlock, Killed, Process, Scheduler
from tests.unit.comm.membership_checks import block_lists, group_is_the_same_object_and_local, sums_in_member_order

STYLES = [Style(eager, meets) for eager in (True, False) for meets in (True, False)]


@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("check", [block_lists, sums_in_member_order, group_is_the_same_object_and_local])
def test_the_contract_of_fabrics(check: Callable[[Any, Fabric], None], style: Style) -> None:
    on_each_rank(lambda fabric: check(SimpleNamespace(rank=fabric.rank), fabric), style)


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_messages_come_in_order_and_by_tag(style: Style) -> None:
    def body(fabric: ClusterFabric) -> None:
        group, peer = fabric.group("pipeline", RANKS), fabric.rank ^ 1
        works = [dist.irecv(torch.empty(1), peer, group=group, tag=7)]
        got = [torch.empty(1) for _ in range(3)]
        works += [dist.irecv(one, peer, group=group, tag=8) for one in got]
        works += [dist.isend(torch.tensor([float(n)]), peer, group=group, tag=8) for n in range(3)]
        works += [dist.isend(torch.zeros(1), peer, group=group, tag=7)]
        for work in works:
            cast(dist.Work, work).wait()
        assert [float(one) for one in got] == [0.0, 1.0, 2.0]

    on_each_rank(body, style)


def test_a_wait_for_a_dead_peer_ends() -> None:
    def body(fabric: ClusterFabric) -> None:
        if fabric.rank == 3:
            fabric.break_off()
            raise Killed
        with pytest.raises(PeerLost) as lost:
            dist.barrier(group=fabric.world)
        assert lost.value.rank == 3

    on_each_rank(body)


def test_an_interruption_ends_waits_and_what_is_begun_after_it() -> None:
    def body(fabric: ClusterFabric) -> None:
        if fabric.rank == 3:
            return
        ClusterThreads(fabric.scheduler, fabric.scheduler.current.process).start("control", lambda: interrupt(fabric))
        for _ in range(2):
            with pytest.raises(GenerationChanged):
                dist.barrier(group=fabric.world)

    def interrupt(fabric: ClusterFabric) -> None:
        fabric.scheduler.wait(lambda: bool(fabric.waiting_for()))
        fabric.interrupt(2)

    on_each_rank(body)


def test_side_channels_hold_back_and_give_up() -> None:
    def body(fabric: ClusterFabric) -> None:
        channel = fabric.side_channel(1)
        if fabric.rank == 0:
            for number in range(3):
                channel.send(1, torch.full((1000,), float(number)))
            channel.drain(1)
            assert channel.under_way(1) == 0
        elif fabric.rank == 1:
            for number in range(3):
                out = torch.empty(1000)
                channel.recv(0, out)
                assert bool((out == number).all())
        elif fabric.rank == 2:
            ClusterThreads(fabric.scheduler, fabric.scheduler.current.process).start("gives up", channel.give_up)
            with pytest.raises(CommError):
                channel.recv(3, torch.empty(1))

    on_each_rank(body)


def test_no_rank_can_go_on() -> None:
    """The error names each thread and where it waits."""

    def body(fabric: ClusterFabric) -> None:
        dist.recv(torch.empty(1), (fabric.rank + 1) % 4, group=fabric.world)

    with pytest.raises(Deadlock, match=r"rank 2 runs: .* recv"):
        on_each_rank(body)


def test_time_passes_when_all_wait() -> None:
    scheduler = Scheduler(1)
    threads = ClusterThreads(scheduler, Process("one"))
    ends: list[tuple[str, float]] = []

    def sleeper(name: str, seconds: float) -> None:
        threads.sleep(seconds)
        ends.append((name, threads.monotonic()))

    def waiter() -> None:
        event = threads.event()
        assert not event.wait(5.0)
        ends.append(("waiter", threads.monotonic()))

    for name, seconds in (("late", 30.0), ("early", 2.0)):
        scheduler.spawn(threads.process, name, lambda name=name, seconds=seconds: sleeper(name, seconds))  # type: ignore[misc]
    scheduler.spawn(threads.process, "waiter", waiter)
    scheduler.run()
    assert [name for name, _ in ends] == ["early", "waiter", "late"]
    assert 30.0 <= scheduler.now < 31.0
