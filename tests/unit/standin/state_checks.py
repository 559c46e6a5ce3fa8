"""Copies of blocks in device memory, each check in a process of its own (``tests/standin/forked.py``)."""

from __future__ import annotations

import contextlib
import io
import math
import os
import random
import threading
import time
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron.elastic import _state
from megatron.elastic.comm.native import NativeFabric
from megatron.elastic.config import ConfigError, ElasticConfig
from megatron.elastic.engine.compute.block_checksums import block_checksums, disputes
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.engine.generation.hardware import OwnerMemory
from megatron.elastic.runtime import owner_memory
from megatron.elastic.runtime.owner_memory import agree_on_owners, bytes_needed
from megatron.elastic.state.adam import (
    AdamScalars,
    LionScalars,
    SgdScalars,
    adam_step_tensors,
    lion_step_tensors,
    sgd_step_tensors,
    single,
)
from megatron.elastic.state.checkpoint_view import CheckpointView
from megatron.elastic.state.device_place import DevicePlace, Kernels, Reserved, tensor_kernels
from megatron.elastic.state.hashing import content_hash
from megatron.elastic.state.layout import BlockKey, ParamSpec, UnitLayout
from megatron.elastic.state.place import HOST, Place, Staged
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import ConstantSchedule, GradientKey, Hyper, Rate, StepRecord, Vote, advance
from megatron.elastic.state.relocation import Relocation
from megatron.elastic.state.step_selftest import differing
from megatron.elastic.state.verify import fingerprints
from tests.standin import device as standin
from tests.standin.library import checked, library
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


def filled(
    place: Place, hyper: Hyper, seed: int = 0, snapshot: Any = "gradient", source: Place | None = None
) -> tuple[StatePool, StepRecord]:
    """A pool whose owners belong to ``place``; its copies lie there, or in ``source``."""
    pool = StatePool(0, {(0, 0): LAYOUT}, hyper, snapshot, place)
    flat = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(seed))
    for block in LAYOUT.blocks:
        pool.put(block.key, flat[block.start : block.stop], 0, place=source or place)
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


def held(pool: StatePool) -> list[BlockKey]:
    """The blocks of a pool that lie on a device."""
    return [key for key in pool if pool.get(key).place.on_device]


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
        records = [record for _, record in pools]
        for step in range(4):
            key, overflow = GradientKey(step, 1), draw.random() < 0.25
            for number, (pool, _) in enumerate(pools):
                reduced(pool, key, 100 * case + step)
                records[number] = voted(pool, records[number], key, overflow)
                pool.apply(records[number])
            assert records[0] == records[1]
            assert bits(pools[0][0]) == bits(pools[1][0])
            assert lineages(pools[0][0]) == lineages(pools[1][0])
    assert standin.unpinned_asynchronous_copies() == 0


def check_gradients_leave_a_device_as_they_were_and_in_page_locked_memory() -> None:
    pool, _ = filled(on_device(), Hyper(ConstantSchedule(RATES)))
    key = GradientKey(0, 1)
    reduced(pool, key, 5)
    host, _ = filled(HOST, Hyper(ConstantSchedule(RATES)))
    reduced(host, key, 5)
    for block in KEYS:
        copy = pool.get(block)
        assert copy.gradients[key].values.device == torch.device("standin:1")
        assert copy.host_gradient(key).is_pinned()
        assert torch.equal(copy.host_gradient(key), host.get(block).host_gradient(key))
    pool.retain_all(GradientKey(0, 2), {})  # a rank that owns nothing
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
    assert block_checksums(host, LAYOUT.blocks, key, 1) == block_checksums(device, LAYOUT.blocks, key, 1)
    assert fingerprints(host, KEYS, torch.bfloat16) == fingerprints(device, KEYS, torch.bfloat16)
    view, before = CheckpointView(device, KEYS, record), bits(device)
    for pool in (host, device):
        pool.apply(voted(pool, record, key))
    assert [view.read(block).view(torch.int32).flatten().tolist() for block in KEYS] == before != bits(device)
    device.flip_bit(KEYS[1], "exp_avg_sq")
    record = device.records[1]
    for pool in (host, device):
        reduced(pool, GradientKey(1, 1), 10)
    sent = block_checksums(device, LAYOUT.blocks, GradientKey(1, 1), 1)
    found = disputes(host, LAYOUT.blocks, GradientKey(1, 1), 1, sent)
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


# -- moves between host and device ------------------------------------------------------------


