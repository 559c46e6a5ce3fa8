"""The catalogue of the job's state: the parameters of every unit and shard, known to every rank.

Parameters that are replicated over a tensor-parallel group form the common part of a unit
(:attr:`LaunchTopology.common`); all its holders have equal specifications.

Each rank lays out its own units from its parameters. Mirrors may be on ranks of other
stages, so every rank also needs the layouts of all other ranks. Ranks exchange them once, at the
start, and a newcomer receives them: afterwards layouts are constant.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.elastic.comm.exchange import gather_messages
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.engine.compute.buffers import HeldPart
from megatron.elastic.engine.compute.model_interface import ModelInterface
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.state.layout import ParamSpec, UnitLayout, UnitShard

__all__ = ["Catalog", "build_layouts", "built", "exchange_catalog", "own_catalog"]

Catalog = dict[UnitShard, tuple[ParamSpec, ...]]


def own_catalog(interface: ModelInterface, launch_topology: LaunchTopology, rank: int) -> Catalog:
    """Return (unit, shard) → parameter specs, of the units that ``rank`` holds, cut as at the launch.

    A unit without parameters of a kind has no entry for it.
    """
    catalog: dict[UnitShard, list[ParamSpec]] = {}
    for unit in interface.held_units():
        for item in interface.unit_parameters(unit):
            shard = launch_topology.shard_of(rank, item.spec)
            catalog.setdefault((unit, shard), []).append(item.spec)
    return {key: tuple(specs) for key, specs in catalog.items()}


def built(interface: ModelInterface, catalog: Catalog, launch_topology: LaunchTopology, rank: int) -> HeldPart:
    """Return the part of the model that the process of ``rank`` has built for the launch; ``catalog``: its own.

    A unit without parameters belongs to it too: the first one where embeddings are tied and positions have none.
    """
    place = Assignment.at_launch(launch_topology).place(rank)
    return HeldPart(tuple(interface.held_units()), place, tuple(catalog))


def exchange_catalog(interface: ModelInterface, launch_topology: LaunchTopology, fabric: Fabric) -> Catalog:
    """Return (unit, shard) → parameter specs, of the whole job. Collective over ``fabric.world``.

    Raises ``ValueError`` when two holders of a unit disagree about it.
    """
    catalog: Catalog = {}
    for part in gather_messages(fabric, Catalog, own_catalog(interface, launch_topology, fabric.rank)).values():
        for key, specs in part.items():
            if catalog.setdefault(key, specs) != specs:
                raise ValueError(f"unit {key[0]}, shard {key[1]}: ranks disagree about its parameters")
    return catalog


def build_layouts(
    catalog: Mapping[UnitShard, tuple[ParamSpec, ...]], block_bytes: int | None
) -> dict[UnitShard, UnitLayout]:
    """Return the layout of every (unit, shard), cut at ``block_bytes`` (None: :meth:`UnitLayout.build` decides)."""
    return {
        (unit, shard): UnitLayout.build(unit, shard, specs, block_bytes)
        for (unit, shard), specs in sorted(catalog.items())
    }
