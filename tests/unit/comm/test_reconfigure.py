"""Others' managers can drive our groups by torch's reconfiguration protocol."""

from __future__ import annotations

import functools
import inspect
import json
import subprocess
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from megatron.elastic.comm.backend import install, make_fabric, register_backend
from megatron.elastic.comm.contract import VERSIONS, fetch, read
from megatron.elastic.comm.errors import CommError
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.comm.reconfigure import Driven, members_of
from megatron.elastic.config import ElasticConfig
from tools.bench._common import Here, Ranks

RECORD = Path(__file__).with_name("torch_reconfigure.json")
KINDS = {
    "gloo": ElasticConfig(comm="gloo"),
    "shm": ElasticConfig(comm="elastic", transport="shm"),
    "tcp": ElasticConfig(comm="elastic", transport="tcp"),
}


class Manager:
    """Somebody else's: collects handles, hands them out, knows nothing else of us (as torchft's quorum does)."""

    def __init__(self, here: Here) -> None:
        self._here = here
        self._quorum = 0

    def quorum(self, ranks: tuple[int, ...], world: Any) -> list[str]:
        self._quorum += 1
        handles = self._here.exchange(f"quorum{self._quorum}", asked(world, "_get_reconfigure_handle"), ranks)
        return [str(handles[rank]) for rank in ranks]


def asked(world: Any, what: str, **arguments: Any) -> Any:
    """By torch.distributed's own function where this torch has it, else by the method of the same name."""
    theirs = getattr(dist, what, None)
    return theirs(**arguments) if theirs else getattr(world, what)(**arguments)


def driven_by_a_manager(here: Here, kind: str) -> list[tuple[int, int, float, float]]:
    """All three; one is killed in the middle of a collective; two go on; a new incarnation of it comes back."""

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta, dense: bool) -> Fabric:
        incarnation = int(here.store().add(f"lives/{rank}", 1)) - 1
        return make_fabric(
            KINDS[kind],
            rank,
            size,
            incarnation,
            f"driven{here.port}",
            b"driven",
            here.store,
            timeout=6.0 if kind == "gloo" else 20.0,  # on gloo, the end of it is what wakes survivors
            dense_world=dense or not hasattr(dist, "_reconfigure"),
        )

    register_backend(make, driven=not hasattr(dist, "_reconfigure"))
    enable: dict[str, Any] = {"enable_reconfigure": True} if hasattr(dist, "_reconfigure") else {}
    dist.init_process_group("elastic", store=here.store(), rank=here.rank, world_size=3, **enable)
    world: Any = dist.distributed_c10d._get_default_group()
    manager, seen = Manager(here), list[Any]()
    assert asked(world, "_supports_reconfigure") and world.supports_reconfigure
    late = here.store().add(f"arrivals/{here.rank}", 1) > 1
    manager._quorum = 2 if late else 0
    for uuid, ranks in ((7, (0, 1, 2)), (8, (0, 2)), (9, (0, 1, 2))):
        if (late and uuid < 9) or here.rank not in ranks:
            continue
        work = asked(
            world, "_reconfigure", uuid=uuid, handles=manager.quorum(ranks, world), timeout=timedelta(seconds=20)
        )
        assert work.wait() and work.get_future().wait() is None
        tensor = torch.tensor([float(here.rank + 1)])
        dist.all_reduce(tensor)
        shared = torch.tensor([float(here.rank)])
        dist.broadcast(shared, src=1)  # position 1 of the quorum
        seen.append((dist.get_rank(), dist.get_world_size(), float(tensor), float(shared)))
        if uuid == 7:
            here.tell("first quorum")
            try:
                dist.all_reduce(torch.ones(1))
                if here.rank == 1:
                    here.ask()  # dies here
                dist.all_reduce(torch.ones(1))
            except CommError as error:
                seen.append(type(error).__name__)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_manager_that_knows_only_the_protocol_drives_edits(kind: str) -> None:
    """As torchft does: quorum, handles, reconfigure; ranks and sizes are those the protocol promises."""
    body = functools.partial(driven_by_a_manager, kind=kind)
    with Ranks(3, body) as ranks:
        for rank in range(3):
            assert ranks.hear(rank) == "first quorum"
        ranks.kill(1)
        ranks.start(1)
        results = ranks.results(range(3))
    assert results[0] == [(0, 3, 6.0, 1.0), "PeerLost", (0, 2, 4.0, 2.0), (0, 3, 6.0, 1.0)]
    assert results[2] == [(2, 3, 6.0, 1.0), "PeerLost", (1, 2, 4.0, 2.0), (2, 3, 6.0, 1.0)]
    assert results[1] == [(1, 3, 6.0, 1.0)]


NATIVELY = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason=f"torch {torch.__version__} has no reconfiguration; 2.14 and later have"
)