def relocated(place: DevicePlace, room: int = 1 << 30) -> tuple[StatePool, StepRecord, Relocation, list[str]]:
    """A pool of mirrors, and what moves those of them that become owners."""
    pool, record = filled(place, Hyper(ConstantSchedule(RATES)), source=HOST)
    said: list[str] = []
    return pool, record, Relocation(pool, place, lambda: room, said.append), said


def step(pools: list[StatePool], record: StepRecord, number: int) -> StepRecord:
    """Bring each pool one step on; the record, which is the same."""
    key, made = GradientKey(number, 1), dict[str, StepRecord]()
    for pool in pools:
        reduced(pool, key, number)
        after = voted(pool, record, key)
        pool.apply(after)
        made[after.digest] = after
    assert len(made) == 1
    return after


def wait_for(relocation: Relocation) -> None:
    while relocation.pending or relocation.moving:
        time.sleep(0.001)
    assert relocation.error is None, relocation.error


class Gated(DevicePlace):
    """A place whose uploads wait until they may begin."""

    def __init__(self) -> None:
        super().__init__(StandinPlatform(), torch.device("standin:1"), tensor_kernels())
        self.began, self.may = threading.Event(), threading.Event()

    def fill(self, reserved: Reserved, values: torch.Tensor) -> None:
        self.began.set()
        assert self.may.wait(10)
        super().fill(reserved, values)


def check_a_promoted_block_is_stepped_on_the_host_until_it_has_moved() -> None:
    place, owned = Gated(), tuple(LAYOUT.blocks[:2])
    (pool, record, relocation, _), (host, _) = relocated(place), filled(HOST, Hyper(ConstantSchedule(RATES)))
    relocation.follow(owned)
    assert held(pool) == [] and place.began.wait(10)
    place.may.set()
    wait_for(relocation)
    assert held(pool) == [block.key for block in owned]
    for number in range(3):
        record = step([pool, host], record, number)
    assert bits(pool) == bits(host) and standin.unpinned_asynchronous_copies() == 0
    relocation.follow(tuple(LAYOUT.blocks[1:]))
    wait_for(relocation)
    assert held(pool) == KEYS[1:] and bits(pool) == bits(host)
    step([pool, host], record, 3)
    assert bits(pool) == bits(host) and lineages(pool) == lineages(host)
    relocation.close()


def check_steps_and_checkpoints_go_on_while_roles_change_and_blocks_move() -> None:
    draw = random.Random(5)
    (pool, record, relocation, _), (host, _) = relocated(on_device()), filled(HOST, Hyper(ConstantSchedule(RATES)))
    for number in range(30):
        relocation.follow(tuple(draw.sample(LAYOUT.blocks, draw.randrange(len(KEYS) + 1))))
        view, before = CheckpointView(pool, KEYS, record), bits(host)
        record = step([pool, host], record, number)
        assert [view.read(key).view(torch.int32).flatten().tolist() for key in KEYS] == before
    wait_for(relocation)
    assert bits(pool) == bits(host) and lineages(pool) == lineages(host)


def check_a_role_that_changes_voids_the_moves_under_way() -> None:
    place = Gated()
    pool, _, relocation, _ = relocated(place)
    relocation.follow(tuple(LAYOUT.blocks))
    assert place.began.wait(10)
    changed = threading.Thread(target=relocation.follow, args=(tuple(LAYOUT.blocks[-1:]),))
    changed.start()
    place.may.set()
    changed.join()
    wait_for(relocation)
    assert held(pool) == KEYS[-1:]
    relocation.close()


def check_blocks_without_room_stay_on_the_host_and_the_user_is_told_once() -> None:
    pool, record, relocation, said = relocated(on_device(), room=12 * LAYOUT.blocks[0].numel)
    host, _ = filled(HOST, Hyper(ConstantSchedule(RATES)))
    relocation.follow(tuple(LAYOUT.blocks))
    wait_for(relocation)
    assert held(pool) == KEYS[:1]
    assert len(said) == 1 and "rank 0 steps" in said[0] and "no memory free" in said[0]
    step([pool, host], record, 0)
    assert bits(pool) == bits(host)


