"""Device tensors through a vendor's library, with the CPU as the device and a library that really moves bytes.

``moving_nccl.c`` is compiled with NCCL's names and prototypes and loaded by the
same code that loads NCCL; several processes, real kills.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.elastic.comm.backend import install
from megatron.elastic.comm.errors import CommError, GenerationChanged
from megatron.elastic.comm.fabric import BlockRange
from megatron.elastic.comm.vendor.group import DeviceGroup, Enqueued
from megatron.elastic.comm.vendor.library import RESPAWN_EXIT_CODE, VendorError
from megatron.elastic.comm.vendor.nccl import NcclCommunicator, NcclLibrary
from megatron.elastic.comm.vendor.selection import Vendor, vendor_of
from megatron.elastic.comm.vendor.through_host import ThroughHost
from megatron.elastic.config import ConfigError
from megatron.elastic.platform.base import Platform
from megatron.elastic.platform.cpu import CpuPlatform
from megatron.elastic.platform.cuda import CudaPlatform
from megatron.elastic.platform.npu import NpuPlatform
from tests.standin.vendor import VERSIONS, build_nccl
from tests.unit.comm.fabric_checks import edit, same
from tools.bench._common import Here, Ranks

device = pytest.importorskip("megatron.elastic.comm.vendor.fabric")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("vendor")
    return functools.partial(build_nccl, folder, on_streams=False)


def make(here: Here, path: Path, incarnation: int = 0, device_name: str | None = None, limit: float = 30.0):  # type: ignore[no-untyped-def]
    os.environ["STANDIN_DIR"] = str(path.parent)
    opened = NcclLibrary(path)
    name = device_name or f"gpu{here.rank}"
    vendor = Vendor(torch.device("cpu"), name, lambda rank: NcclCommunicator(opened, rank, limit, start_limit=90.0))
    fabric = vendor.fabric(
        here.rank,
        4,
        incarnation,
        run_id=f"device{here.port}",
        secret=b"device",
        timeout=30.0,
    )
    install(fabric)
    return fabric


def everything(rank: int, living: tuple[int, ...], group: dist.ProcessGroup, fabric) -> None:  # type: ignore[no-untyped-def]  # noqa: PLR0915 - one after the other
    """Every operation of the surface on device tensors, checked."""
    place, size, total = living.index(rank), len(living), float(sum(one + 1 for one in living))
    for count in (1, 300_000):
        tensor = torch.full((count,), float(rank + 1))
        dist.all_reduce(tensor, group=group)
        same(tensor, torch.full((count,), total), "all_reduce")
        tensor = torch.full((count,), float(rank + 1))
        dist.broadcast(tensor, src=living[-1], group=group)
        same(tensor, torch.full((count,), float(living[-1] + 1)), "broadcast")
    largest = torch.tensor([rank, 7])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    same(largest, torch.tensor([living[-1], 7]), "max of integers")
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, dist.ReduceOp.BOR, group=group)  # the library has no bit operations: staged
    assert int(bits) == sum(1 << one for one in living)
    rows = [torch.zeros(3) for _ in living]
    dist.all_gather(rows, torch.full((3,), float(rank)), group=group)
    same(torch.cat(rows), torch.tensor(living).float().repeat_interleave(3), "all_gather")
    flat = torch.zeros(size, 2)
    dist.all_gather_into_tensor(flat, torch.full((2,), float(rank)), group=group)
    same(flat[:, 1].contiguous(), torch.tensor(living).float(), "all_gather_into_tensor")
    source = torch.arange(float(2 * size))
    part = torch.zeros(2)
    dist.reduce_scatter_tensor(part, source, group=group)
    same(part, size * torch.arange(float(2 * size))[2 * place : 2 * place + 2], "reduce_scatter_tensor")
    same(source, torch.arange(float(2 * size)), "its input is left alone")
    dist.reduce_scatter(part, [torch.full((2,), float(one)) for one in range(size)], group=group)
    same(part, torch.full((2,), float(size * place)), "reduce_scatter")
    swapped = torch.zeros(size)
    dist.all_to_all_single(swapped, torch.arange(float(size)) + 10 * rank, group=group)
    same(swapped, torch.tensor([10.0 * one + place for one in living]), "all_to_all_single")
    strided = torch.zeros(3, 2)[:, 0] + rank
    dist.all_reduce(strided, group=group)
    same(strided, torch.full((3,), total - size), "strided")
    if size > 1:
        got = torch.zeros(70_000)
        after, before = living[(place + 1) % size], living[place - 1]
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.full((70_000,), float(rank)), after, group=group, tag=1),
                dist.P2POp(dist.irecv, got, before, group=group, tag=1),
            ]
        ):
            work.wait()
        same(got, torch.full((70_000,), float(before)), "ring over host links")
        if place == 0:
            dist.send(torch.full((70_000,), 5.0), dst=living[1], group=group)
        elif place == 1:
            dist.recv(got, src=living[0], group=group)
            same(got, torch.full((70_000,), 5.0), "send and recv")
    flat = torch.full((8,), float(rank + 1))
    blocks = [BlockRange(0, 3, living[-1]), BlockRange(3, 8, living[0])]
    fabric.reduce_scatter_blocks(group, flat, blocks)
    for block in blocks:
        if block.owner == rank:
            same(flat[block.start : block.stop], torch.full((block.stop - block.start,), total), block)
    fabric.all_gather_blocks(group, flat, blocks)
    same(flat, torch.full((8,), total), "blocks")
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank}, group=group)
    assert gathered == [{"rank": one} for one in living]
    dist.barrier(group=group)


def exchange(rank: int, peer: int, group: dist.ProcessGroup, count: int, tag: int, how: str) -> None:
    """Both members send, then receive, more than the library or a link takes without the receiver."""
    out, got = torch.full((count,), float(rank)), torch.zeros(count, 2)[:, 0]
    if how == "batch":
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, out, peer, group, tag), dist.P2POp(dist.irecv, got, peer, group, tag)]
        ):
            work.wait()
    else:
        with dist._coalescing_manager(group, out.device, async_ops=True) as manager:
            dist.isend(out, peer, group, tag)
            dist.irecv(got, peer, group, tag)
        manager.wait()
    same(got.contiguous(), torch.full((count,), float(peer)), (how, count, tag))


def both_ways(here: Here, path: Path) -> None:
    fabric = make(here, path)
    edit(here, fabric, range(2), 1)
    group = fabric.group("pp", range(2))
    for how in ("batch", "manager"):
        for tag in (0, 1):  # through the library, and staged over host links
            for count in (3, 1_500_000):
                dist.all_reduce(torch.ones(1), group=group)
                assert fabric.settled(group)
                exchange(here.rank, 1 - here.rank, group, count, tag, how)
    fabric.close()


def test_sends_and_receives_of_a_batch_begin_together(library: Callable[[str], Path]) -> None:
    with Ranks(2, functools.partial(both_ways, path=library("full")), seconds=60) as ranks:
        ranks.results(range(2))


def two_of_three(here: Here, path: Path) -> None:
    """No operation of the group came before, for which the third member would have met the others."""
    fabric = make(here, path)
    edit(here, fabric, range(3), 1)
    group = fabric.group("pp", range(3))
    if here.rank < 2:
        exchange(here.rank, 1 - here.rank, group, 70_000, 0, "batch")
    here.exchange("done", True, range(3))  # else the third may be gone before the others have opened their links to it
    fabric.close()


def test_a_message_concerns_its_two_members_alone(library: Callable[[str], Path]) -> None:
    with Ranks(3, functools.partial(two_of_three, path=library("full")), seconds=60) as ranks:
        ranks.results(range(3))


def posted_early(here: Here, path: Path) -> None:
    """Both members post a receive, then send more than a link takes without a receiver, then wait."""
    fabric = make(here, path)
    edit(here, fabric, range(2), 1)
    group, count = fabric.group("pp", range(2)), 1_500_000
    got = torch.zeros(count, 2)[:, 0]
    arriving = dist.irecv(got, 1 - here.rank, group, tag=5)
    out = torch.full((count,), float(here.rank))
    leaving = dist.isend(out, 1 - here.rank, group, tag=5)
    out.fill_(-1.0)
    assert arriving is not None and leaving is not None
    for work in (arriving, leaving, arriving):
        work.wait()
    same(got.contiguous(), torch.full((count,), float(1 - here.rank)), "posted early")
    fabric.close()


def test_a_message_over_host_links_is_waited_for_only_where_it_is_waited_for(library: Callable[[str], Path]) -> None:
    with Ranks(2, functools.partial(posted_early, path=library("full")), seconds=60) as ranks:
        ranks.results(range(2))


def through_edits(here: Here, path: Path, incarnation: int) -> list[str]:
    """All four; rank 1 is killed; three go on; it comes back."""
    fabric = make(here, path, incarnation)
    dp = fabric.group("dp", range(4))
    pair = fabric.group("pair", (0, 2)) if here.rank in (0, 2) else None
    if incarnation == 0:
        edit(here, fabric, range(4), 1)
        everything(here.rank, (0, 1, 2, 3), dp, fabric)
        dist.all_reduce(whole := torch.ones(2))  # the slot space
        same(whole, torch.full((2,), 4.0), "world")
        if pair is not None:
            everything(here.rank, (0, 2), pair, fabric)
        here.tell("ready")
        if here.rank == 1:
            here.ask()  # killed here
        held_up(here, fabric, dp, [0, 2, 3], generation=1, dies=1)
        edit(here, fabric, (0, 2, 3), 2)
        everything(here.rank, (0, 2, 3), dp, fabric)
        row = torch.full((4,), -1.0)
        dist.all_gather_into_tensor(row, torch.tensor([float(here.rank)]))
        same(row, torch.tensor([0.0, -1.0, 2.0, 3.0]), "the hole is left alone")
        if pair is not None:
            everything(here.rank, (0, 2), pair, fabric)
    edit(here, fabric, range(4), 3)
    everything(here.rank, (0, 1, 2, 3), dp, fabric)
    here.exchange("done", True, range(4))
    fabric.close()
    return [change for name, change in fabric.edits if name.startswith(("dp", "pair"))]


CHANGES = {
    "full": {0: ["started", "started", "shrunk", "kept", "grown"], 3: ["started", "shrunk", "grown"]},
    "shrinks": {0: ["started", "started", "started", "kept", "rebuilt"], 3: ["started", "started", "rebuilt"]},
    "basic": {0: ["started", "started", "started", "kept", "rebuilt"], 3: ["started", "started", "rebuilt"]},
}
"""The end of the communicators of "dp" and "pair". Without revoke, operations in flight are aborted for good."""


@pytest.mark.parametrize("version", VERSIONS)
def test_collectives_and_edits_through_the_library(version: str, library: Callable[[str], Path]) -> None:
    path = library(version)
    with Ranks(4, functools.partial(through_edits, path=path, incarnation=0), seconds=120) as ranks:
        for rank in range(4):
            assert ranks.hear(rank) == "ready"
        ranks.kill(1)
        ranks.start(1, functools.partial(through_edits, path=path, incarnation=1))
        results = ranks.results(range(4))
    assert (results[0], results[2], results[3]) == (CHANGES[version][0], CHANGES[version][0], CHANGES[version][3])
    assert results[1] == ["joined"]


Script = list[tuple[tuple[int, ...], int | None]]
"""By generation, from the first: its members, and the one that dies while they connect."""
ALL, REST = (0, 1, 2, 3), (0, 2, 3)
DYING: dict[str, tuple[str, Script, list[str]]] = {
    "ncclCommInitRank": ("full", [(ALL, 1), (REST, None), (ALL, None)], ["started", "grown"]),
    "another start": ("basic", [(ALL, 1), (REST, None), (ALL, None)], ["started", "rebuilt"]),
    "ncclCommShrink": ("full", [(ALL, None), (REST, 3), ((0, 2), None)], ["started", "started"]),
    "ncclCommGrow": ("full", [(ALL, None), (REST, None), (ALL, 1), (REST, None)], ["started", "shrunk"]),
}
"""The place where a rank dies → the library's version, the script, and the first changes of rank 0's communicator.