def driven_from_cpp(here: Here, kind: str) -> None:
    """``ProcessGroup``'s own methods, which know nothing of our Python class, reach the C++ virtual functions."""
    fabric = make_fabric(KINDS[kind], here.rank, 3, 0, f"cpp{here.port}", b"s", here.store, timeout=20.0)
    install(fabric)
    base: Any = dist.ProcessGroup
    world, part = fabric.world, dist.new_group([0, 1, 2], group_desc="part")
    assert base.supports_reconfigure.__get__(world) and base.supports_reconfigure.__get__(part)

    def quorum(uuid: int, ranks: tuple[int, ...], ordered: bool) -> None:
        handles = here.exchange(f"quorum{uuid}", base.get_reconfigure_handle(part), ranks)
        options = dist.distributed_c10d.ReconfigureOptions()  # type: ignore[attr-defined]  # torch 2.14 and later
        options.uuid, options.timeout = uuid, timedelta(seconds=20)
        options.handles = [handles[rank] for rank in ranks] if ordered else set(handles.values())
        assert base.reconfigure(part, options).wait()

    quorum(1, (0, 1, 2), ordered=False)
    for group in (None, part):
        tensor = torch.tensor([float(here.rank + 1)])
        dist.all_reduce(tensor, group=group)
        assert (float(tensor), dist.get_world_size(group)) == (6.0, 3)
    here.tell("three")
    if here.rank == 1:
        here.ask()  # dies here
    with pytest.raises(CommError):
        dist.all_reduce(torch.ones(1), group=part)
    quorum(2, (0, 2), ordered=True)
    assert (dist.get_rank(), dist.get_world_size()) == (here.rank, 3)
    assert (dist.get_rank(part), dist.get_world_size(part)) == ((0, 2).index(here.rank), 2)
    for group in (None, part):
        tensor = torch.tensor([float(here.rank + 1)])
        dist.all_reduce(tensor, group=group)
        assert float(tensor) == 4.0
    whole = torch.zeros(4) if here.rank == 0 else None
    dist.gather_single(torch.full((2,), float(here.rank)), whole, group=part)  # type: ignore[attr-defined]
    assert whole is None or whole.tolist() == [0.0, 0.0, 2.0, 2.0]
    with pytest.raises(CommError, match="not newer"):
        quorum(2, (0, 2), ordered=True)
    fabric.close()


@NATIVELY
@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_the_protocol_reaches_us_through_the_base_class(kind: str) -> None:
    with Ranks(3, functools.partial(driven_from_cpp, kind=kind)) as ranks:
        for rank in range(3):
            assert ranks.hear(rank) == "three"
        ranks.kill(1)
        ranks.results((0, 2))


class Reconfigured:
    """The default group of a driven program, reconfigured by the protocol's functions."""

    def __init__(self, here: Here) -> None:
        self._here = here
        enable: dict[str, Any] = {"enable_reconfigure": True} if hasattr(dist, "_reconfigure") else {}

        def make(store: dist.Store, rank: int, size: int, timeout: timedelta, dense: bool) -> Fabric:
            name = f"cases{here.port}"
            return make_fabric(
                KINDS["shm"], rank, size, 0, name, b"s", store, timeout=20.0, dense_world=dense or not enable
            )

        register_backend(make, driven=not enable)
        dist.init_process_group("elastic", store=here.store(), rank=here.rank, world_size=here.size, **enable)
        self.world: Any = dist.distributed_c10d._get_default_group()

    def become(self, uuid: int, ranks: tuple[int, ...]) -> None:
        """Reconfigure to ``ranks``, and check that they number and add up as the protocol promises."""
        handle = asked(self.world, "_get_reconfigure_handle")
        handles = self._here.exchange(f"{uuid} of {ranks}", handle, ranks)
        chosen = [handles[rank] for rank in ranks]
        asked(self.world, "_reconfigure", uuid=uuid, handles=chosen, timeout=timedelta(seconds=20)).wait()
        assert (dist.get_rank(), dist.get_world_size()) == (ranks.index(self._here.rank), len(ranks))
        total = torch.tensor([self._here.rank + 1.0])
        dist.all_reduce(total)
        assert float(total) == sum(rank + 1.0 for rank in ranks)


def backend_of(group: dist.ProcessGroup) -> Any:
    """Return the backend as PyTorch's tests ask for it, or as its function does where this release has none."""
    device = torch.device("cpu")
    if hasattr(dist, "get_backend_impl"):
        return dist.get_backend_impl(group, device)
    return group.get_backend(device)  # type: ignore[attr-defined]


