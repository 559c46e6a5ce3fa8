"""The collective surface of torch.distributed on any fabric, as functions run by each of four ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch._dynamo  # what functional collectives load when first used: here, once, and not in every forked rank
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from megatron.elastic.comm.errors import BadMessage, CommError, CommTimeout
from megatron.elastic.comm.exchange import gather_messages
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.comm.messages import receive, send
from tests.unit.comm.fabric_checks import FLOATS, INTEGERS, WORLD, Check, same, sum_of, values
from tools.bench._common import Here


def posted(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


# -- reductions --------------------------------------------------------------


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


def every_reduction_in_every_form(here: Here, fabric: Fabric) -> None:
    """reduce, reduce_scatter (list and tensor) and all_reduce agree for every operation, on a sub-group."""
    members = (3, 0, 2)
    if here.rank not in members:
        return
    group, place = fabric.group("forms", members), members.index(here.rank)
    folds: dict[dist.ReduceOp.RedOpType, Callable[[torch.Tensor], torch.Tensor]] = {
        dist.ReduceOp.SUM: lambda rows: rows.sum(0),
        dist.ReduceOp.AVG: lambda rows: rows.sum(0) / 3,
        dist.ReduceOp.MIN: lambda rows: rows.amin(0),
        dist.ReduceOp.MAX: lambda rows: rows.amax(0),
        dist.ReduceOp.PRODUCT: lambda rows: rows.prod(0),
        dist.ReduceOp.BAND: lambda rows: rows[0] & rows[1] & rows[2],
        dist.ReduceOp.BOR: lambda rows: rows[0] | rows[1] | rows[2],
        dist.ReduceOp.BXOR: lambda rows: rows[0] ^ rows[1] ^ rows[2],
    }
    bits = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
    for op, fold in folds.items():
        for dtype in INTEGERS if op in bits else (torch.float32, torch.float64):
            wanted = fold(torch.stack([values(rank, 6, dtype) for rank in members]))
            own = values(here.rank, 6, dtype)
            dist.all_reduce(everywhere := own.clone(), op, group=group)
            same(everywhere, wanted, ("all_reduce", op, dtype))
            dist.reduce(there := own.clone(), dst=0, op=op, group=group)
            if here.rank == 0:
                same(there, wanted, ("reduce", op, dtype))
            dist.reduce_scatter_tensor(part := torch.zeros(2, dtype=dtype), own, op, group=group)
            same(part, wanted[2 * place : 2 * place + 2], ("reduce_scatter_tensor", op, dtype))
            dist.reduce_scatter(part := torch.zeros(2, dtype=dtype), list(own.split(2)), op, group=group)
            same(part, wanted[2 * place : 2 * place + 2], ("reduce_scatter", op, dtype))


def sums_of_products(here: Here, fabric: Fabric) -> None:
    """``PREMUL_SUM`` in every form, by a number and by a tensor; but for an all-reduce, inputs stay as they are."""
    members = (3, 0, 2)
    if here.rank not in members:
        return
    group, place = fabric.group("products", members), members.index(here.rank)
    for factor in (0.25, torch.tensor([-1.5])):
        op: Any = dist.ReduceOp.PREMUL_SUM(cast(Any, factor))  # type: ignore[operator]
        for dtype in FLOATS:
            wanted = (torch.stack([values(rank, 6, dtype) for rank in members]) * factor).sum(0).to(dtype)
            own = values(here.rank, 6, dtype)
            dist.all_reduce(everywhere := own.clone(), op, group=group)
            same(everywhere, wanted, ("all_reduce", factor, dtype))
            posted(dist.all_reduce(strided := own.repeat(2, 1).T[:, 0], op, group=group, async_op=True)).wait()
            same(strided, wanted, ("all_reduce of every other element", factor, dtype))
            dist.reduce(there := own.clone(), dst=0, op=op, group=group)
            same(there, wanted if here.rank == 0 else own, ("reduce", factor, dtype))
            dist.reduce_scatter_tensor(part := torch.zeros(2, dtype=dtype), own, op, group=group)
            same(part, wanted[2 * place : 2 * place + 2], ("reduce_scatter_tensor", factor, dtype))
            dist.reduce_scatter(part := torch.zeros(2, dtype=dtype), list(own.split(2)), op, group=group)
            same(part, wanted[2 * place : 2 * place + 2], ("reduce_scatter", factor, dtype))
            same(own, values(here.rank, 6, dtype), "what was sent")
        with pytest.raises(CommError, match="floating-point tensors only"):
            dist.all_reduce(values(here.rank, 6, torch.int32), op, group=group)


# -- migration ----------------------------------------------------------------


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
        if hasattr(dist, "gather_single"):  # torch 2.14 and later
            whole = torch.zeros(15, dtype=torch.int64) if here.rank == 3 else None
            dist.gather_single(own, whole, dst=3, group=group)
            if whole is not None:
                same(whole, torch.cat([values(rank, 5, torch.int64) for rank in members]), "gather_single")
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


def empty_and_strided_everywhere(here: Here, fabric: Fabric) -> None:
    for count in (0, 6):
        wide = torch.zeros(count, 2)
        strided = wide[:, 1]
        strided.copy_(values(here.rank, count, torch.float32))
        rows = [torch.zeros(count, 2)[:, 0] for _ in WORLD]
        dist.all_gather(rows, strided)
        for rank in WORLD:
            same(rows[rank].contiguous(), values(rank, count, torch.float32), ("all_gather", count))
        dist.reduce(strided, dst=1)
        if here.rank == 1:
            same(strided.contiguous(), sum_of(count, WORLD), ("reduce", count))
        table = torch.stack([values(here.rank, count, torch.float32, salt=peer) for peer in WORLD]).t()
        swapped = torch.zeros(count, 4).t()
        dist.all_to_all_single(swapped, table.t().contiguous())
        for peer in WORLD:
            same(swapped[peer].contiguous(), values(peer, count, torch.float32, salt=here.rank), ("all_to_all", count))
        got = torch.zeros(count, 3)[:, 2]
        after, before = (here.rank + 1) % 4, (here.rank - 1) % 4
        sending = values(here.rank, 2 * count, torch.float32)[::2]
        ring = [dist.P2POp(dist.isend, sending, after), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        same(got.contiguous(), values(before, 2 * count, torch.float32)[::2].contiguous(), ("p2p", count))
        assert bool((wide[:, 0] == 0).all()), "its neighbours are untouched"


# -- batches, works, threads -------------------------------------------------


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
    coalesced_messages(here, fabric)


def coalesced_messages(here: Here, fabric: Fabric) -> None:
    """Sends and receives between the start and the end of a batch: its work ends when they have."""
    count, after, before = 300_000, (here.rank + 1) % len(WORLD), (here.rank - 1) % len(WORLD)
    got = torch.zeros(count)
    with dist._coalescing_manager(fabric.world, torch.device("cpu"), async_ops=True) as manager:
        dist.isend(values(here.rank, count, torch.float32), after)
        dist.irecv(got, before)
    manager.wait()
    same(got, values(before, count, torch.float32), "coalesced messages")


def coalesced_calls_of_c10d(here: Here, fabric: Fabric) -> None:
    """The forms that torch's own code calls on the group: several tensors, of two types, in one call."""
    group = cast(Any, fabric.group("coalesced", WORLD))
    singles = [
        values(here.rank, 5, torch.float32),
        values(here.rank, 3, torch.int64),
        values(here.rank, 4, torch.float32),
    ]
    group.allreduce_coalesced(tensors := [one.clone() for one in singles], dist.AllreduceCoalescedOptions()).wait()
    for got, one, count in zip(tensors, singles, (5, 3, 4), strict=True):
        same(got, torch.stack([values(rank, count, one.dtype) for rank in WORLD]).sum(0).to(one.dtype), "allreduce")
    outputs = [torch.zeros(20), torch.zeros(12, dtype=torch.int64)]
    group.allgather_into_tensor_coalesced(outputs, singles[:2]).wait()
    for output, one in zip(outputs, singles, strict=False):
        wanted = torch.cat([values(rank, one.numel(), one.dtype) for rank in WORLD])
        same(output, wanted, "allgather_into_tensor_coalesced")
    parts = [torch.zeros(2), torch.zeros(1)]
    flats = [values(here.rank, 8, torch.float32, 1), values(here.rank, 4, torch.float32, 2)]
    group.reduce_scatter_tensor_coalesced(parts, flats).wait()
    same(parts[0], sum_of(8, WORLD, 1)[2 * here.rank : 2 * here.rank + 2], "reduce_scatter_tensor_coalesced")
    same(parts[1], sum_of(4, WORLD, 2)[here.rank : here.rank + 1], "reduce_scatter_tensor_coalesced")


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


