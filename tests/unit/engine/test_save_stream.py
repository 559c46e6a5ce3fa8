"""The stream of a checkpoint belongs to one generation, whenever its thread gets to run."""

from __future__ import annotations

import threading
from functools import partial

import msgspec
import pytest
import torch

from megatron.elastic.comm.address import Address
from megatron.elastic.comm.errors import GenerationChanged
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.comm.gloo.fabric import GlooFabric
from megatron.elastic.comm.native import NativeFabric
from megatron.elastic.engine.transaction.save import StateStream, Want
from megatron.elastic.state.layout import ParamSpec, UnitLayout
from megatron.elastic.state.placement import Copies, Placement
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import ConstantSchedule, Hyper, Rate, StepRecord
from tools.bench._common import Here, Ranks

LAYOUTS = {(0, 0): UnitLayout.build(0, 0, [ParamSpec("w", 4096, (4096,), True)], 4096)}
BLOCKS = LAYOUTS[0, 0].blocks
PLACEMENT = Placement({block.key: Copies(block.index % 2) for block in BLOCKS})
HYPER = Hyper(ConstantSchedule((Rate(1e-2, 0.1),)))
COMMUNICATORS = pytest.mark.parametrize("comm", ["elastic", "gloo"])
WANTED = (Want(0, 0, 0, LAYOUTS[0, 0].numel, 0),)


def fabric_of(here: Here, comm: str) -> Fabric:
    """A fabric in generation 1."""
    fabric: Fabric
    if comm == "gloo":
        fabric = GlooFabric(here.rank, here.size, 0, here.store(), timeout=60.0)
    else:
        fabric = NativeFabric(here.rank, here.size, 0, run_id=f"save{here.port}", secret=b"x" * 32, timeout=60.0)
    addresses = here.exchange("address", msgspec.to_builtins(fabric.address()), range(here.size))
    fabric.edit(1, {rank: Address(**value) for rank, value in addresses.items()}, 30.0)
    here.exchange("edited 1", 0, range(here.size))
    return fabric


def opened(fabric: Fabric) -> StateStream:
    """Rank 0 writes all; every other block comes from rank 1."""
    pool = StatePool(fabric.rank, LAYOUTS, HYPER)
    for block in BLOCKS:
        if PLACEMENT.owner(block.key) == fabric.rank:
            pool.put(block.key, torch.arange(block.start, block.stop, dtype=torch.float32), 0)
    return StateStream(fabric, pool, PLACEMENT, LAYOUTS, StepRecord.initial(HYPER), {0: WANTED})


def again(here: Here, fabric: Fabric) -> None:
    """Go on in generation 2 with the same members."""
    addresses = here.exchange("again", msgspec.to_builtins(fabric.address()), range(here.size))
    fabric.interrupt(2)
    fabric.edit(2, {rank: Address(**value) for rank, value in addresses.items()}, 30.0)
    here.exchange("edited 2", 0, range(here.size))


def _late(comm: str, here: Here) -> str:
    """Both ranks open a stream; the thread of rank 0 begins after the edit, that of rank 1 never."""
    fabric = fabric_of(here, comm)
    stream = opened(fabric)
    again(here, fabric)
    error = ""
    if here.rank == 0:
        try:
            stream.run(lambda want, values: None)
        except GenerationChanged as changed:
            error = str(changed)
    here.exchange("over", 0, range(here.size))
    fresh, found = opened(fabric), dict[Want, torch.Tensor]()
    fresh.run(lambda want, values: found.update({want: values.clone()}))
    if here.rank == 0:
        assert torch.equal(found[WANTED[0]], torch.arange(4096, dtype=torch.float32)), "a message of the void stream"
    here.exchange("saved", 0, range(here.size))
    fabric.close()
    return error


@COMMUNICATORS
@pytest.mark.timeout(60)
def test_a_thread_that_begins_after_the_edit_waits_for_no_rank(comm: str) -> None:
    with Ranks(2, partial(_late, comm), seconds=40.0) as ranks:
        assert ranks.results((0, 1)) == {0: "generation 2 is being agreed", 1: ""}


def _interrupted(comm: str, here: Here) -> str:
    fabric = fabric_of(here, comm)
    stream, error = opened(fabric), list[str]()
    if here.rank == 0:

        def run() -> None:
            try:
                stream.run(lambda want, values: None)
            except GenerationChanged as changed:
                error.append(str(changed))

        thread = threading.Thread(target=run)
        thread.start()
        again(here, fabric)
        thread.join(30.0)
    else:
        again(here, fabric)
    fabric.close()
    return "".join(error)


@COMMUNICATORS
@pytest.mark.timeout(60)
def test_a_thread_that_waits_during_the_edit_is_woken(comm: str) -> None:
    with Ranks(2, partial(_interrupted, comm), seconds=40.0) as ranks:
        assert ranks.results((0, 1))[0] == "generation 2 is being agreed"
