"""The parts of a gloo group, on torch's own gloo groups of two ranks in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.comm.batched_work import BatchedWork
from megatron.elastic.comm.errors import CommError, CommTimeout, GenerationChanged, PeerLost
from megatron.elastic.comm.gloo.build import Build, bury
from megatron.elastic.comm.gloo.fabric import GlooFabric
from megatron.elastic.comm.gloo.group import GlooGroup
from megatron.elastic.comm.gloo.guarded_store import GuardedStore
from megatron.elastic.comm.gloo.seating import Seating
from megatron.elastic.comm.gloo.tensors import Movable, Reducible
from megatron.elastic.comm.gloo.wait import Waiters
from megatron.elastic.comm.gloo.work import GlooWork
from tests.unit.comm.test_gloo_wait import SECONDS, pair

T = TypeVar("T")

# -- tensors -----------------------------------------------------------------------------------

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def shaped(dtype: torch.dtype, strided: bool, count: int) -> torch.Tensor:
    whole = torch.arange(2 * count).remainder(3).to(dtype).view(count, 2)
    return whole[:, 0] if strided else whole


@given(st.sampled_from(DTYPES), st.booleans(), st.integers(0, 5))
def test_a_tensor_that_is_moved_travels_as_bytes_and_comes_back_in_its_own_shape(
    dtype: torch.dtype, strided: bool, count: int
) -> None:
    tensor = shaped(dtype, strided, count)
    source, target = Movable(tensor), Movable(torch.zeros_like(tensor))
    assert source.data.dtype == torch.uint8 and source.data.numel() == tensor.numel() * tensor.element_size()
    target.data.copy_(source.data)
    target.finish()
    assert torch.equal(target.tensor, tensor)


@given(st.sampled_from(DTYPES), st.booleans(), st.integers(0, 5), st.integers(1, 4))
def test_a_reduction_is_done_in_a_type_that_gloo_adds_and_ends_in_the_tensors_own(
    dtype: torch.dtype, strided: bool, count: int, ranks: int
) -> None:
    """An average of integers is rounded towards zero, as torch's is; of truth values both are an or."""
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        tensor = shaped(dtype, strided, count)
        before = tensor.clone()
        item = Reducible(tensor, op, ranks)
        assert item.data.dtype not in (torch.bool, torch.int16)
        if item.op == dist.ReduceOp.SUM:
            item.data.mul_(ranks)  # as if every rank had the same
        item.finish()
        assert tensor.dtype == dtype
        assert torch.equal(tensor, before if op == dist.ReduceOp.AVG or dtype == torch.bool else before * ranks)


# -- works ---------------------------------------------------------------------------------------


class Ending(dist.Work):
    """A work that is done, or fails with ``error``."""

    def __init__(self, error: Exception | None = None, done: bool = True) -> None:
        super().__init__()
        self.error, self.done, self.waits = error, done, 0

    def wait(self, timeout: timedelta = SECONDS) -> bool:
        self.waits += 1
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        return self.error is None


def test_a_batch_is_done_when_all_of_it_is_and_raises_the_first_error() -> None:
    one, two = Ending(), Ending(done=False)
    batch = BatchedWork([one, two])
    assert batch.wait() and (one.waits, two.waits) == (1, 1)
    assert not batch.is_completed() and batch.is_success()
    failed = BatchedWork([Ending(), Ending(PeerLost(3)), Ending(PeerLost(4))])
    with pytest.raises(PeerLost) as lost:
        failed.wait(SECONDS)
    assert lost.value.rank == 3 and failed.is_completed() and not failed.is_success()


class Host:
    """The part of a fabric that a group needs; ``frozen``: a newer generation."""

    timeout = 20.0

    def __init__(self, inner: Any) -> None:
        self.waiters = Waiters()
        self.frozen = 0
        self.waited_for: list[tuple[int, ...]] = []
        self.forgotten: list[GlooGroup] = []
        self._inner = inner

    def inner(self, group: GlooGroup) -> tuple[Any, Seating]:
        if self.frozen > group.seating.generation:
            raise GenerationChanged(self.frozen)
        return self._inner, group.seating

    @contextmanager
    def waiting(self, peers: tuple[int, ...], generation: int) -> Iterator[None]:
        self.waited_for.append(peers)
        yield

    def void(self, generation: int) -> bool:
        return self.frozen > generation

    def translate(self, error: BaseException, peers: tuple[int, ...], generation: int, seconds: float) -> CommError:
        return GenerationChanged(self.frozen) if self.void(generation) else CommTimeout(seconds, peers)

    def forget(self, group: GlooGroup) -> None:
        self.forgotten.append(group)


