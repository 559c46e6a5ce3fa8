"""A copy is added while its source trains on, checked before it counts; a broken transfer leaves nothing behind."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatron.elastic.comm.errors import PeerLost
from megatron.elastic.state.layout import ParamSpec, UnitLayout
from megatron.elastic.state.ownership import Rules, UnitGroup, initial, promote_only, rebalance
from megatron.elastic.state.placement import Copies, Placement, Transition
from megatron.elastic.state.pool import StateError, StatePool
from megatron.elastic.state.receiver import BlockReceiver
from megatron.elastic.state.record import ConstantSchedule, GradientKey, Hyper, Rate, StepRecord, Vote, advance
from megatron.elastic.state.sender import BlockSender
from megatron.elastic.state.transfer import TransferError, commit, prune

LAYOUT = UnitLayout.build(0, 0, [ParamSpec("w", 3000, (3000,), True), ParamSpec("b", 100, (100,), False, 0.0)], 2048)
KEYS = [block.key for block in LAYOUT.blocks]
RATES = (Rate(1e-2, 0.1),)
HYPER = Hyper(ConstantSchedule(RATES), scaler="dynamic", initial_loss_scale=64.0)
PLENTY = 1 << 30


class SocketChannel:
    """A Channel over one end of a socket pair. ``damage`` is added to the payloads of that size."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.damage_numel = -1

    def send(self, peer: int, payload: torch.Tensor) -> None:
        if payload.numel() == self.damage_numel and payload.dtype == torch.float32:
            payload = payload.clone()
            payload.reshape(-1).view(torch.int32)[7] ^= 1 << 12
        self.end.sendall(payload.reshape(-1).view(torch.uint8).numpy().data)

    def recv(self, peer: int, out: torch.Tensor) -> None:
        array: Any = out.reshape(-1).view(torch.uint8).numpy()
        view = memoryview(array)
        while len(view):
            count = self.end.recv_into(view)
            if count == 0:
                raise PeerLost(peer)
            view = view[count:]


@contextmanager
def channels() -> Iterator[tuple[SocketChannel, SocketChannel]]:
    a, b = socket.socketpair()
    with a, b:
        yield SocketChannel(a), SocketChannel(b)


def source_pool(rank: int = 0) -> tuple[StatePool, StepRecord]:
    pool = StatePool(rank, {(0, 0): LAYOUT}, HYPER)
    flat = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(4))
    for block in LAYOUT.blocks:
        pool.put(block.key, flat[block.start : block.stop], 0)
    record = StepRecord.initial(HYPER)
    pool.start(record)
    return pool, record


def train(pools: list[StatePool], record: StepRecord, found: bool = False) -> StepRecord:
    key = GradientKey(record.version, 1)
    flat = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(50 + record.version))
    after = advance(record, Vote(key, [4.0], found, 1.0, 1.0, 8, rates=RATES), HYPER)
    for pool in pools:
        for name in pool:
            block = pool.block(name)
            pool.retain(name, key, flat[block.start : block.stop])
        pool.apply(after)
    return after


def run(receiver: BlockReceiver, errors: list[BaseException]) -> threading.Thread:
    def loop() -> None:
        try:
            while receiver.take():
                pass
            receiver.verify()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    return thread


@contextmanager
def streaming(source: StatePool, memory: int = PLENTY) -> Iterator[tuple[StatePool, BlockSender, BlockReceiver]]:
    """All blocks of ``source`` on their way to a joiner that takes what comes, until the sender has finished."""
    joiner, errors = StatePool(1, {(0, 0): LAYOUT}, HYPER), list[BaseException]()
    with channels() as (near, far):
        sender, receiver = BlockSender(source, near, 1, memory), BlockReceiver(joiner, far, 0)
        thread = run(receiver, errors)
        sender.offer(KEYS)
        yield joiner, sender, receiver
        thread.join(20)
    assert not errors and not thread.is_alive()


def equal(a: StatePool, b: StatePool, keys=KEYS) -> bool:
    return all(
        torch.equal(a.get(k).state.view(torch.int32), b.get(k).state.view(torch.int32))
        and (a.get(k).lineage, a.get(k).version) == (b.get(k).lineage, b.get(k).version)
        for k in keys
    )


def adds(keys, rank: int, source: int) -> list[Transition]:
    return [Transition("add", key, rank, source) for key in keys]


