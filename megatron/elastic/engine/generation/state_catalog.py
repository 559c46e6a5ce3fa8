"""The catalogue of the job's state: the parameters of every unit and shard, known to every rank.

Each rank lays out its own units from its parameters. Mirrors may be on ranks of other
stages, so every rank also needs the layouts of all other ranks. Ranks exchange them once, at the
start, and a newcomer receives them: afterwards layouts are constant.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.elastic.comm.exchange import gather_messages
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.engine.compute.model_interface import ModelInterface
from megatron.elastic.state.layout import ParamSpec, UnitLayout

__all__ = ["Catalog", "build_layouts", "exchange_catalog", "own_catalog"]

Catalog = dict[tuple[int, int], tuple[ParamSpec, ...]]


def own_catalog(interface: ModelInterface, shard: int) -> Catalog:
    """Return (unit, shard) → parameter specs, of the units that this rank holds."""
    return {
        (unit, shard): tuple(item.spec for item in interface.unit_parameters(unit)) for unit in interface.held_units()
    }


def exchange_catalog(interface: ModelInterface, shard: int, fabric: Fabric) -> Catalog:
    """Return (unit, shard) → parameter specs, of the whole job. Collective over ``fabric.world``.

    Raises ``ValueError`` when two holders of a unit disagree about it.
    """
    catalog: Catalog = {}
    for part in gather_messages(fabric, Catalog, own_catalog(interface, shard)).values():
        for key, specs in part.items():
            if catalog.setdefault(key, specs) != specs:
                raise ValueError(f"unit {key[0]}, tensor-parallel rank {key[1]}: ranks disagree about its parameters")
    return catalog


def build_layouts(
    catalog: Mapping[tuple[int, int], tuple[ParamSpec, ...]], block_bytes: int
) -> dict[tuple[int, int], UnitLayout]:
    """Return the layout of every (unit, shard)."""
    return {
        (unit, shard): UnitLayout.build(unit, shard, specs, block_bytes)
        for (unit, shard), specs in sorted(catalog.items())
    }
