"""Groups, blocks, edits and endings on any fabric, as functions run by each of four ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import CommError, GenerationChanged, PeerLost
from megatron.elastic.comm.fabric import BlockRange, Fabric
from megatron.elastic.comm.registry import Living, LivingRanks
from megatron.elastic.control.suspicion import sinks
from tests.unit.comm.fabric_checks import SEED, WORLD, Check, addresses, edit, same, sum_of, values
from tools.bench._common import Here

# -- groups ------------------------------------------------------------------


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


# -- blocks ------------------------------------------------------------------


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


def block_lists_in_the_background(here: Here, fabric: Fabric) -> None:
    """A begun collective goes on while the caller does other things; no member waits for another at the call."""
    group, count = fabric.group("state", WORLD), 5000
    starts = [count * part // 4 for part in range(5)]
    blocks = [BlockRange(*ends, owner) for owner, ends in enumerate(pairwise(starts))]
    flats = [values(here.rank, count, torch.float32, salt=salt) for salt in range(3)]
    begun = [fabric.begin_reduce_scatter_blocks(group, flat, blocks) for flat in flats[:2]]
    if here.rank == 0:
        time.sleep(0.2)  # the others are through with their calls long before it begins the last one
    begun.append(fabric.begin_all_gather_blocks(group, flats[2], blocks))
    if here.rank == 1:
        time.sleep(0.05)
        assert fabric.waiting_for() == (), "what no thread waits for is no wait of the process"
    own = slice(starts[here.rank], starts[here.rank + 1])
    for salt, work in enumerate(begun):
        work.wait()
        assert work.is_completed()
        if salt < 2:
            total = sum_of(count, WORLD, salt=salt)
            same(flats[salt][own], total[own], salt)
    for block in blocks:
        part = slice(block.start, block.stop)
        same(flats[2][part], values(block.owner, count, torch.float32, salt=2)[part], block)


def what_is_there_already_may_be_read_during_a_gather(here: Here, fabric: Fabric) -> None:
    """If the fabric says so: members that have the result see nothing else while they wait for one that lacks it."""
    group, count = fabric.group("state", WORLD), 200_000
    result = values(7, count, torch.float32)
    blocks = [BlockRange(*ends, owner) for owner, ends in enumerate(pairwise(count * part // 3 for part in range(4)))]
    flat = result.clone() if here.rank != 3 else torch.zeros(count)
    if here.rank == 3:
        here.exchange("looked", True, WORLD)  # it comes once the others have looked, in the middle of their gather
    work = fabric.begin_all_gather_blocks(group, flat, blocks)
    if here.rank != 3:
        for _ in range(20):
            assert torch.equal(flat, result) or not fabric.writes_values_only()
            time.sleep(0.002)
        here.exchange("looked", True, WORLD)
    work.wait()
    same(flat, result, "the gather")


def interruption_ends_what_goes_on_in_the_background(here: Here, fabric: Fabric) -> None:
    """After the edit that follows, the memory belongs to its owner again."""
    flat, blocks = torch.ones(100_000), [BlockRange(0, 50_000, 0), BlockRange(50_000, 100_000, 1)]
    group, work = fabric.group("state", WORLD), None
    if here.rank != 3:
        work = fabric.begin_reduce_scatter_blocks(group, flat, blocks)
    here.exchange("begun", here.rank, WORLD)
    fabric.interrupt(2)
    if work is not None:
        owns = any(block.owner == here.rank for block in blocks)  # other members need nothing of rank 3
        with pytest.raises(GenerationChanged) if owns else suppress(GenerationChanged):
            work.wait()
    edit(here, fabric, WORLD, 2)
    flat.fill_(7.0)
    total = torch.ones(100_000)
    fabric.reduce_scatter_blocks(group, total, blocks)
    time.sleep(0.05)
    assert bool((flat == 7.0).all()), "written after the edit"
    own = slice(50_000 * here.rank, 50_000 * (here.rank + 1))
    assert here.rank > 1 or bool((total[own] == 4.0).all())


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


def works_may_be_let_go(here: Here, fabric: Fabric) -> None:
    """A message whose work nobody holds keeps its tensor until it has ended, well or not."""
    group = fabric.group("let go", WORLD)
    count = 1 << 20  # more than a link buffers
    for turn in range(4):
        if here.rank == 0:
            dist.isend(torch.full((count,), float(turn)), dst=1, group=group)
            overwrite = [torch.full((count,), -1.0) for _ in range(4)]  # takes the memory if it is free
            assert overwrite
        if here.rank == 1:
            time.sleep(0.05)
            got = torch.zeros(count)
            dist.recv(got, src=0, group=group)
            assert bool((got == turn).all()), f"turn {turn}: {got}"
        if here.rank == 2:
            dist.irecv(torch.zeros(count), src=3, group=group)
            others = [torch.full((count,), 7.0) for _ in range(4)]
            dist.barrier(group=group)
            assert all(bool((other == 7.0).all()) for other in others), "written where nobody asked for it any more"
            continue
        if here.rank == 3:
            dist.send(torch.full((count,), 3.0), dst=2, group=group)
        dist.barrier(group=group)


# -- slot space and edits ----------------------------------------------------


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


# -- endings -----------------------------------------------------------------


def who_waits_for_whom_is_published(here: Here, fabric: Fabric) -> None:
    """Rank 3 does not come to an operation: from what the others publish, it is the sink, whatever the operation."""
    calls: dict[str, Callable[[dist.ProcessGroup], object]] = {
        "all_reduce": lambda group: dist.all_reduce(torch.ones(7), group=group),
        "large all_reduce": lambda group: dist.all_reduce(torch.ones(1 << 18), group=group),
        "all_gather": lambda group: dist.all_gather_into_tensor(torch.zeros(4 << 16), torch.ones(1 << 16), group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter_tensor(torch.zeros(9), torch.ones(36), group=group),
        "all_to_all": lambda group: dist.all_to_all_single(torch.zeros(4), torch.ones(4), group=group),
        "barrier": lambda group: dist.barrier(group=group),
        "chain of receives": lambda group: dist.recv(torch.zeros(1), src=here.rank + 1, group=group),
    }
    groups = {name: fabric.group(name, WORLD) for name in calls}
    dist.barrier()
    for name, call in calls.items():
        if here.rank == 3:
            table = here.exchange(f"{name} waits", [], WORLD)
            assert sinks({int(rank): waiting for rank, waiting in table.items()})[:1] == (3,), (name, table)
            call(groups[name]) if name != "chain of receives" else dist.send(torch.ones(1), dst=2, group=groups[name])
            continue
        thread = threading.Thread(target=call, args=(groups[name],))
        thread.start()
        deadline = time.monotonic() + 10
        while not fabric.waiting_for() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)  # what is waited for first may have come meanwhile
        table = here.exchange(f"{name} waits", list(fabric.waiting_for()), WORLD)
        assert sinks({int(rank): waiting for rank, waiting in table.items()})[:1] == (3,), (name, table)
        if name == "chain of receives" and here.rank > 0:
            thread.join(20)
            dist.send(torch.ones(1), dst=here.rank - 1, group=groups[name])
        thread.join(20)
        assert not thread.is_alive(), name
    assert fabric.waiting_for() == ()


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
    _await(lambda: 3 in fabric.waiting_for())
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


def interruption_ends_what_is_half_way(here: Here, fabric: Fabric) -> None:
    """Ranks 1 and 3 are stopped with a message on its way to them: first its sender is interrupted, then its receiver.

    The sender's connections break under the message, so that of what rank 1 and 3 have of it the rest never comes.
    """
    count = 1 << 24  # much more than a link buffers
    pids = here.exchange("pids", os.getpid(), WORLD)
    tensor = torch.full((count,), float(here.rank))
    pair = fabric.group("pair", (0, 1) if here.rank < 2 else (2, 3))
    dist.barrier(group=pair)
    begin = {
        0: lambda: dist.isend(tensor, dst=1, group=pair),
        1: lambda: dist.irecv(tensor, src=0, group=pair),
        2: lambda: dist.broadcast(tensor, src=2, group=pair, async_op=True),
        3: lambda: dist.broadcast(tensor, src=2, group=pair, async_op=True),
    }[here.rank]
    other = here.rank ^ 1
    if here.rank in (0, 2):
        _await(lambda: _is_stopped(pids[other]))
        ended = _ended_by_an_interruption(fabric, begin())
        os.kill(pids[other], signal.SIGCONT)
    else:
        work = begin()
        time.sleep(0.1)  # a collective tells the other that it is here in a thread of its own
        os.kill(os.getpid(), signal.SIGSTOP)
        ended = _ended_by_an_interruption(fabric, work)
    assert ended == "GenerationChanged 2", (here.rank, ended)
    here.exchange("all woken", True, WORLD)


def _ended_by_an_interruption(fabric: Fabric, work: dist.Work | None) -> str:
    assert work is not None
    ended = ["not ended"]

    def run() -> None:
        try:
            work.wait()
            ended[0] = "completed"
        except CommError as error:
            ended[0] = f"{type(error).__name__} {getattr(error, 'generation', error)}"

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    _await(lambda: bool(fabric.waiting_for()) or not thread.is_alive())
    time.sleep(0.2)  # as much of it as can be on its way is
    fabric.interrupt(2)
    thread.join(timeout=10)  # the wait's own time-out is 20 s
    return ended[0]


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _await(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


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
    """Dead members can still be named, beyond the living; the table follows who is living."""
    living = Living(frozenset((1, 2)))
    table = LivingRanks((4, 2, 7, 1), living)
    assert list(table) == [2, 1] and len(table) == 2 and table[1] == 1
    assert 7 in table and 9 not in table and table[4] == 2 and table[7] == 4
    assert table == {2: 0, 1: 1} and dict(table) == {2: 0, 1: 1}
    living.ranks = frozenset((1, 4, 9))
    assert list(table.items()) == [(4, 0), (1, 1)] and table[2] == 3 and table.get(9) is None


CHECKS: tuple[Check, ...] = (
    groups_follow_torch,
    group_is_the_same_object_and_local,
    block_lists,
    block_lists_in_the_background,
    what_is_there_already_may_be_read_during_a_gather,
    interruption_ends_what_goes_on_in_the_background,
    holes_in_the_slot_space,
    old_edits_are_refused,
    who_waits_for_whom_is_published,
    interruption_ends_every_kind_of_wait,
    interruption_ends_what_is_half_way,
)

REPLACING_CHECKS = (edits_keep_every_object,)
"""Take a third argument: a function from an incarnation to a new fabric of this process."""

ORDERED_CHECKS: tuple[Check, ...] = (sums_in_member_order, works_may_be_let_go)
"""For native fabrics: gloo's order of summation depends on size and algorithm, and its works are to be waited for."""