def check_blocks_that_the_allocator_has_no_room_for_stay_on_the_host() -> None:
    """The device has free bytes for all of them when they are counted."""
    size = 12 * LAYOUT.blocks[0].numel
    checked(library().standin_configure(2, 16 * size))
    taken = torch.empty(16 * size - 3 * size // 2, dtype=torch.uint8, device="standin:1")
    pool, record, relocation, said = relocated(on_device())
    host, _ = filled(HOST, Hyper(ConstantSchedule(RATES)))
    relocation.follow(tuple(LAYOUT.blocks))
    wait_for(relocation)
    assert held(pool) == KEYS[:1] and len(said) == 1 and "no memory free" in said[0]
    del taken
    step([pool, host], record, 0)
    assert bits(pool) == bits(host)


class Failing(DevicePlace):
    """A place whose uploads fail."""

    def fill(self, reserved: Reserved, values: torch.Tensor) -> None:
        raise RuntimeError("no such transfer")


def check_a_failed_move_is_raised_on_the_training_thread() -> None:
    pool, _, relocation, _ = relocated(Failing(StandinPlatform(), torch.device("standin:1"), tensor_kernels()))
    relocation.follow(tuple(LAYOUT.blocks))
    while relocation.moving:
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="no such transfer"):
        relocation.follow(())
    assert held(pool) == []


# -- the self-test ----------------------------------------------------------------------------


def with_kernels(
    adam: Any = adam_step_tensors, lion: Any = lion_step_tensors, sgd: Any = sgd_step_tensors
) -> DevicePlace:
    return DevicePlace(StandinPlatform(), torch.device("standin:1"), Kernels("test", adam, lion, sgd))


def check_the_self_test_passes_a_device_that_steps_as_the_host_does() -> None:
    assert differing(with_kernels()) == ()


def check_the_self_test_finds_a_quotient_by_the_reciprocal() -> None:
    def adam(master: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, scalars: AdamScalars) -> None:
        before = master * single(1.0 - scalars.lr * scalars.weight_decay) if scalars.decoupled else master.clone()
        adam_step_tensors(master, exp_avg, exp_avg_sq, grad, scalars)
        correction = torch.full_like(master, single(math.sqrt(scalars.bias_correction2)))
        denominator = exp_avg_sq.double().sqrt().float() / correction + single(scalars.eps)
        master.copy_(before - exp_avg * single(scalars.lr / scalars.bias_correction1) * (1 / denominator))

    assert differing(with_kernels(adam)) == ("Adam",)


def check_the_self_test_finds_denormals_that_are_flushed() -> None:
    def sgd(master: Any, momentum: Any, grad: Any, scalars: SgdScalars) -> None:
        sgd_step_tensors(master, momentum, torch.where(grad.abs() < 2.0**-126, torch.zeros_like(grad), grad), scalars)

    assert differing(with_kernels(sgd=sgd)) == ("SGD",)


def check_the_self_test_finds_an_update_of_zero_that_is_given_a_sign() -> None:
    def lion(master: Any, momentum: Any, grad: Any, scalars: LionScalars) -> None:
        c = momentum + (grad * single(scalars.grad_multiplier) - momentum) * single(1.0 - scalars.lion.beta1)
        lion_step_tensors(master, momentum, grad, scalars)
        master.sub_((c == 0) * single(scalars.lr))

    assert differing(with_kernels(lion=lion)) == ("Lion",)


# -- the choice at the start ------------------------------------------------------------------


def chosen(config: ElasticConfig, needed: int, sharing: int = 2) -> OwnerMemory:
    """The memory that a rank on its own takes, on a device of 4 GiB that ranks share."""
    fabric = NativeFabric(0, 1, 0, run_id=f"alone{os.getpid()}", secret=b"x" * 32)
    try:
        return agree_on_owners(fabric, config, StandinPlatform(), needed, sharing)
    finally:
        fabric.close()


def check_auto_takes_the_device_if_the_state_fits_into_a_ranks_share_of_it() -> None:
    assert chosen(ElasticConfig(), 1 << 30) == OwnerMemory(on_device=True, same_bits=True)
    assert chosen(ElasticConfig(), 3 << 30) == OwnerMemory(on_device=False)
    assert chosen(ElasticConfig(), 3 << 30, sharing=1).on_device
    assert chosen(ElasticConfig(state="device"), 3 << 30).on_device
    assert not chosen(ElasticConfig(state="host"), 0).on_device