def test_copies_added_during_training_have_the_sources_bits_and_lineage():
    source, record = source_pool()
    with streaming(source) as (joiner, sender, receiver):
        for step in range(6):
            for _ in range(step):
                sender.pump()
            record = train([source], record, found=step == 3)
            assert not list(joiner), "nothing counts yet"
        assert joiner.holdings().newest == -1
        sender.finish(record.version)
    assert receiver.keep(record).keys() == set(KEYS)
    commit(joiner, adds(KEYS, 1, 0), receiver.blocks, 6)
    assert equal(source, joiner)
    record = train([source, joiner], record)
    assert equal(source, joiner)


@pytest.mark.parametrize("end", ["applied", "computed again", "skipped", "under another key"])
def test_gradients_go_ahead_of_the_vote_on_them(end):
    """Only the record is left for the boundary; whatever becomes of the step, the copy is the source's."""
    source, record = source_pool()
    with streaming(source) as (joiner, sender, receiver):
        while sender.pump():
            pass
        for number in range(2):
            key, seeds = GradientKey(record.version, 1), (7, 8) if end == "computed again" else (7,)
            for seed in seeds:
                flat = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(seed + number))
                for name in KEYS:
                    source.retain(name, key, flat[source.block(name).start : source.block(name).stop])
                assert sender.log_bytes >= 4 * LAYOUT.numel
                while sender.log_bytes:
                    assert sender.pump(), "they go before anything else"
            if end == "under another key":  # the step is run again in another generation
                key = GradientKey(record.version, 2)
                source.discard(None, record.version)
                for name in KEYS:
                    source.retain(name, key, flat[source.block(name).start : source.block(name).stop])
            record = advance(record, Vote(key, [4.0], end == "skipped", 1.0, 1.0, 8, rates=RATES), HYPER)
            source.apply(record)
        sender.finish(record.version)
    assert receiver.keep(record).keys() == set(KEYS)
    assert all(not copy.gradients for copy in receiver.blocks.values()), "nothing is left over"
    commit(joiner, adds(KEYS, 1, 0), receiver.blocks, 2)
    assert equal(source, joiner)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("memory", [PLENTY, 3 * 4 * LAYOUT.blocks[0].numel])
@pytest.mark.parametrize("allocated", [True, False])
def test_bases_that_were_copied_ahead_are_those_of_the_version_they_are_sent_at(
    steps: int, memory: int, allocated: bool
):
    source, record = source_pool()
    with streaming(source, memory) as (joiner, sender, receiver):
        if allocated:
            sender.allocate()
        sender.prepare()
        for _ in range(steps):
            record = train([source], record)
        assert sender.pending_bytes == 12 * LAYOUT.numel, "nothing has left"
        sender.finish(record.version)
    commit(joiner, adds(KEYS, 1, 0), receiver.blocks, record.version)
    assert equal(source, joiner)


def test_nothing_counts_before_it_is_compared_with_its_hash():
    source, record = source_pool()
    with channels() as (near, far):
        receiver = BlockReceiver(StatePool(1, {(0, 0): LAYOUT}, HYPER), far, 0)
        receiver.prepare(KEYS[:1])
        sender = BlockSender(source, near, 1, PLENTY)
        sender.offer(KEYS)
        sending = threading.Thread(target=sender.finish, args=(record.version,), daemon=True)
        sending.start()
        while receiver.take():
            pass
        sending.join(20)
        receiver.blocks[KEYS[1]].exp_avg[0] += 1
        with pytest.raises(TransferError, match="do not match their hash"):
            receiver.verify()
        assert receiver.keep(record).keys() == {KEYS[0]}, "those compared before it"


@pytest.mark.parametrize("behind", ["no step", "one step", "one step without its gradient"])
def test_what_has_come_whole_is_kept_when_a_transfer_is_cut_short(behind: str):
    """The sender is lost with one base unsent: verified copies go on from the record, the others are forgotten."""
    source, record = source_pool()
    joiner = StatePool(1, {(0, 0): LAYOUT}, HYPER)
    with channels() as (near, far):
        sender, receiver = BlockSender(source, near, 1, PLENTY), BlockReceiver(joiner, far, 0)
        sender.offer(KEYS)
        for _ in KEYS[:-1]:
            assert sender.pump() and receiver.take()
            receiver.verify()
        assert sender.pump() and receiver.take(), "the last base is here, and not compared with its hash"
        if behind != "no step":
            key = GradientKey(record.version, 1)
            for name in KEYS:
                source.retain(name, key, torch.ones(source.block(name).numel))
            if behind == "one step":
                assert sender.pump() and receiver.take(), "the gradients went ahead of the vote"
            record = advance(record, Vote(key, [4.0], False, 1.0, 1.0, 8, rates=RATES), HYPER)
            source.apply(record)
        kept = receiver.keep(record)
        assert kept.keys() == (set() if behind == "one step without its gradient" else set(KEYS[:-1]))
        for copy in kept.values():
            joiner.take_in(copy)
        assert equal(source, joiner, kept)