The one after a growth that did not end is left out: it depends on who had begun to grow when the generation was frozen.
"""


def connecting(here: Here, path: Path, script: Script, first: int = 1) -> list[str]:
    """Go through ``script`` from generation ``first`` on, to the end or to the first one without this rank."""
    fabric = make(here, path, first)
    group = fabric.group("dp", ALL)
    for generation, (members, dies) in enumerate(script[first - 1 :], first):
        if here.rank not in members:
            return []
        if dies is not None and here.rank == 0:  # a newcomer is the last of a communicator that grows
            newcomer = generation > 1 and dies not in script[generation - 2][0]
            place = len(members) - 1 if newcomer else members.index(dies)
            (path.parent / f"die-{place}of{len(members)}").touch()
        edit(here, fabric, members, generation)
        if dies is None:
            everything(here.rank, members, group, fabric)
        elif dies == here.rank:
            dist.all_reduce(torch.ones(10), group=group)
        else:
            survivors = [rank for rank in members if rank != dies]
            held_up(here, fabric, group, survivors, generation, dies, here.ask)
    here.exchange("done", True, script[-1][0])
    fabric.close()
    return [change for name, change in fabric.edits if name.startswith("dp")]


def held_up(  # type: ignore[no-untyped-def]
    here: Here,
    fabric,
    group: dist.ProcessGroup,
    survivors: list[int],
    generation: int,
    dies: int,
    until: Callable[[], object] = lambda: None,
) -> None:
    """Wait for the one that ``dies`` until the generation is frozen. It shows by whom this rank is held up.

    ``until``: returns when that one is dead; before, it may be awaited on host links, and alive.
    """
    ended: list[BaseException] = []

    def run() -> None:
        try:
            dist.all_reduce(torch.ones(10), group=group)
        except CommError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until()
    deadline = time.monotonic() + 60
    while dies not in fabric.waiting_for() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert dies in fabric.waiting_for()
    here.exchange(f"held up {generation}", True, survivors)
    fabric.interrupt(generation + 1)
    thread.join(60)
    assert [type(error) for error in ended] == [GenerationChanged]


@pytest.mark.parametrize("where", DYING)
def test_a_rank_that_dies_while_others_connect_holds_them_up_until_the_generation_is_frozen(
    where: str, library: Callable[[str], Path]
) -> None:
    version, script, changes = DYING[where]
    path = library(version)
    with Ranks(4, functools.partial(connecting, path=path, script=script), seconds=120) as ranks:
        for generation, (members, dies) in enumerate(script, 1):
            before = script[generation - 2][0] if generation > 1 else members
            for rank in set(before) - set(members) - {dead for _, dead in script[: generation - 1]}:
                assert ranks.exit_code(rank) == 0
            for rank in set(members) - set(before):
                ranks.start(rank, functools.partial(connecting, path=path, script=script, first=generation))
            if dies is not None:
                assert ranks.exit_code(dies) == -signal.SIGKILL
                for rank in set(members) - {dies}:
                    ranks.say(rank, dies)
        assert ranks.hear(0)[: len(changes)] == changes
        ranks.results(rank for rank in script[-1][0] if rank)


def one_held_up(here: Here, path: Path) -> list[str]:
    """The members change nothing, but the first one had an operation in flight that the others had not come to."""
    fabric = make(here, path)
    group = fabric.group("dp", range(4))
    edit(here, fabric, range(4), 1)
    dist.all_reduce(torch.ones(1), group=group)
    if here.rank == 0:
        held_up(here, fabric, group, [0], generation=1, dies=1)
    edit(here, fabric, range(4), 2)
    everything(here.rank, (0, 1, 2, 3), group, fabric)
    fabric.close()
    return [change for name, change in fabric.edits if name.startswith("dp")]


@pytest.mark.parametrize("version", ["full", "basic"])
def test_members_of_which_one_had_to_abort_connect_anew(version: str, library: Callable[[str], Path]) -> None:
    with Ranks(4, functools.partial(one_held_up, path=library(version)), seconds=60) as ranks:
        changes = ranks.results(range(4))
    first = {"full": "rebuilt", "basic": "joined"}[version]
    assert changes == {0: ["started", first], **{rank: ["started", "rebuilt"] for rank in (1, 2, 3)}}


def chosen(here: Here, path: Path) -> dict[str, bool]:
    """Which works are enqueued by the library, and which go over host links, before and after the first edit."""
    fabric = make(here, path)
    group = fabric.group("dp", range(2))
    assert isinstance(group, DeviceGroup)
    found = {"before the first edit": group.by_vendor(torch.ones(1))}
    edit(here, fabric, range(2), 1)
    found["sum"] = group.by_vendor(torch.ones(1), op=dist.ReduceOp.SUM)
    found["bits"] = group.by_vendor(torch.ones(1, dtype=torch.int64), op=dist.ReduceOp.BOR)
    found["elsewhere"] = group.by_vendor(torch.empty(1, device="meta"))
    tensor = torch.full((3,), 2.0)
    work = group.allreduce([tensor])
    assert isinstance(work, Enqueued) and work.is_completed() and work.result()[0] is tensor
    assert work.get_future().value()[0] is tensor
    fabric.close()
    return found


def test_the_library_takes_what_all_members_know_it_can(library: Callable[[str], Path]) -> None:
    with Ranks(2, functools.partial(chosen, path=library("full")), seconds=60) as ranks:
        expected = {"before the first edit": False, "sum": True, "bits": False, "elsewhere": False}
        assert ranks.results(range(2)) == {0: expected, 1: expected}


@pytest.mark.parametrize("kind", [CudaPlatform, NpuPlatform])
def test_a_library_that_cannot_be_opened_is_refused_with_the_way_around_it(kind: type[Platform]) -> None:
    if kind.available():
        pytest.skip("there is such a device")
    with pytest.raises(ConfigError, match=f"elastic on {kind.name} needs the vendor's library .*--elastic-comm gloo"):
        vendor_of(kind(), dist.HashStore())


class NoLibrary(CpuPlatform):
    """A device that torch has no communication library for."""

    name = "other"

    def device_name(self, index: int = 0) -> str:
        return f"other{index}"


def test_a_device_without_a_library_has_its_tensors_moved_through_host_memory() -> None:
    vendor = vendor_of(NoLibrary(), dist.HashStore())
    communicator = vendor.communicator(0)
    assert isinstance(communicator, ThroughHost)
    assert vendor.device_name == "other0" and not communicator.takes(torch.ones(1), dist.ReduceOp.SUM)
    with pytest.raises(VendorError, match="no library that moves its tensors"):
        communicator.all_reduce(torch.ones(1), dist.ReduceOp.SUM)


def sharing(here: Here, path: Path) -> list[tuple[str, str]]:
    fabric = make(here, path, device_name="the only one")
    edit(here, fabric, range(4), 1)
    everything(here.rank, (0, 1, 2, 3), fabric.group("dp", range(4)), fabric)
    fabric.close()
    return list(fabric.edits)


def test_ranks_that_share_a_device_go_over_host_links(library: Callable[[str], Path]) -> None:
    with Ranks(4, functools.partial(sharing, path=library("full"))) as ranks:
        assert all(edits == [] for edits in ranks.results(range(4)).values()), "no communicator was made"


def hanging(here: Here, path: Path) -> None:
    fabric = make(here, path, limit=0.5)
    group = fabric.group("dp", range(4))
    edit(here, fabric, range(4), 1)
    dist.all_reduce(torch.ones(1), group=group)
    here.tell("ready")
    if here.rank == 3:
        here.ask()
    threading.Timer(1.0, lambda: fabric.interrupt(2)).start()
    dist.all_reduce(torch.ones(1), group=group)
    raise AssertionError("a revoke that hangs must end the process")


def test_a_library_that_hangs_when_it_is_stopped_ends_the_process_into_a_respawn(
    library: Callable[[str], Path],
) -> None:
    path = library("full")
    with Ranks(4, functools.partial(hanging, path=path)) as ranks:
        for rank in range(4):
            assert ranks.hear(rank) == "ready"
        (path.parent / "hang").touch()
        try:
            assert [ranks.exit_code(rank) for rank in range(3)] == [RESPAWN_EXIT_CODE] * 3
        finally:
            (path.parent / "hang").unlink()
            ranks.say(3, "end")
            ranks.kill(3)