def protocol_cases(here: Here) -> None:
    """Each case of PyTorch's tests of fault tolerance (``test_c10d_fault_tolerance``, 2.14), one after the other."""
    group, everyone = Reconfigured(here), (0, 1, 2)
    group.become(600 + here.rank, (here.rank,))
    group.become(603, everyone)  # from one to all
    assert backend_of(group.world) is group.world, "the tests ask the default group's backend for messages and aborts"
    group.become(604 + here.rank, (here.rank,))
    group.become(607, everyone)  # down, and up again
    group.become(608, everyone)  # the same ones
    if here.rank == 0:
        group.become(700, (0,))
    group.become(701, everyone)  # late ones join
    group.become(800, (0,)) if here.rank == 0 else group.become(801, (1, 2))
    group.become(802, everyone)  # split and merged
    if here.rank != 1:
        group.become(803, (0, 2))  # without the one in the middle
    group.become(804, everyone)
    last, right, left = torch.zeros(4), (dist.get_rank() + 1) % 3, (dist.get_rank() - 1) % 3
    works = [group.world.send([torch.full((4,), dist.get_rank() + 1.0)], right, 0), group.world.recv([last], left, 0)]
    for work in works:
        work.wait()
    assert last.tolist() == [left + 1.0] * 4

    group.world.abort()
    assert group.world.get_error() == ErrorType.SUCCESS, "an abort is no error"
    with pytest.raises(CommError, match="aborted"):
        dist.all_reduce(torch.ones(1))
    group.become(900, everyone)
    with pytest.raises(CommError, match="already used"):
        asked(group.world, "_reconfigure", uuid=900, handles=[asked(group.world, "_get_reconfigure_handle")])
    here.exchange("done", True, everyone)
    dist.destroy_process_group()


def test_the_cases_of_pytorchs_own_tests_of_fault_tolerance() -> None:
    with Ranks(3, protocol_cases) as ranks:
        ranks.results(range(3))


def misused(here: Here) -> None:
    fabric = make_fabric(KINDS["shm"], here.rank, 2, 0, f"misused{here.port}", b"s", here.store, timeout=20.0)
    install(fabric)
    world: Any = fabric.world
    handles = here.exchange("handles", world._get_reconfigure_handle(), (0, 1))
    options = SimpleNamespace(uuid=3, handles=set(handles.values()), timeout=timedelta(seconds=20), hints={})
    assert world.reconfigure(options).wait(), "a set: the order is ours"
    with pytest.raises(CommError, match="not newer"):
        world._reconfigure(3, list(handles.values()))
    with pytest.raises(CommError, match="not a member"):
        world._reconfigure(4, [handles[1 - here.rank]])
    here.exchange("done", True, (0, 1))  # who leaves at once may do so before the other has its end of the link
    fabric.close()


def test_a_reused_uuid_and_foreign_handles_are_refused() -> None:
    with Ranks(2, misused) as ranks:
        ranks.results(range(2))


@pytest.mark.parametrize("text", ["", "{}", "[]", '"x"', '{"rank": 1}', "null"])
def test_what_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(CommError, match="handle"):
        members_of([text])


def test_handles_must_not_renumber() -> None:
    handles = ['{"rank": 2, "incarnation": 0, "host": "a"}', '{"rank": 0, "incarnation": 0, "host": "a"}']
    with pytest.raises(CommError, match="ascending"):
        members_of(handles)
    with pytest.raises(CommError, match="two handles"):
        members_of([handles[0], handles[0]])


def test_our_groups_have_what_newer_torch_asks_for() -> None:
    """The record is of wheels (:mod:`megatron.elastic.comm.contract`)."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert set(record) == set(VERSIONS)
    for version, protocol in record.items():
        assert protocol["delegates"] == {
            "_supports_reconfigure": "supports_reconfigure",
            "_get_reconfigure_handle": "get_reconfigure_handle",
            "_reconfigure": "reconfigure",
        }, version
        for name in (*protocol["delegates"], *protocol["delegates"].values()):
            assert hasattr(Driven, name), f"torch {version} asks for {name}"
        ours = list(inspect.signature(Driven._reconfigure).parameters)[1:]
        assert ours == [name for name in protocol["parameters"]["_reconfigure"] if name != "group"], version
        assert protocol["options"] == ["uuid", "handles", "timeout", "hints"], version
        assert protocol["macro"] and "init_process_group" in protocol["enabled_by"], version
        assert protocol["virtuals"] == [
            "virtual bool supportsReconfigure() const",
            "virtual ReconfigureHandle get_reconfigure_handle() const",
            "virtual c10::intrusive_ptr<Work> reconfigure(const ReconfigureOptions& opts)",
        ], version


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_record_is_what_the_wheels_say(version: str, tmp_path: Path) -> None:
    try:
        wheel = fetch(version, tmp_path)
    except subprocess.CalledProcessError:
        pytest.skip(f"no wheel of torch {version} can be downloaded here")
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))[version]
    wheel_says = asdict(read(wheel))
    wheel.unlink()
    assert wheel_says == recorded