def test_with_a_thread_that_streams_while_the_owner_steps():
    source, record = source_pool()
    stop = threading.Event()
    with streaming(source) as (joiner, sender, receiver):

        def stream() -> None:
            while not stop.is_set():
                if not sender.pump():
                    stop.wait(0.0005)

        sending = threading.Thread(target=stream, daemon=True)
        sending.start()
        for _ in range(60):
            record = train([source], record)
        stop.set()
        sending.join(20)
        sender.finish(record.version)
    commit(joiner, adds(KEYS, 1, 0), receiver.blocks, record.version)
    assert equal(source, joiner)


def test_memory_stays_bounded_when_steps_outrun_the_link_and_everything_still_arrives():
    source, record = source_pool()
    bound = 3 * 4 * LAYOUT.blocks[0].numel
    with streaming(source, bound) as (joiner, sender, receiver):
        for step in range(8):
            for _ in range(0 if step % 2 else 6):
                sender.pump()
            record = train([source], record)
            assert sender.log_bytes <= bound
        assert sender.restarts > 0, "the case must exceed the bound"
        sender.finish(record.version)
    assert sender.log_bytes == 0
    commit(joiner, adds(KEYS, 1, 0), receiver.blocks, record.version)
    assert equal(source, joiner)


def test_a_base_damaged_on_the_way_is_refused_and_never_counts():
    source, record = source_pool()
    joiner, errors = StatePool(1, {(0, 0): LAYOUT}, HYPER), list[BaseException]()
    with channels() as (near, far):
        near.damage_numel = 3 * LAYOUT.blocks[1].numel
        receiver = BlockReceiver(joiner, far, 0)
        thread = run(receiver, errors)
        sender = BlockSender(source, near, 1, PLENTY)
        sender.offer(KEYS)
        sender.finish(record.version)
        thread.join(20)
    [error] = errors
    assert isinstance(error, TransferError) and "contents do not match" in str(error) and "rank 0" in str(error)
    with pytest.raises(StateError, match="to be added is missing"):
        commit(joiner, adds(KEYS, 1, 0), receiver.blocks, record.version)
    assert not list(joiner)


def test_a_gradient_damaged_on_the_way_shows_in_the_lineage():
    source, record = source_pool()
    joiner, errors = StatePool(1, {(0, 0): LAYOUT}, HYPER), list[BaseException]()
    with channels() as (near, far):
        receiver = BlockReceiver(joiner, far, 0)
        thread = run(receiver, errors)
        sender = BlockSender(source, near, 1, PLENTY)
        sender.offer(KEYS[:1])
        sender.pump()
        near.damage_numel = LAYOUT.blocks[0].numel
        record = train([source], record)
        sender.finish(record.version)
        thread.join(20)
    assert not errors
    assert receiver.blocks[KEYS[0]].lineage != source.get(KEYS[0]).lineage


def test_a_source_that_dies_leaves_the_joiner_empty():
    source, _ = source_pool()
    joiner, errors = StatePool(1, {(0, 0): LAYOUT}, HYPER), list[BaseException]()
    with channels() as (near, far):
        receiver = BlockReceiver(joiner, far, 0)
        thread = run(receiver, errors)
        sender = BlockSender(source, near, 1, PLENTY)
        sender.offer(KEYS)
        sender.pump()
        near.end.close()
        thread.join(20)
    assert isinstance(errors[0], PeerLost) and not list(joiner)
    assert joiner.holdings().newest == -1