def groups(slots: int | None = None, living: tuple[int, int] = (3, 5)) -> list[tuple[GlooGroup, Host]]:
    """The group of global ranks ``living`` of generation 1, as each of the two sees it."""
    made = []
    for own, inner in enumerate(pair()):
        host = Host(inner)
        made.append((GlooGroup(cast(Any, host), "dp", (3, 4, 5), Seating(1, living, own, slots, (3, 4, 5))), host))
    return made


def on_both(body: Callable[[GlooGroup, int], T], slots: int | None = None) -> list[T]:
    """Run ``body(group, own)`` on both ranks at once."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda at: body(at[1][0], at[0]), enumerate(groups(slots))))


def test_a_collective_is_over_the_living_whatever_the_group_was_made_of() -> None:
    def body(group: GlooGroup, own: int) -> list[float]:
        assert (group.size(), group.rank()) == (2, own)
        tensor = torch.tensor([1.0 + own, 10.0])
        assert group.allreduce([tensor]).wait()
        rows = [torch.zeros(2), torch.zeros(2)]
        group.allgather([rows], [torch.full((2,), float(own))]).wait()
        part = torch.zeros(1)
        group.reduce_scatter_single(part, torch.tensor([1.0, 2.0])).wait()
        swapped = torch.zeros(2, dtype=torch.int16)
        group.all_to_all_single(swapped, torch.tensor([10, 20], dtype=torch.int16) + own).wait()
        group.barrier().wait()
        return [*tensor.tolist(), *rows[1].tolist(), *part.tolist(), *swapped.tolist()]

    assert on_both(body) == [[3.0, 20.0, 1.0, 1.0, 2.0, 10, 11], [3.0, 20.0, 1.0, 1.0, 4.0, 20, 21]]


def test_in_the_slot_space_a_lost_ranks_place_is_left_alone() -> None:
    def body(group: GlooGroup, own: int) -> list[float]:
        assert (group.size(), group.rank()) == (6, (3, 5)[own])
        row = torch.full((6,), -1.0)
        group.all_gather_single(row, torch.tensor([float(own)])).wait()
        return row.tolist()

    assert on_both(body, slots=6) == [[-1, -1, -1, 0, -1, 1]] * 2


def test_messages_go_by_tag_and_to_a_lost_rank_not_at_all() -> None:
    def body(group: GlooGroup, own: int) -> list[float]:
        got = [torch.zeros(2), torch.zeros(2)]
        works = [group.recv([got[tag]], 1 - own, tag) for tag in (1, 0)]
        works += [group.send([torch.full((2,), 10.0 * own + tag)], 1 - own, tag) for tag in (0, 1)]
        for work in works:
            work.wait()
        with pytest.raises(PeerLost):
            group.send([torch.zeros(1)], 2)
        return [float(one[0]) for one in got]

    assert on_both(body) == [[10.0, 11.0], [0.0, 1.0]]


def test_a_wait_names_whom_it_is_for_and_ends_with_its_generation() -> None:
    """The error is kept: whoever waits again gets the same."""
    (group, host), _other = groups()
    work = group.allreduce([torch.ones(1)])
    assert isinstance(work, GlooWork) and not work.is_completed()
    threading.Timer(0.1, lambda: setattr(host, "frozen", 2)).start()
    with pytest.raises(GenerationChanged) as changed:
        work.wait()
    with pytest.raises(GenerationChanged) as again:
        work.wait()
    assert again.value is changed.value is work.exception() and not work.is_success() and work.is_completed()
    assert host.waited_for == [(5,)]
    with pytest.raises(GenerationChanged):
        group.allreduce([torch.ones(1)])
    group.shutdown()
    assert host.forgotten == [group]


def test_a_wait_that_no_peer_ends_runs_out_of_time_and_names_the_peers() -> None:
    (group, _), _other = groups()
    with pytest.raises(CommTimeout) as late:
        group.barrier().wait(timedelta(seconds=0.2))
    assert late.value.waiting_for == (5,)


# -- rendezvous -----------------------------------------------------------------------------------


def test_a_guarded_store_keeps_its_keys_apart_and_ends_a_wait_that_has_no_point() -> None:
    shared, over = dist.HashStore(), threading.Event()

    def check() -> None:
        if over.is_set():
            raise GenerationChanged(2)

    one, two = (GuardedStore(shared, f"{number}/", check, 20.0) for number in (1, 2))
    one.set("key", b"value")
    assert one.get("key") == b"value" and one.check(["key"]) and not two.check(["key"])
    with pytest.raises(TimeoutError, match="key"):
        two.wait(["key"], timedelta(seconds=0.02))
    threading.Timer(0.05, lambda: two.set("key", b"late")).start()
    assert two.get("key") == b"late"
    threading.Timer(0.05, over.set).start()
    began = time.monotonic()
    with pytest.raises(GenerationChanged):
        two.wait(["never"])
    assert time.monotonic() - began < 10.0


class Shared(dist.Store):
    """A store whose only connection a call that waits would keep from all other threads."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = dist.HashStore()

    def check(self, keys: Sequence[str]) -> bool:
        there = self.keys.check(list(keys))
        for key in keys:
            self.keys.delete_key(key)  # by its owner, which needs it no more
        return there

    def get(self, key: str) -> bytes:
        raise AssertionError(f"waits in the store for {key}")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.keys.compare_set(key, expected, desired)


