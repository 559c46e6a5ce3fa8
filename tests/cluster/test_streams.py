"""Copies move over streams beside steps: when they send, when they count, and what is left of them after a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import CommError, PeerLost
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.configuration import Configuration
from megatron.elastic.engine.generation.migration import Migration
from megatron.elastic.engine.transaction.streams import Moved, Streams
from megatron.elastic.state.layout import BlockKey, ParamSpec, UnitLayout
from megatron.elastic.state.placement import Copies, Placement, Transition
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import ConstantSchedule, GradientKey, Hyper, Rate, StepRecord, Vote, advance
from megatron.elastic.state.sender import BlockSender
from megatron.elastic.state.transfer import commit
from tests.cluster.cluster import on_each_rank, topology_of
from tests.cluster.fabric import ClusterFabric
from tests.cluster.scheduler import ClusterThreads, Killed
from tests.scenario.scenario import Scenario

LAYOUT = UnitLayout.build(0, 0, [ParamSpec("w", 3000, (3000,), True)], 2048)
KEYS = [block.key for block in LAYOUT.blocks]
RATES = (Rate(1e-2, 0.1),)
HYPER = Hyper(ConstantSchedule(RATES))
WINDOW = 1 << 20
SOON = 0.05
"""Seconds in which a stream that may send has sent everything."""
FAST, NO_TIME = 10**9, 0.0


def migration(urgent: bool = False) -> Migration:
    """Rank 0 owns all blocks: half of them are added at rank 2, the others at rank 3. Rank 1 has no part in it."""
    changes = tuple(Transition("add", key, 2 + key[2] % 2, 0) for key in KEYS)
    placement = Placement({key: Copies(0) for key in KEYS}).apply(changes)
    return Migration(Configuration(placement, Assignment.at_launch(topology_of(Scenario()))), changes, urgent)


@dataclass
class Rank:
    """One rank with its pool and its streams."""

    fabric: ClusterFabric
    pool: StatePool
    streams: Streams
    threads: ClusterThreads
    record: StepRecord = field(default_factory=lambda: StepRecord.initial(HYPER))

    def pause(self) -> None:
        """Let streams go on, as during the computing of a step."""
        self.threads.sleep(SOON)

    def meet(self) -> None:
        dist.barrier(group=self.fabric.world)

    def step(self) -> None:
        """A step, from the gradient to the update."""
        key = GradientKey(self.record.version, 1)
        flat = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(50 + key.step))
        for name in self.pool:
            block = self.pool.block(name)
            self.pool.retain(name, key, flat[block.start : block.stop])
        self.record = advance(self.record, Vote(key, [4.0], False, 1.0, 1.0, 8, rates=RATES), HYPER)
        self.pool.remember(self.record)
        self.pool.apply(self.record)

    def arrive(self) -> None:
        """Wait for the copies at the record's version and count them."""
        self.streams.conclude(self.record.version)
        self.streams.finish()
        commit(self.pool, self.streams.migration.changes, self.streams.received, self.record.version)


def on_ranks(
    body: Callable[[Rank], None], moved: Migration | None = None, held: bool = False, seed: int = 0
) -> dict[int, Rank]:
    """Run ``body`` on each of four ranks whose streams have begun."""
    ranks: dict[int, Rank] = {}

    def life(fabric: ClusterFabric) -> None:
        threads = ClusterThreads(fabric.scheduler, fabric.scheduler.current.process)
        pool = StatePool(fabric.rank, {(0, 0): LAYOUT}, HYPER)
        pool.start(StepRecord.initial(HYPER))
        flat = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(4))
        for block in LAYOUT.blocks if fabric.rank == 0 else ():
            pool.put(block.key, flat[block.start : block.stop], 0)
        streams = Streams(moved or migration(), pool, fabric, 1, WINDOW, held, threads)
        ranks[fabric.rank] = Rank(fabric, pool, streams, threads)
        body(ranks[fabric.rank])

    on_each_rank(life, seed=seed)
    return ranks


def check_copies(ranks: dict[int, Rank], version: int) -> None:
    """The added copies are those of the source, to the bit and with its history."""
    for key in KEYS:
        ours, theirs = ranks[0].pool.get(key), ranks[2 + key[2] % 2].pool.get(key)
        assert (ours.version, theirs.version) == (version, version) and ours.lineage == theirs.lineage
        assert torch.equal(ours.state, theirs.state) and theirs.counted
    assert list(ranks[1].pool) == []


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("urgent", [False, True])
def test_copies_arrive_with_the_sources_bits_whatever_steps_pass_meanwhile(seed: int, urgent: bool) -> None:
    def body(rank: Rank) -> None:
        for number in range(4):
            if number == seed % 4:
                rank.pause()
            rank.streams.link_is_free(free=number % 2 == 0)
            rank.step()
        rank.arrive()
        rank.meet()

    ranks = on_ranks(body, migration(urgent), seed=seed)
    check_copies(ranks, version=4)
    assert {rank: streams.streams.peers for rank, streams in ranks.items()} == {0: (2, 3), 1: (), 2: (0,), 3: (0,)}
    assert ranks[2].streams.bytes_received == sum(3 * 4 * LAYOUT.blocks[key[2]].numel for key in KEYS[::2])
    assert ranks[0].streams.pace(FAST) != FAST, "the source has measured how fast it sends"
    assert ranks[1].streams.pace(FAST) == FAST


