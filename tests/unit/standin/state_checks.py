"""Copies of blocks in device memory, each check in a process of its own (``tests/standin/forked.py``)."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron.elastic import _state
from megatron.elastic.engine.compute.block_checksums import block_checksums, disputes
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.state.adam import SgdScalars
from megatron.elastic.state.checkpoint_view import CheckpointView
from megatron.elastic.state.device_place import DevicePlace, tensor_kernels
from megatron.elastic.state.hashing import content_hash
from megatron.elastic.state.layout import ParamSpec, UnitLayout
from megatron.elastic.state.place import HOST, Place
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import ConstantSchedule, GradientKey, Hyper, Rate, StepRecord, Vote, advance
from megatron.elastic.state.verify import fingerprints
from tests.standin import device as standin
from tests.standin.platform import StandinPlatform

SPECS = [
    ParamSpec("weight", 900, (30, 30), True, 1.0),
    ParamSpec("bias", 30, (30,), True, 0.0),
    ParamSpec("norm", 100, (100,), False, 0.0, 2.0),
]
LAYOUT = UnitLayout.build(0, 0, SPECS, 1024)
KEYS = [block.key for block in LAYOUT.blocks]
RATES = (Rate(1e-2, 0.1),)


def on_device() -> DevicePlace:
    """The place of device 1, which is not the current one."""
    return DevicePlace(StandinPlatform(), torch.device("standin:1"), tensor_kernels())


def filled(place: Place, hyper: Hyper, seed: int = 0, snapshot: Any = "gradient") -> tuple[StatePool, StepRecord]:
    pool = StatePool(0, {(0, 0): LAYOUT}, hyper, snapshot, place)
    flat = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(seed))
    for block in LAYOUT.blocks:
        pool.put(block.key, flat[block.start : block.stop], 0, place=place)
    record = StepRecord.initial(hyper)
    pool.start(record)
    return pool, record


def reduced(pool: StatePool, key: GradientKey, seed: int) -> None:
    """Retain gradients that come from an arena of the place of the owners, which is then used for others."""
    made = torch.Generator().manual_seed(seed)
    spread = torch.randn(LAYOUT.numel, generator=made).exp().pow(4)
    arena = pool.owners.bring(torch.randn(LAYOUT.numel, generator=made) * spread)
    pool.retain_all(key, {block.key: arena[block.start : block.stop] for block in LAYOUT.blocks})
    arena.fill_(float("nan"))


def voted(pool: StatePool, record: StepRecord, key: GradientKey, overflow: bool = False) -> StepRecord:
    norms = {k: pool.norm_sq(k, key) for k in KEYS}
    return advance(record, Vote(key, norms, overflow, 4.0, 4.0, 8, rates=RATES), pool.hyper)


def bits(pool: StatePool) -> list[list[int]]:
    return [state.view(torch.int32).flatten().tolist() for state in pool.read(KEYS)]


def lineages(pool: StatePool) -> list[str]:
    return [pool.get(key).lineage for key in KEYS]


def check_a_device_steps_with_the_hosts_bits() -> None:
    draw = random.Random(11)
    for case in range(12):
        hyper = Hyper(
            ConstantSchedule(RATES),
            optimizer="sgd" if case % 4 == 3 else "adam",
            decoupled_weight_decay=case % 2 == 0,
            beta2=0.95,
            scaler="dynamic" if case % 3 == 0 else "none",
            initial_loss_scale=2.0**16 if case % 3 == 0 else 1.0,
        )
        pools = [filled(place, hyper, case) for place in (HOST, on_device())]
        models = [
            {block.key: pool.owners.empty(block.numel).bfloat16() for block in LAYOUT.blocks} for pool, _ in pools
        ]
        records = [record for _, record in pools]
        for step in range(4):
            key, overflow = GradientKey(step, 1), draw.random() < 0.25
            for number, (pool, _) in enumerate(pools):
                reduced(pool, key, 100 * case + step)
                records[number] = voted(pool, records[number], key, overflow)
                pool.apply(records[number], model=models[number])
            assert records[0] == records[1]
            assert bits(pools[0][0]) == bits(pools[1][0])
            assert lineages(pools[0][0]) == lineages(pools[1][0])
        for block, there in models[1].items():
            assert torch.equal(models[0][block], there.cpu())
    assert standin.unpinned_asynchronous_copies() == 0


def check_gradients_leave_a_device_as_they_were_and_in_page_locked_memory() -> None:
    pool, _ = filled(on_device(), Hyper(ConstantSchedule(RATES)))
    key = GradientKey(0, 1)
    reduced(pool, key, 5)
    host, _ = filled(HOST, Hyper(ConstantSchedule(RATES)))
    reduced(host, key, 5)
    for block in KEYS:
        copy = pool.get(block)
        assert copy.gradients[key].device == torch.device("standin:1")
        assert copy.host_gradient(key).is_pinned()
        assert torch.equal(copy.host_gradient(key), host.get(block).gradients[key])
    whole = {pool.get(block).host_gradient(key).untyped_storage().data_ptr() for block in KEYS}
    assert len(whole) == 1 and len(KEYS) > 1


def check_a_staged_gradient_that_is_not_waited_for_is_seen_by_its_values() -> None:
    place = on_device()
    staged = place.stage(torch.full((64,), 3.0, device="standin:1"))
    early = cast(Any, staged).host
    assert early.tolist() != [3.0] * 64 and staged.wait().tolist() == [3.0] * 64


def check_dies_when_a_kernel_of_the_host_reads_device_numbers() -> None:
    pool, _ = filled(on_device(), Hyper(ConstantSchedule(RATES)))
    master = pool.get(KEYS[0]).master
    _state.sum_of_squares(master.data_ptr(), master.numel())


def check_device_numbers_are_refused_by_hashes_and_the_hosts_kernels() -> None:
    pool, _ = filled(on_device(), Hyper(ConstantSchedule(RATES)))
    copy = pool.get(KEYS[0])
    with pytest.raises(TypeError, match="standin"):
        content_hash(KEYS[0], copy.state)
    with pytest.raises(ValueError, match="expected a contiguous host tensor"):
        HOST.sgd(copy.master, copy.exp_avg, copy.exp_avg_sq, SgdScalars(1.0, 1.0, 0.9, 0.0))


def check_hashes_checksums_and_checkpoints_are_those_of_the_host() -> None:
    hyper, key = Hyper(ConstantSchedule(RATES)), GradientKey(0, 1)
    (host, record), (device, _) = filled(HOST, hyper), filled(on_device(), hyper)
    for pool in (host, device):
        reduced(pool, key, 9)
    assert block_checksums(host, KEYS, key, 1).tolist() == block_checksums(device, KEYS, key, 1).tolist()
    assert fingerprints(host, KEYS, torch.bfloat16) == fingerprints(device, KEYS, torch.bfloat16)
    view, before = CheckpointView(device, KEYS, record), bits(device)
    for pool in (host, device):
        pool.apply(voted(pool, record, key))
    assert [view.read(block).view(torch.int32).flatten().tolist() for block in KEYS] == before != bits(device)
    device.flip_bit(KEYS[1], "exp_avg_sq")
    record = device.records[1]
    for pool in (host, device):
        reduced(pool, GradientKey(1, 1), 10)
    found = disputes(host, KEYS, GradientKey(1, 1), 1, block_checksums(device, KEYS, GradientKey(1, 1), 1))
    assert found.contents == (KEYS[1],) and found.marks == ()


def check_state_mode_goes_back_on_the_device() -> None:
    hyper, key = Hyper(ConstantSchedule(RATES)), GradientKey(0, 1)
    pool, record = filled(on_device(), hyper, snapshot="state")
    before = bits(pool)
    reduced(pool, key, 3)
    pool.apply(voted(pool, record, key))
    assert bits(pool) != before
    pool.revert(record)
    assert bits(pool) == before and pool.get(KEYS[0]).place.on_device


def arena_of(dtype: torch.dtype) -> Any:
    """As much of an arena as parameters are written through, on device 1."""
    slices = {(0, 0): SimpleNamespace(start=0, layout=LAYOUT)}
    place = torch.device("standin:1")
    arena = SimpleNamespace(
        parameters=torch.zeros(LAYOUT.numel, dtype=dtype, device=place), slices=slices, device=place
    )
    arena.block_parameters = lambda block: Arena.block_parameters(cast(Any, arena), block)
    return arena


def check_parameters_of_host_and_device_masters_reach_the_arena() -> None:
    flat = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.bfloat16):
        arena = arena_of(dtype)
        values = [
            (block, flat[block.start : block.stop].to("standin:1" if number % 2 else "cpu"))
            for number, block in enumerate(LAYOUT.blocks)
        ]
        Arena.set_parameters(arena, values)
        for block in LAYOUT.blocks:
            part = slice(block.start, block.stop)
            assert torch.equal(arena.parameters.cpu()[part], flat.to(dtype)[part])
    assert standin.unpinned_asynchronous_copies() == 0