def check_a_device_with_other_bits_means_state_mode_and_exact_mode_refuses_it() -> None:
    def broken(*tensors: Any) -> None:
        sgd_step_tensors(*tensors)
        tensors[0].view(torch.int32)[5] ^= 1

    kernels = Kernels("broken kernels", adam_step_tensors, lion_step_tensors, broken)
    owner_memory._kernels = lambda device_type: kernels
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        found = chosen(ElasticConfig(), 0)
    assert found == OwnerMemory(on_device=True, same_bits=False)
    line = "--elastic-state: the device of rank 0 computes SGD (broken kernels) with other bits than the host, so"
    assert said.getvalue().startswith(line) and said.getvalue().count("\n") == 1
    with pytest.raises(ConfigError, match=r"--elastic-exact: the device of rank 0 .* use --elastic-state host"):
        chosen(ElasticConfig(exact=True), 0)


def check_needed_bytes_are_those_of_owned_blocks_and_of_a_full_pipeline() -> None:
    topology = cast(Any, SimpleNamespace(grid=SimpleNamespace(micro_batch_size=2), pipeline=3, compute_units=2))
    bytes_of = {"activation_bytes": lambda unit: 10 + unit, "quantized_bytes": lambda spec: 2 * spec.numel}
    interface = cast(Any, SimpleNamespace(**bytes_of))
    held, slices = SimpleNamespace(units=(0, 1, 2)), {(0, 0): SimpleNamespace(layout=LAYOUT)}
    arena = cast(Any, SimpleNamespace(held=held, slices=slices, state_stop=70))
    owned = sum(block.numel for block in LAYOUT.blocks[:2])
    copies = 2 * sum(slot.spec.numel for slot in LAYOUT.slots)
    for exact in (False, True):
        needed = bytes_needed(topology, interface, {(0, 0): LAYOUT}, KEYS[:2], arena, exact)
        assert needed == 16 * owned + 2 * 3 * (10 + 11) + copies + 8 * 70 * exact


# -- faults of this path that the devices show ------------------------------------------------


class Unordered(DevicePlace):
    """Copies that leave do not wait for the work that makes their values."""

    def _current(self) -> Any:
        return self._outwards

    @cached_property
    def _outwards(self) -> Any:
        return standin.Stream("standin:1")


class Unrecorded(DevicePlace):
    """The allocator does not know that a copy under way reads a tensor."""

    def _used_by(self, values: torch.Tensor, stream: object) -> None:
        pass


class Unpinned(DevicePlace):
    """Host memory of asynchronous copies is pageable."""

    _pins = False


class Passed:
    """An event that is taken to have happened."""

    def record(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Hasty(StandinPlatform):
    """Nothing waits for an event."""

    def new_event(self, timing: bool = False) -> Any:
        return Passed()


def gradients_of(place: DevicePlace, freed: bool = True) -> list[float]:
    """The host's form of gradients, waited for at once, or (``freed``) when their device memory was given back."""
    pool, _ = filled(place, Hyper(ConstantSchedule(RATES)))
    standin.synchronize("standin:1")
    reduced(pool, GradientKey(0, 1), 5)
    copies = [pool.get(key) for key in KEYS]
    staged = [cast(Staged, copy.gradients[GradientKey(0, 1)].staged) for copy in copies]
    if freed:
        for copy in copies:
            copy.gradients.clear()
        standin.current_stream("standin:1").synchronize()  # it is overwritten
    return torch.cat([part.wait() for part in staged]).tolist()


def check_each_fault_of_a_staged_copy_shows() -> None:
    arguments = StandinPlatform(), torch.device("standin:1"), tensor_kernels()
    right = gradients_of(DevicePlace(*arguments))
    assert right == gradients_of(DevicePlace(*arguments), freed=False) and standin.unpinned_asynchronous_copies() == 0
    assert gradients_of(Unordered(*arguments), freed=False) != right
    assert gradients_of(Unrecorded(*arguments)) != right
    assert gradients_of(DevicePlace(Hasty(), *arguments[1:]), freed=False) != right
    assert gradients_of(Unpinned(*arguments)) == right and standin.unpinned_asynchronous_copies() > 0


def check_an_upload_that_nobody_waits_for_shows() -> None:
    for platform in (StandinPlatform(), Hasty()):
        place = DevicePlace(platform, torch.device("standin:1"), tensor_kernels())
        reserved = place.reserve(4)
        if isinstance(platform, Hasty):
            reserved = replace(reserved, free=StandinPlatform().new_event())
        place.fill(reserved, torch.ones(4))
        seen = reserved.values.tolist()
        assert (seen == [1.0] * 4) == (not isinstance(platform, Hasty)), (platform, seen)