def test_held_streams_send_nothing_before_they_are_released() -> None:
    def body(rank: Rank) -> None:
        rank.streams.prepare()
        rank.streams.copy_bases()
        rank.streams.link_is_free(True)
        rank.pause()
        assert rank.streams.held and rank.streams.bytes_received == 0
        assert rank.streams.ready(NO_TIME, FAST) == (rank.fabric.rank != 0), "only the source has something to send"
        rank.step()
        rank.streams.release()
        rank.pause()
        assert rank.streams.ready(NO_TIME, FAST)
        rank.step()
        rank.arrive()
        rank.meet()

    check_copies(on_ranks(body, held=True), version=2)


@pytest.mark.parametrize("urgent", [False, True])
def test_streams_pause_while_a_step_needs_the_link_unless_they_are_urgent(urgent: bool) -> None:
    def body(rank: Rank) -> None:
        rank.streams.link_is_free(False)
        rank.pause()
        if rank.fabric.rank == 0:
            assert rank.streams.ready(NO_TIME, FAST) == urgent
            size = sum(4 * 3 * block.numel for block in LAYOUT.blocks)
            assert rank.streams.ready(1.0, size), "what is left fits into a second at this rate"
            assert rank.streams.ready(0.7, size) == urgent
        rank.meet()
        rank.streams.link_is_free(True)
        rank.pause()
        assert rank.streams.ready(NO_TIME, FAST)
        rank.arrive()
        rank.meet()

    check_copies(on_ranks(body, migration(urgent)), version=0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("urgent", "awaited"), [(False, False), (False, True), (True, False)])
def test_a_ranks_streams_send_one_at_a_time_while_a_step_computes(
    seed: int, urgent: bool, awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless their copies are urgent, or all ranks wait for them. Rank 0 sends to two peers."""
    inside, most = 0, 0

    def counted(self: BlockSender) -> bool:
        nonlocal inside, most
        due = self.pending > 0
        inside += due
        most = max(most, inside)
        try:
            return pump(self)
        finally:
            inside -= due

    pump = BlockSender.pump
    monkeypatch.setattr(BlockSender, "pump", counted)

    def body(rank: Rank) -> None:
        if not awaited:
            rank.streams.release()
            rank.pause()
        rank.arrive()
        rank.meet()

    check_copies(on_ranks(body, migration(urgent), held=True, seed=seed), version=0)
    assert most == (2 if urgent or awaited else 1)


def test_the_loss_of_a_peer_is_raised_where_copies_are_waited_for() -> None:
    """The error of a stream's thread comes back on the training thread, and again each time."""
    errors: dict[int, CommError] = {}

    def body(rank: Rank) -> None:
        rank.streams.link_is_free(False)
        if rank.fabric.rank == 2:
            rank.fabric.break_off()
            raise Killed
        rank.streams.conclude(0)
        try:
            rank.streams.finish()
        except CommError as error:
            errors[rank.fabric.rank] = error
            with pytest.raises(CommError):
                rank.streams.ready(NO_TIME, FAST)
            rank.fabric.scheduler.wait(lambda: 3 in errors or rank.fabric.rank == 3, 5.0)
        rank.streams.abandon()
        rank.streams.abandon()

    on_ranks(body)
    assert isinstance(errors[0], PeerLost) and errors[0].rank == 2


@pytest.mark.parametrize("urgent", [True, False])
def test_copies_that_arrived_whole_outlive_the_streams_and_no_other(urgent: bool) -> None:
    """Urgent copies are verified as they arrive, for a recovery to use; others only once this rank has time for it."""
    kept: dict[int, set[BlockKey]] = {}

    def body(rank: Rank) -> None:
        if urgent:
            rank.pause()
        rank.streams.abandon()
        copies = rank.streams.keep(rank.record)
        kept[rank.fabric.rank] = set(copies)
        assert all(copy.version == rank.record.version for copy in copies.values())
        rank.pause()
        assert set(rank.streams.keep(rank.record)) == set(copies), "a thread that goes on changes nothing"
        rank.meet()

    ranks = on_ranks(body, migration(urgent))
    wanted = {2: set(KEYS[::2]), 3: set(KEYS[1::2])} if urgent else {2: set(), 3: set()}
    assert kept == {0: set(), 1: set(), **wanted}
    assert all(KEYS[0] not in rank.pool for number, rank in ranks.items() if number), "the pool is the caller's"


def test_the_time_that_a_rank_waited_for_a_migration_is_that_of_its_stages() -> None:
    moved = Moved(migration(), 7, 1.5, {"finish": 0.25, "switch": 0.5})
    assert moved.stall == 0.75