def test_a_guarded_store_never_waits_in_the_store_for_a_key_that_was_there() -> None:
    shared, over = Shared(), threading.Event()

    def check() -> None:
        if over.is_set():
            raise GenerationChanged(2)

    guarded = GuardedStore(shared, "1/", check, 20.0)
    shared.keys.set("1/key", "value")
    assert guarded.get("key") == b"value"
    guarded.wait(["key"])  # and then it is gone
    threading.Timer(0.05, over.set).start()
    with pytest.raises(GenerationChanged):
        guarded.get("key")


def device() -> Any:
    return cast(Any, dist.ProcessGroupGloo).create_device(hostname="127.0.0.1")


def build(own: int, store: dist.Store) -> Build:
    made = Build(Seating(1, (3, 5), own, None, (3, 5)))
    made.start(store, device(), 20.0, 1)
    return made


def test_a_group_is_connected_aside_once_all_members_have_come() -> None:
    store = dist.HashStore()
    first = build(0, store)
    assert not first.ready.wait(0.1), "the other has not come, and nobody waits for it"
    both = [first, build(1, store)]
    assert all(one.ready.wait(20.0) and one.error is None for one in both)
    tensors = [torch.ones(1), torch.ones(1)]
    for work in [one.inner.allreduce([tensor]) for one, tensor in zip(both, tensors, strict=True)]:
        work.wait(SECONDS)
    assert [float(tensor) for tensor in tensors] == [2.0, 2.0]
    waiting = list(both)
    bury(waiting)
    end = time.monotonic() + 20.0
    while waiting or any(one.inner is not None for one in both):
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_group_that_an_edit_has_overtaken_ends_by_itself() -> None:
    over = threading.Event()

    def check() -> None:
        if over.is_set():
            raise GenerationChanged(2)

    overtaken = build(0, GuardedStore(dist.HashStore(), "1/", check, 20.0))
    over.set()
    assert overtaken.ready.wait(20.0)
    assert isinstance(overtaken.error, GenerationChanged) and overtaken.inner is None


def test_a_group_of_one_waits_for_no_rank() -> None:
    alone = Build(Seating(1, (3,), 0, None, (3, 5)))
    alone.start(dist.HashStore(), device(), 20.0, 1)
    assert alone.ready.is_set() and alone.inner is not None
    alone.drop()
    assert alone.inner is None


def test_keys_of_former_generations_do_not_stay_in_the_store() -> None:
    """The first agent serves the store for as long as the job runs."""
    store = dist.HashStore()
    fabrics = [GlooFabric(rank, 2, 0, store, timeout=20.0) for rank in range(2)]
    addresses = {fabric.rank: fabric.address() for fabric in fabrics}

    def enter(fabric: GlooFabric, generation: int) -> None:
        fabric.interrupt(generation)
        fabric.edit(generation, addresses, 20.0)
        fabric.world.allreduce([torch.ones(1)]).wait()

    try:
        for generation in range(1, 6):
            threads = [threading.Thread(target=enter, args=(fabric, generation)) for fabric in fabrics]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if generation == 1:
                once = store.num_keys()
        end = time.monotonic() + 20
        while store.num_keys() > once and time.monotonic() < end:
            time.sleep(0.01)
        assert store.num_keys() == once
    finally:
        for fabric in fabrics:
            fabric.close()