def test_commit_changes_nothing_when_one_copy_is_behind():
    pool, _ = source_pool()
    behind = pool.shape(KEYS[0], torch.zeros(3, LAYOUT.blocks[0].numel), 2)
    pool.drop(KEYS[0])
    pool.drop(KEYS[1])
    good = pool.shape(KEYS[1], torch.zeros(3, LAYOUT.blocks[1].numel), 3)
    with pytest.raises(StateError, match="at version 2, the state at 3"):
        commit(pool, adds(KEYS[:2], 0, 1), {KEYS[0]: behind, KEYS[1]: good}, 3)
    assert KEYS[0] not in pool and KEYS[1] not in pool


def test_copies_go_with_the_placement_that_does_not_name_them():
    source, _ = source_pool()
    old = Placement({key: Copies(0) for key in KEYS})
    changes = [Transition("add", KEYS[0], 1, 0), Transition("promote", KEYS[0], 1), Transition("drop", KEYS[0], 0)]
    new, taker = old.apply(changes), StatePool(1, {(0, 0): LAYOUT}, HYPER)
    for pool in (source, taker):
        commit(pool, changes, {KEYS[0]: taker.shape(KEYS[0], torch.zeros(3, LAYOUT.blocks[0].numel), 0)}, 0)
    assert KEYS[0] in source and KEYS[0] in taker, "it is there twice until a vote has named one"
    assert not prune(source, old, new) and not prune(taker, old, new)
    assert [*prune(taker, old)] == [KEYS[0]] and not list(taker), "where the old placement holds"
    assert [*prune(source, new)] == [KEYS[0]] and KEYS[0] not in source, "where the new one does"
    assert not prune(source, new)


def test_a_block_cannot_be_dropped_while_it_is_streamed():
    source, _ = source_pool()
    with channels() as (near, _):
        sender = BlockSender(source, near, 1, PLENTY)
        sender.offer(KEYS[:1])
        with pytest.raises(StateError, match="dropped while it is streamed to rank 1"):
            source.drop(KEYS[0])
        source.drop(KEYS[1])
        sender.close()
        source.drop(KEYS[0])


def execute(pools: dict[int, StatePool], target: Placement, changes, version: int) -> None:
    """All adds over real channels, then the boundary."""
    received: dict[int, dict] = {rank: {} for rank in pools}
    routes = sorted({(c.source, c.rank) for c in changes if c.kind == "add"})
    for source, taker in routes:
        errors: list[BaseException] = []
        with channels() as (near, far):
            sender = BlockSender(pools[source], near, taker, PLENTY)
            receiver = BlockReceiver(pools[taker], far, source)
            thread = run(receiver, errors)
            sender.offer([c.block for c in changes if (c.source, c.rank) == (source, taker)])
            sender.finish(version)
            thread.join(20)
        assert not errors
        received[taker] |= receiver.blocks
    for rank, pool in pools.items():
        commit(pool, changes, received[rank], version)
    for pool in pools.values():
        prune(pool, target)


def test_shrink_promotes_then_adds_and_a_rejoin_brings_the_rank_back_all_by_the_same_transitions():
    def group(ranks) -> list[UnitGroup]:
        return [UnitGroup(0, 0, LAYOUT.blocks, tuple(ranks))]

    def rules(ranks) -> Rules:
        return Rules(1, 4, dict.fromkeys(ranks, 0))

    reference, record = source_pool(9)
    placement = initial(group([0, 1, 2]), rules([0, 1, 2]))
    pools = {rank: StatePool(rank, {(0, 0): LAYOUT}, HYPER) for rank in range(3)}
    for key, copies in placement.copies.items():
        for rank in copies.ranks:
            pools[rank].put(key, reference.get(key).master, 0)
    record = train([reference, *pools.values()], record)

    del pools[1]
    first = promote_only(placement, pools, group([0, 2]))
    assert not first.lost
    record = train([reference, *pools.values()], record)
    placement, changes = rebalance(first.placement, group([0, 2]), rules([0, 2]))
    execute(pools, placement, changes, record.version)

    pools[1] = StatePool(1, {(0, 0): LAYOUT}, HYPER)
    placement, changes = rebalance(placement, group([0, 1, 2]), rules([0, 1, 2]))
    execute(pools, placement, changes, record.version)
    record = train([reference, *pools.values()], record)
    for rank, pool in pools.items():
        assert set(pool) == set(placement.owned_by(rank)) | set(placement.mirrored_by(rank))
        assert equal(pool, reference, list(pool)) and pool.holdings().newest == record.version