# -- point to point ----------------------------------------------------------


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


def receiving_from_whoever_sends(here: Here, fabric: Fabric) -> None:
    """Every sender is received from once, whatever the order, and by tag."""
    group = fabric.group("anybody", WORLD)
    if here.rank == 2:
        for tag in (4, 9):
            seen: dict[int, float] = {}
            for _ in range(3):
                number = torch.zeros(1)
                source = dist.recv(number, group=group, tag=tag)
                seen[source] = float(number)
            assert seen == {rank: float(10 * tag + rank) for rank in (0, 1, 3)}, seen
    else:
        works = [dist.isend(torch.tensor([float(10 * tag + here.rank)]), dst=2, group=group, tag=tag) for tag in (9, 4)]
        for work in works:
            posted(work).wait()


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


def messages(here: Here, fabric: Fabric) -> None:
    mine = ("short", "x" * (20_000 * here.rank))  # of all but one rank more than the first collective carries
    assert gather_messages(fabric, tuple[str, ...], mine) == {r: ("short", "x" * (20_000 * r)) for r in WORLD}
    if here.rank == 0:
        send(fabric, 3, {(1, 2, 3): "said"})
    if here.rank == 3:
        heard: dict[tuple[int, int, int], str] = receive(fabric, 0, dict[tuple[int, int, int], str])
        assert heard == {(1, 2, 3): "said"}
    with pytest.raises(BadMessage, match="rank 2 sent not a tuple"):
        gather_messages(fabric, tuple[str, ...], 7 if here.rank == 2 else ("fine",))


