"""The memory in which owned blocks lie, decided once at the start of a job and equal on all ranks of it.

Owners lie on the device where the platform is an accelerator and their state fits beside the model on every rank
(``--elastic-state``). Each rank also tries whether its device steps with the host's bits (``state.step_selftest``);
if that of some rank does not, mirrors receive stepped state instead of gradients (docs/design.md §6.9).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from megatron.elastic.comm.exchange import gather_messages
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.config import ConfigError, ElasticConfig
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.engine.compute.model_interface import ModelInterface
from megatron.elastic.engine.generation.hardware import OwnerMemory
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.platform.base import Platform
from megatron.elastic.platform.own_device import own_device
from megatron.elastic.state.device_place import DevicePlace, Kernels, tensor_kernels
from megatron.elastic.state.layout import BlockKey, UnitLayout, UnitShard
from megatron.elastic.state.memory import OWNER_BYTES, SUM_BYTES, Training, table
from megatron.elastic.state.step_selftest import differing

__all__ = ["agree_on_owners", "bytes_needed", "device_place", "lines", "training_of"]


@dataclass(frozen=True)
class _Finding:
    """The finding of one rank."""

    fits: bool
    differing: tuple[str, ...]
    kernels: str


def device_place(platform: Platform) -> DevicePlace | None:
    """Return this rank's device as a place of copies; None on a CPU."""
    if platform.synchronous:
        return None
    device = platform.device(own_device(platform))
    return DevicePlace(platform, device, _kernels(device.type))


def _kernels(device_type: str) -> Kernels:
    if device_type == "cuda" and importlib.util.find_spec("triton") is not None:
        from megatron.elastic.state.adam_triton import triton_kernels

        return triton_kernels()
    return tensor_kernels()


def training_of(config: ElasticConfig, topology: LaunchTopology, arena: Arena, owners: OwnerMemory) -> Training:
    """Return the figures of this rank's memory at launch."""
    return Training(
        parameters=arena.state_stop,
        ranks=topology.grid.data_parallel_size,
        itemsize=arena.dtype.itemsize,
        mirrors=min(config.mirrors, topology.slots + config.spares - 1),
        on_device=owners.on_device,
        snapshot=config.snapshot if owners.same_bits else "state",
        accelerator=arena.device.type != "cpu",
        exact=config.exact,
    )


def bytes_needed(
    topology: LaunchTopology,
    interface: ModelInterface,
    layouts: Mapping[UnitShard, UnitLayout],
    owned: Iterable[BlockKey],
    arena: Arena,
    exact: bool,
) -> int:
    """Return the device bytes of ``owned`` blocks, and of what the forwards of a full pipeline keep on this rank.

    Layers in FP8 keep copies of their weights, too, and ``exact`` mode sums of gradients.
    """
    elements = sum(layouts[key[:2]].blocks[key[2]].numel for key in owned)
    rows = topology.grid.micro_batch_size * topology.pipeline
    activations = sum(rows * interface.activation_bytes(u) for u in arena.held.units if u < topology.compute_units)
    slots = (slot for piece in arena.slices.values() for slot in piece.layout.slots)
    quantized = sum(interface.quantized_bytes(slot.spec) for slot in slots)
    return OWNER_BYTES * elements + activations + quantized + (SUM_BYTES * arena.state_stop if exact else 0)


def agree_on_owners(
    fabric: Fabric, config: ElasticConfig, platform: Platform, needed: int, sharing: int
) -> OwnerMemory:
    """Return where owners lie. Collective.

    ``needed``: :func:`bytes_needed` on this rank, beside what it holds already. ``sharing``: most ranks of a device.

    Raises ``ConfigError`` for what was asked for and does not hold.
    """
    place = device_place(platform)
    if place is None or config.state == "host":
        return OwnerMemory()
    free = platform.memory(own_device(platform)).free // sharing
    mine = _Finding(needed <= free, differing(place), place.kernels.name)
    found = gather_messages(fabric, _Finding, mine)
    if config.state == "auto" and not all(one.fits for one in found.values()):
        return OwnerMemory()
    unlike = {rank: one for rank, one in found.items() if one.differing}
    for rank, one in sorted(unlike.items())[:1]:
        what = f"the device of rank {rank} computes {' and '.join(one.differing)} ({one.kernels}) with other bits"
        if config.exact:
            raise ConfigError(f"--elastic-exact: {what} than the host: use --elastic-state host")
        if fabric.rank == fabric.alive[0] and config.snapshot == "gradient":
            print(
                f"--elastic-state: {what} than the host, so copies receive state (--elastic-snapshot state)", flush=True
            )
    return OwnerMemory(True, not unlike)


def lines(training: Training) -> Iterator[str]:
    """Yield the table of memory that is printed at the start."""
    heads = ("", "device B", "host B", "device GiB", "host GiB")
    rows = [heads, *table(training)]
    yield f"memory a parameter, and of a rank with {training.parameters:,} in a group of {training.ranks}:"
    for name, *values in rows:
        yield f"  {name:<34}" + "".join(f"{value:>12}" for value in values)
