"""Communicators of a vendor's library that outlive a generation, are made anew, or are freed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.standin.vendor import build_nccl
from tests.unit.comm.fabric_checks import edit
from tests.unit.comm.test_device_fabric import everything, make
from tools.bench._common import Here, Ranks

device = pytest.importorskip("megatron.elastic.comm.vendor.fabric")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.partial(build_nccl, tmp_path_factory.mktemp("vendor"), on_streams=False)


Act = Callable[[int, float, dist.ProcessGroup], torch.Tensor | None]


def broadcast(rank: int, value: float, group: dist.ProcessGroup) -> torch.Tensor | None:
    """Rank 0 is done before the others begin; return what has arrived."""
    tensor = torch.full((8,), value if rank == 0 else -1.0)
    dist.broadcast(tensor, src=0, group=group)
    return tensor


def reduction(rank: int, value: float, group: dist.ProcessGroup) -> torch.Tensor | None:
    """All but rank 1 are done before that one begins; return the sum there."""
    tensor = torch.full((8,), value if rank == 0 else 0.0)
    dist.reduce(tensor, dst=1, group=group)
    return tensor if rank == 1 else None


def message(rank: int, value: float, group: dist.ProcessGroup) -> torch.Tensor | None:
    """Rank 0 is done before rank 1 begins to receive; rank 2 takes no part."""
    tensor = torch.full((8,), value if rank == 0 else -1.0)
    if rank == 0:
        dist.send(tensor, dst=1, group=group)
    elif rank == 1:
        dist.recv(tensor, src=0, group=group)
    return tensor if rank == 1 else None


def cut_between(here: Here, path: Path, act: Act, late: tuple[int, ...]) -> list[str]:
    """The generation ends when some have begun ``act`` a second time and those that are ``late`` have not."""
    fabric = make(here, path)
    group = fabric.group("dp", range(3))
    edit(here, fabric, range(3), 1)
    for generation, again in ((1, True), (2, False)):
        dist.all_reduce(torch.ones(1), group=group)  # the members meet
        for value in (1.0, 2.0):
            got = act(here.rank, value, group)
            assert got is None or got.tolist() == [value] * 8, "nothing of an earlier operation"
        if again and here.rank not in late:
            act(here.rank, 3.0, group)
        here.exchange(f"begun {generation}", True, range(3))
        assert not fabric.unfinished()
        edit(here, fabric, range(3), generation + 1)
    dist.all_reduce(torch.ones(1), group=group)
    fabric.close()
    return [change for name, change in fabric.edits if name.startswith("dp")]


@pytest.mark.parametrize("version", ["full", "basic"])
@pytest.mark.parametrize(
    ("act", "late"),
    [(broadcast, (1, 2)), (reduction, (1,)), (message, (1,))],
    ids=["broadcast", "reduction", "message"],
)
def test_what_only_some_members_had_begun_reaches_no_later_generation(
    act: Act, late: tuple[int, ...], version: str, library: Callable[[str], Path]
) -> None:
    """The communicator is kept only where all had begun the same."""
    with Ranks(3, functools.partial(cut_between, path=library(version), act=act, late=late), seconds=60) as ranks:
        changes = ranks.results(range(3))
    assert changes == {rank: ["started", "rebuilt", "kept"] for rank in range(3)}


def broken_by_a_loss(here: Here, path: Path) -> list[str]:
    """A rank goes, and the connections of one of the others have met an error."""
    fabric = make(here, path)
    group = fabric.group("dp", range(3))
    edit(here, fabric, range(3), 1)
    everything(here.rank, (0, 1, 2), group, fabric)
    if here.rank == 1:
        fabric.close()
        return []
    if here.rank == 2:
        (path.parent / "broken-2of3").touch()
    edit(here, fabric, (0, 2), 2)
    everything(here.rank, (0, 2), group, fabric)
    fabric.close()
    return [change for name, change in fabric.edits if name.startswith("dp")]


@pytest.mark.parametrize("version", ["full", "shrinks"])
def test_a_communicator_that_met_an_error_is_made_anew_by_all(version: str, library: Callable[[str], Path]) -> None:
    with Ranks(3, functools.partial(broken_by_a_loss, path=library(version)), seconds=60) as ranks:
        assert ranks.results(range(3)) == {0: ["started", "rebuilt"], 1: [], 2: ["started", "joined"]}


def unused(here: Here, path: Path) -> tuple[list[str], list[bool]]:
    """One group is used in each generation, the other in the first and the last."""
    fabric = make(here, path)
    used, idle, kept, last = fabric.group("dp", range(2)), fabric.group("state", range(2)), [], 6
    for generation in range(1, last + 1):
        edit(here, fabric, range(2), generation)
        dist.all_reduce(torch.ones(1), group=used)
        if generation in (1, last):
            dist.all_reduce(torch.ones(1), group=idle)
        kept.append(idle in fabric._held)
    fabric.close()
    return [change for name, change in fabric.edits if name.startswith("state")], kept


def test_a_communicator_that_is_not_used_any_more_is_freed(library: Callable[[str], Path]) -> None:
    assert device.UNUSED_GENERATIONS == 3
    with Ranks(2, functools.partial(unused, path=library("full")), seconds=60) as ranks:
        for edits, kept in ranks.results(range(2)).values():
            assert edits == ["started", "started"] and kept == [True, True, True, True, False, True]