def barriers(here: Here, fabric: Fabric) -> None:
    if here.rank == 3:
        time.sleep(0.2)
        here.store().set("late one arrived", "yes")
    dist.barrier()
    assert here.store().check(["late one arrived"])
    cast(Any, fabric.world).monitored_barrier(timedelta(seconds=10))


def a_monitored_barrier_names_who_is_missing(here: Here, fabric: Fabric) -> None:
    group = cast(Any, fabric.group("watched", WORLD))
    if here.rank != 3:
        try:
            group.monitored_barrier(timedelta(seconds=0.5), wait_all_ranks=True)
        except CommError as error:
            if here.rank == 0:
                assert isinstance(error, CommTimeout) and 3 in error.waiting_for, error
        else:
            raise AssertionError("rank 3 did not come")
    here.exchange("watched", True, WORLD)


def functional_collectives(here: Here, fabric: Fabric) -> None:
    group = fabric.group("functional", WORLD)
    same(functional.all_reduce(torch.ones(2), "sum", group) + 0, torch.full((2,), 4.0), "functional all_reduce")
    gathered = functional.all_gather_tensor(torch.full((1,), float(here.rank)), 0, group) + 0
    same(gathered, torch.arange(4.0), "functional all_gather")
    part = functional.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, group) + 0
    same(part, torch.tensor([4.0 * here.rank]), "functional reduce_scatter")


CHECKS: tuple[Check, ...] = (
    reductions_of_every_type,
    averages_and_bit_operations,
    every_reduction_in_every_form,
    sums_of_products,
    reduce_and_reduce_scatter,
    movement_of_every_type,
    gather_and_scatter,
    messages,
    all_to_all_in_both_forms,
    awkward_shapes,
    empty_and_strided_everywhere,
    coalescing,
    coalesced_calls_of_c10d,
    many_works_in_flight,
    several_groups_from_several_threads,
    point_to_point,
    receiving_from_whoever_sends,
    sending_does_not_wait_for_the_receiver,
    objects,
    barriers,
    a_monitored_barrier_names_who_is_missing,
    functional_collectives,
)
