"""What every fabric must do, as functions run by each of four ranks (``test_fabric_contract.py``).

A check gets an edited fabric with ranks 0–3 alive and installed under
``torch.distributed``; it raises when a claim is not met. ``SEED`` is in every
message that compares numbers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron.elastic.comm import Address, BlockRange, CommError, Fabric, GenerationChanged, PeerLost
from megatron.elastic.comm.registry import LivingRanks
from tools.bench._common import Here

SEED = 20240607
WORLD = (0, 1, 2, 3)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

Check = Callable[[Here, Fabric], None]


def values(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in every dtype; the same on every process."""
    generator = torch.Generator().manual_seed(SEED + 1000 * salt + rank)
    numbers = torch.randint(1, 4, (count,), generator=generator)
    return numbers > 2 if dtype == torch.bool else numbers.to(dtype)


def same(got: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    assert got.dtype == wanted.dtype and torch.equal(got, wanted), f"{what} (seed {SEED}): {got} is not {wanted}"


def addresses(here: Here, fabric: Fabric, ranks: Iterable[int], generation: int) -> dict[int, Address]:
    """Swap addresses as the control plane would."""
    found: Mapping[int, dict[str, object]] = here.exchange(f"{generation}", vars(fabric.address()), ranks)
    return {rank: Address(**value) for rank, value in found.items()}  # type: ignore[arg-type]


def edit(here: Here, fabric: Fabric, ranks: Iterable[int], generation: int) -> None:
    """All of ``ranks`` arrive, are interrupted, then edited: nobody's old generation ends under work in flight."""
    decided = addresses(here, fabric, tuple(ranks), generation)
    fabric.interrupt(generation)
    fabric.edit(generation, decided, 20.0)


# -- reductions -------------------------------------------------------------


def reductions_of_every_type(here: Here, fabric: Fabric) -> None:
    group = fabric.group("tp", (3, 1, 0)) if here.rank != 2 else None
    folds: dict[dist.ReduceOp.RedOpType, Callable[[torch.Tensor], torch.Tensor]] = {
        dist.ReduceOp.SUM: lambda rows: rows.sum(0),
        dist.ReduceOp.MIN: lambda rows: rows.amin(0),
        dist.ReduceOp.MAX: lambda rows: rows.amax(0),
        dist.ReduceOp.PRODUCT: lambda rows: rows.prod(0),
    }
    for target, members in ((None, WORLD), (group, (3, 1, 0))):
        if members != WORLD and group is None:
            continue
        for dtype in FLOATS + INTEGERS:
            for op, fold in folds.items():
                tensor = values(here.rank, 37, dtype)
                dist.all_reduce(tensor, op, group=target)
                wanted = fold(torch.stack([values(rank, 37, dtype) for rank in members])).to(dtype)
                same(tensor, wanted, (dtype, op))


def averages_and_bit_operations(here: Here, fabric: Fabric) -> None:
    for dtype in FLOATS:
        tensor = torch.full((5,), float(here.rank), dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        same(tensor, torch.full((5,), 1.5, dtype=dtype), dtype)
    for op, wanted in ((dist.ReduceOp.BAND, 0), (dist.ReduceOp.BOR, 15), (dist.ReduceOp.BXOR, 15)):
        bits = torch.tensor([1 << here.rank], dtype=torch.int32)
        dist.all_reduce(bits, op)
        assert int(bits) == wanted, op
    flag = torch.tensor([here.rank == 2, False])
    dist.all_reduce(flag)
    same(flag, torch.tensor([True, False]), "bool sum is or")


def reduce_and_reduce_scatter(here: Here, fabric: Fabric) -> None:
    tensor = values(here.rank, 9, torch.float32)
    dist.reduce(tensor, dst=2)
    if here.rank == 2:
        same(tensor, sum_of(9, WORLD), "reduce")
    inputs = [values(here.rank, 6, torch.float32, salt=slot) for slot in WORLD]
    wanted = sum_of(6, WORLD, salt=here.rank)
    output = torch.empty(6)
    dist.reduce_scatter(output, inputs)
    same(output, wanted, "reduce_scatter")
    output = torch.empty(6)
    dist.reduce_scatter_tensor(output, torch.cat(inputs))
    same(output, wanted, "reduce_scatter_tensor")


def sum_of(count: int, ranks: Iterable[int], salt: int = 0) -> torch.Tensor:
    return torch.stack([values(rank, count, torch.float32, salt) for rank in ranks]).sum(0)


# -- movement ---------------------------------------------------------------


def movement_of_every_type(here: Here, fabric: Fabric) -> None:
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        own = values(here.rank, 7, dtype)
        received = own.clone()
        dist.broadcast(received, src=1)
        same(received, values(1, 7, dtype), ("broadcast", dtype))
        row = [torch.zeros(7, dtype=dtype) for _ in WORLD]
        dist.all_gather(row, own)
        for rank in WORLD:
            same(row[rank], values(rank, 7, dtype), ("all_gather", dtype))
        flat = torch.zeros(28, dtype=dtype)
        dist.all_gather_into_tensor(flat, own)
        same(flat, torch.cat([values(rank, 7, dtype) for rank in WORLD]), ("all_gather_into_tensor", dtype))
        matrix = torch.zeros(4, 7, dtype=dtype)
        dist.all_gather_into_tensor(matrix, own)
        same(matrix.view(-1), flat, ("all_gather_into_tensor 2-D", dtype))


def gather_and_scatter(here: Here, fabric: Fabric) -> None:
    members = (2, 3, 0)
    if here.rank in members:
        group = fabric.group("pp", members)
        own = values(here.rank, 5, torch.int64)
        rows = [torch.zeros(5, dtype=torch.int64) for _ in members] if here.rank == 3 else None
        dist.gather(own, rows, dst=3, group=group)
        for rank, row in zip(members, rows or (), strict=False):
            same(row, values(rank, 5, torch.int64), "gather")
        pieces = [values(rank, 5, torch.int64) for rank in members] if here.rank == 0 else None
        got = torch.zeros(5, dtype=torch.int64)
        dist.scatter(got, pieces, src=0, group=group)
        same(got, values(here.rank, 5, torch.int64), "scatter")


def all_to_all_in_both_forms(here: Here, fabric: Fabric) -> None:
    outputs = [torch.empty(rank + 1) for rank in WORLD]
    dist.all_to_all(outputs, [torch.full((here.rank + 1,), float(10 * here.rank + peer)) for peer in WORLD])
    for peer in WORLD:
        same(outputs[peer], torch.full((peer + 1,), float(10 * peer + here.rank)), "all_to_all")
    flat = torch.empty(8, 2)
    dist.all_to_all_single(flat, torch.arange(16.0).view(8, 2) + 100 * here.rank)
    wanted = torch.cat(
        [torch.arange(16.0).view(8, 2)[2 * here.rank : 2 * here.rank + 2] + 100 * peer for peer in WORLD]
    )
    same(flat, wanted, "all_to_all_single")
    sent = list(WORLD)  # peer p gets p elements of everybody
    uneven = torch.empty(4 * here.rank)
    source = torch.cat([torch.full((peer,), float(here.rank)) for peer in WORLD])
    dist.all_to_all_single(uneven, source, [here.rank] * 4, sent)
    same(uneven, torch.arange(4.0).repeat_interleave(here.rank), "all_to_all_single with splits")


def awkward_shapes(here: Here, fabric: Fabric) -> None:
    matrix = torch.arange(12.0).view(3, 4) + here.rank
    strided = matrix.t()[1:3]
    assert not strided.is_contiguous()
    dist.all_reduce(strided)
    same(strided, (torch.arange(12.0).view(3, 4).t()[1:3] * 4 + 6), "strided all_reduce")
    same(matrix[:, 0], torch.arange(0.0, 12.0, 4.0) + here.rank, "its neighbours are untouched")
    column = torch.zeros(3, 2)[:, 0] + (5.0 if here.rank == 2 else 0.0)
    target = torch.zeros(3, 2)
    view = target[:, 1]
    view.copy_(column)
    dist.broadcast(view, src=2)
    same(target, torch.tensor([[0.0, 5.0]] * 3), "strided broadcast")
    empty = torch.empty(0)
    dist.all_reduce(empty)
    dist.broadcast(empty, src=3)
    dist.all_gather([torch.empty(0) for _ in WORLD], empty)
    scalar = torch.tensor(float(here.rank))
    dist.all_reduce(scalar)
    assert scalar.shape == () and float(scalar) == 6.0
    large = torch.full((1 << 20,), 1.0)
    dist.all_reduce(large)
    assert bool((large == 4.0).all())


# -- batches, works, threads ------------------------------------------------


def coalescing(here: Here, fabric: Fabric) -> None:
    tensors = [values(here.rank, 4, torch.float32, salt) for salt in range(3)]
    with dist._coalescing_manager(group=fabric.world, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for salt, tensor in enumerate(tensors):
        same(tensor, sum_of(4, WORLD, salt), "coalesced all_reduce")
    flats = [torch.zeros(16) for _ in range(2)]
    with dist._coalescing_manager(group=fabric.world):
        for salt, flat in enumerate(flats):
            dist.all_gather_into_tensor(flat, values(here.rank, 4, torch.float32, salt))
    for salt, flat in enumerate(flats):
        same(flat, torch.cat([values(rank, 4, torch.float32, salt) for rank in WORLD]), "coalesced all_gather")
    parts = [torch.zeros(2) for _ in range(2)]
    with dist._coalescing_manager(group=fabric.world):
        for salt, part in enumerate(parts):
            dist.reduce_scatter_tensor(part, values(here.rank, 8, torch.float32, salt))
    for salt, part in enumerate(parts):
        same(part, sum_of(8, WORLD, salt)[2 * here.rank : 2 * here.rank + 2], "coalesced reduce_scatter")


def many_works_in_flight(here: Here, fabric: Fabric) -> None:
    tensors = [values(here.rank, 64, torch.float32, salt) for salt in range(16)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    future = dist.all_reduce(one := torch.ones(3), async_op=True).get_future()
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed()
    future.wait()
    same(one, torch.full((3,), 4.0), "future")
    for salt, tensor in enumerate(tensors):
        same(tensor, sum_of(64, WORLD, salt), "async all_reduce")


def several_groups_from_several_threads(here: Here, fabric: Fabric) -> None:
    groups = [fabric.group(f"thread{index}", WORLD) for index in range(4)]
    wrong: list[object] = []

    def work(index: int) -> None:
        for turn in range(25):
            tensor = values(here.rank, 33, torch.float32, salt=index * 100 + turn)
            dist.all_reduce(tensor, group=groups[index])
            if not torch.equal(tensor, sum_of(33, WORLD, salt=index * 100 + turn)):
                wrong.append((index, turn, tensor))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert not wrong, wrong


# -- point to point ---------------------------------------------------------


def posted(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


def point_to_point(here: Here, fabric: Fabric) -> None:
    ring = fabric.group("ring", (1, 3, 2, 0))
    order = (1, 3, 2, 0)
    place = order.index(here.rank)
    after, before = order[(place + 1) % 4], order[place - 1]
    got = torch.zeros(3)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((3,), float(here.rank)), after, group=ring),
            dist.P2POp(dist.irecv, got, before, group=ring),
        ]
    )
    for work in works:
        work.wait()
    same(got, torch.full((3,), float(before)), "ring")
    if here.rank == 0:
        for sent in [posted(dist.isend(torch.tensor([tag]), dst=2, tag=tag)) for tag in (7, 5, 6)]:
            sent.wait()
    if here.rank == 2:
        for tag in (5, 6, 7):
            number = torch.zeros(1, dtype=torch.int64)
            assert dist.recv(number, src=0, tag=tag) == 0
            assert int(number) == tag
    if here.rank == 1:
        dist.send(torch.tensor([11.0]), dst=3)
    if here.rank == 3:
        something = torch.zeros(1)
        assert dist.recv(something) == 1
        assert float(something) == 11.0


def sending_does_not_wait_for_the_receiver(here: Here, fabric: Fabric) -> None:
    """Pipelines post sends long before the peer posts its receive."""
    group = fabric.group("pipeline", WORLD)
    if here.rank == 0:
        began = time.monotonic()
        work = posted(dist.isend(torch.arange(5.0), dst=1, group=group))
        took = time.monotonic() - began
        dist.send(torch.ones(1), dst=2, group=group)  # only after this does rank 1 receive
        work.wait()
        assert took < 5.0
    if here.rank == 2:
        dist.recv(torch.zeros(1), src=0, group=group)
        dist.send(torch.ones(1), dst=1, group=group)
    if here.rank == 1:
        dist.recv(torch.zeros(1), src=2, group=group)
        got = torch.zeros(5)
        dist.recv(got, src=0, group=group)
        same(got, torch.arange(5.0), "late receive")


def objects(here: Here, fabric: Fabric) -> None:
    gathered: list[object] = [None] * 4
    dist.all_gather_object(gathered, {"rank": here.rank, "pad": "x" * here.rank})
    assert gathered == [{"rank": rank, "pad": "x" * rank} for rank in WORLD]
    listed: list[object] = [("from", here.rank)]
    dist.broadcast_object_list(listed, src=2)
    assert listed == [("from", 2)]
    if here.rank in (1, 3):
        group = fabric.group("pair", (3, 1))
        rows: list[object] | None = [None, None] if here.rank == 1 else None
        dist.gather_object(here.rank * 11, rows, dst=1, group=group)
        assert rows in (None, [33, 11])
        dist.scatter_object_list(mine := [None], ["for 3", "for 1"] if here.rank == 3 else None, src=3, group=group)
        assert mine == [f"for {here.rank}"]
    if here.rank == 0:
        dist.send_object_list([{"a": 1}], dst=3)
    if here.rank == 3:
        received: list[object] = [None]
        dist.recv_object_list(received, src=0)
        assert received == [{"a": 1}]


def barriers(here: Here, fabric: Fabric) -> None:
    if here.rank == 3:
        time.sleep(0.2)
        here.store().set("late one arrived", "yes")
    dist.barrier()
    assert here.store().check(["late one arrived"])
    cast(Any, fabric.world).monitored_barrier(timedelta(seconds=10))


def functional_collectives(here: Here, fabric: Fabric) -> None:
    from torch.distributed import _functional_collectives as functional

    group = fabric.group("functional", WORLD)
    same(functional.all_reduce(torch.ones(2), "sum", group) + 0, torch.full((2,), 4.0), "functional all_reduce")
    gathered = functional.all_gather_tensor(torch.full((1,), float(here.rank)), 0, group) + 0
    same(gathered, torch.arange(4.0), "functional all_gather")
    part = functional.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, group) + 0
    same(part, torch.tensor([4.0 * here.rank]), "functional reduce_scatter")


# -- groups -----------------------------------------------------------------


def groups_follow_torch(here: Here, fabric: Fabric) -> None:
    assert dist.is_initialized() and dist.get_world_size() == 4 and dist.get_rank() == here.rank
    for backend in (None, "gloo", "nccl"):
        group = dist.new_group([2, 0, 3], backend=backend, timeout=timedelta(seconds=30))
        if here.rank == 1:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
            continue
        assert dist.get_process_group_ranks(group) == [0, 2, 3]
        assert dist.get_rank(group) == group.rank() == (0, 2, 3).index(here.rank)
        assert dist.get_world_size(group) == group.size() == 3
        assert dist.get_global_rank(group, 1) == 2 and dist.get_group_rank(group, 3) == 2
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert float(tensor) == 3.0
    first = dist.new_group([0, 1, 2, 3], group_desc="DP")
    second = dist.new_group([0, 1, 2, 3], group_desc="DP")
    assert first is not second and first is fabric.group("DP", WORLD)
    dist.destroy_process_group(second)
    dist.barrier(group=first)


def group_is_the_same_object_and_local(here: Here, fabric: Fabric) -> None:
    """Made in another order on each rank, without waiting for the others."""
    roles = [f"role{index}" for index in range(6)]
    for role in roles[here.rank :] + roles[: here.rank]:
        fabric.group(role, WORLD)
    for role in roles:
        group = fabric.group(role, WORLD)
        assert fabric.group(role, list(WORLD)) is group
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert float(tensor) == 4.0
    held = fabric.group("role1", WORLD)
    fabric.release("role")
    assert fabric.group("role1", WORLD) is not held


# -- blocks -----------------------------------------------------------------


def block_lists(here: Here, fabric: Fabric) -> None:
    group = fabric.group("state", WORLD)
    blocks = [BlockRange(0, 5, 3), BlockRange(5, 9, 0), BlockRange(12, 20, 1), BlockRange(20, 21, 3)]
    flat = values(here.rank, 24, torch.float32)
    fabric.reduce_scatter_blocks(group, flat, blocks)
    total = sum_of(24, WORLD)
    for block in blocks:
        if block.owner == here.rank:
            same(flat[block.start : block.stop], total[block.start : block.stop], block)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        flat = values(here.rank, 24, dtype, salt=1)
        wanted = flat.clone()
        for block in blocks:
            wanted[block.start : block.stop] = values(block.owner, 24, dtype, salt=1)[block.start : block.stop]
        fabric.all_gather_blocks(group, flat, blocks)
        same(flat, wanted, ("all_gather_blocks", dtype))
    bits = torch.tensor([-0.0, float("nan"), float("inf"), -1e-40])
    flat = bits.clone() if here.rank == 2 else torch.ones(4)
    fabric.all_gather_blocks(group, flat, [BlockRange(0, 4, 2)])
    assert torch.equal(flat.view(torch.int32), bits.view(torch.int32)), "bits of the owner"


def sums_in_member_order(here: Here, fabric: Fabric) -> None:
    """Bitwise: a float sum in the group's member order, whatever the size and form."""
    members = (2, 0, 3, 1)
    group = fabric.group("ordered", members)
    for count in (1, 17, 1000, 70_001):
        rows = []
        for rank in members:
            generator = torch.Generator().manual_seed(SEED + rank)
            rows.append(torch.randn(count, generator=generator) * 10.0 ** (rank - 2))
        wanted = rows[0].clone()
        for row in rows[1:]:
            wanted += row
        own = rows[members.index(here.rank)]
        tensor = own.clone()
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, wanted), f"all_reduce of {count} (seed {SEED})"
        flat = own.clone()
        blocks = [BlockRange(0, count // 2, 3), BlockRange(count // 2, count, 0)]
        fabric.reduce_scatter_blocks(group, flat, blocks)
        for block in blocks:
            if block.owner == here.rank:
                part = slice(block.start, block.stop)
                assert torch.equal(flat[part], wanted[part]), f"blocks of {count} (seed {SEED})"


# -- slot space and edits ---------------------------------------------------


def holes_in_the_slot_space(here: Here, fabric: Fabric) -> None:
    """Rank 1 leaves: the default group keeps its size and ranks, collectives run over the living."""
    sub = fabric.group("dp", WORLD)
    living = (0, 2, 3)
    if here.rank == 1:
        return
    edit(here, fabric, living, 2)
    assert fabric.alive == living and dist.get_world_size() == 4 and dist.get_rank() == here.rank
    assert dist.get_process_group_ranks(sub) == [0, 2, 3] and sub.size() == 3
    row = [torch.full((2,), -1.0) for _ in WORLD]
    dist.all_gather(row, torch.full((2,), float(here.rank)))
    same(torch.stack(row)[:, 0], torch.tensor([0.0, -1.0, 2.0, 3.0]), "all_gather leaves the hole")
    flat = torch.full((8,), -1.0)
    dist.all_gather_into_tensor(flat, torch.full((2,), float(here.rank)))
    same(flat.view(4, 2)[:, 1], torch.tensor([0.0, -1.0, 2.0, 3.0]), "all_gather_into_tensor leaves the hole")
    output = torch.zeros(2)
    dist.reduce_scatter_tensor(output, torch.arange(8.0))
    same(output, 3 * torch.arange(8.0).view(4, 2)[here.rank], "reduce_scatter by slot")
    swapped = torch.full((4,), -1.0)
    dist.all_to_all_single(swapped, torch.arange(4.0) + 10 * here.rank)
    same(swapped[[0, 2, 3]], torch.tensor([0.0, 20.0, 30.0]) + here.rank, "all_to_all by slot")
    assert float(swapped[1]) == -1.0
    gathered: list[object] = ["untouched"] * 4
    dist.all_gather_object(gathered, here.rank)
    assert gathered == [0, None, 2, 3]
    rows = [torch.full((1,), -1.0) for _ in WORLD] if here.rank == 3 else None
    dist.gather(torch.tensor([float(here.rank)]), rows, dst=3)
    assert rows is None or [float(row) for row in rows] == [0.0, -1.0, 2.0, 3.0]
    _roots_that_are_gone(here, sub)


def _roots_that_are_gone(here: Here, sub: dist.ProcessGroup) -> None:
    tensor = torch.tensor([float(here.rank)])
    dist.broadcast(tensor, src=1)
    assert float(tensor) == 0.0, "the first living member stands in"
    tensor = torch.tensor([float(here.rank)])
    dist.broadcast(tensor, src=1, group=sub)
    assert float(tensor) == 0.0
    listed: list[object] = [here.rank]
    dist.broadcast_object_list(listed, src=1)
    assert listed == [0]
    try:
        dist.send(torch.ones(1), dst=1)
    except PeerLost as error:
        assert error.rank == 1
    else:
        raise AssertionError("sending to a hole must say who is gone")
    try:
        dist.recv(torch.ones(1), src=1, group=sub)
    except PeerLost as error:
        assert error.rank == 1
    else:
        raise AssertionError("receiving from a dead member must say who is gone")


def edits_keep_every_object(here: Here, fabric: Fabric, again: Callable[[int], Fabric]) -> None:
    """Shrink, replace by a higher incarnation, grow: five edits; who stays keeps every object."""
    roles = ("a", "b")
    kept = {id(fabric.world): fabric.world, **{id(group): group for group in (fabric.group(r, WORLD) for r in roles)}}
    incarnation = 0
    for generation, living in ((2, (0, 1, 2)), (3, WORLD), (4, (1, 2, 3)), (5, (0, 3, 1, 2)), (6, (0, 3))):
        here.exchange(f"round {generation}", True, WORLD)  # who leaves does not break work in flight
        if here.rank not in living:
            fabric.close()
            incarnation += 1
            fabric = again(incarnation)
            kept = {}
            continue
        edit(here, fabric, living, generation)
        assert fabric.generation == generation and fabric.alive == tuple(sorted(living))
        for group in (fabric.world, *(fabric.group(role, WORLD) for role in roles)):
            assert not kept or id(group) in kept
            tensor = torch.tensor([float(here.rank + 1)])
            group.allreduce([tensor]).wait()
            assert float(tensor) == sum(rank + 1 for rank in living), (generation, float(tensor))
    fabric.close()


def old_edits_are_refused(here: Here, fabric: Fabric) -> None:
    known = addresses(here, fabric, WORLD, 1_000)
    try:
        fabric.edit(0, known, 5.0)
    except CommError:
        pass
    else:
        raise AssertionError("an edit must not go back")
    fabric.interrupt(7)
    try:
        fabric.edit(5, known, 5.0)
    except GenerationChanged as error:
        assert error.generation == 7
    else:
        raise AssertionError("generation 7 is frozen: 5 is void")


# -- endings ----------------------------------------------------------------


def interruption_ends_every_kind_of_wait(here: Here, fabric: Fabric) -> None:
    """A collective, a receive and an asynchronous work, each blocked on rank 3, which does not come."""
    groups = {role: fabric.group(role, WORLD) for role in ("collective", "receive", "async")}
    dist.barrier()
    if here.rank == 3:
        here.exchange("all woken", True, WORLD)
        return
    ended: dict[str, str] = {}
    untouched = torch.full((4,), -1.0)

    def blocked(name: str, act: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                act()
                ended[name] = "completed"
            except GenerationChanged as error:
                ended[name] = f"GenerationChanged {error.generation}"

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    work = dist.all_reduce(torch.ones(1), group=groups["async"], async_op=True)
    threads = [
        blocked("collective", lambda: dist.all_reduce(torch.ones(1 << 16), group=groups["collective"])),
        blocked("receive", lambda: dist.recv(untouched, src=3, group=groups["receive"])),
        blocked("async", work.wait),
    ]
    time.sleep(0.2)
    assert 3 in fabric.waiting_for()
    fabric.interrupt(2)
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert ended == dict.fromkeys(groups, "GenerationChanged 2"), ended
    try:
        dist.barrier()
    except GenerationChanged:
        pass
    else:
        raise AssertionError("work begun after the interruption must fail")
    here.exchange("all woken", True, WORLD)
    assert bool((untouched == -1.0).all())


def alone(fabric: Fabric) -> None:
    """Rank 2 of 4 before its first edit (not run by :data:`CHECKS`)."""
    assert (dist.get_rank(), dist.get_world_size(), fabric.alive, fabric.generation) == (2, 4, (2,), 0)
    for group in (None, dist.new_group([0, 2]), dist.new_group([3, 2, 1], sort_ranks=False)):
        nominal = list(WORLD) if group is None else dist.get_process_group_ranks(group)
        assert dist.get_world_size(group) == len(nominal) and dist.get_rank(group) == nominal.index(2)
        tensor = torch.tensor([5.0])
        dist.all_reduce(tensor, group=group)
        dist.broadcast(tensor, src=nominal[0], group=group)
        dist.barrier(group=group)
        assert float(tensor) == 5.0
        row = [torch.zeros(1) for _ in nominal]
        dist.all_gather(row, tensor, group=group)
        assert [float(value) for value in row] == [5.0 if rank == 2 else 0.0 for rank in nominal]


def living_ranks_table() -> None:
    """Dead members can still be named, beyond the living."""
    table = LivingRanks((4, 2, 7, 1), (2, 1))
    assert list(table) == [2, 1] and len(table) == 2 and table[1] == 1
    assert 7 in table and 9 not in table and table[4] == 2 and table[7] == 4


CHECKS: tuple[Check, ...] = (
    reductions_of_every_type,
    averages_and_bit_operations,
    reduce_and_reduce_scatter,
    movement_of_every_type,
    gather_and_scatter,
    all_to_all_in_both_forms,
    awkward_shapes,
    coalescing,
    many_works_in_flight,
    several_groups_from_several_threads,
    point_to_point,
    sending_does_not_wait_for_the_receiver,
    objects,
    barriers,
    functional_collectives,
    groups_follow_torch,
    group_is_the_same_object_and_local,
    block_lists,
    holes_in_the_slot_space,
    old_edits_are_refused,
    interruption_ends_every_kind_of_wait,
)

REPLACING_CHECKS = (edits_keep_every_object,)
"""Take a third argument: a function from an incarnation to a new fabric of this process."""

ORDERED_CHECKS: tuple[Check, ...] = (sums_in_member_order,)
"""For fabrics that promise sums in member order; gloo's order depends on size and algorithm."""
