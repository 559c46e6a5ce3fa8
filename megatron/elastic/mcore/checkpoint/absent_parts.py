"""Parts of a checkpoint that a rank writes beside its own, because all ranks that would write them are lost.

A checkpoint has the launch's shape, and each rank plans the part of its place at launch: one shard of a stage, and
where ranks share experts those of its seat. Several ranks have the same shard, others the same seat. When all of them
are lost (other ranks or spares compute their units), a living rank plans in place of one of them. It builds Megatron's
own model of that place once more, in stand-ins for the groups of a rank there. The model takes no memory: its
parameters have their shapes only while a save is planned. The written values come from the state blocks, like all
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.training import get_args

from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.mcore.checkpoint.launch_stage import LaunchStage
from megatron.elastic.mcore.model.expert_homes import is_expert
from megatron.elastic.mcore.model.gpt import GptInterface
from megatron.elastic.mcore.model.param_groups import GroupKeys
from megatron.elastic.mcore.parallel_state.stage import GroupStandIn, as_place, as_stage

__all__ = ["AbsentParts", "Duty", "duties"]


@dataclass(frozen=True)
class Duty:
    """The parts that a rank writes in place of ``rank`` of the launch."""

    rank: int
    experts: bool
    """Its experts."""
    rest: bool
    """All but its experts."""

    def has(self, key: str) -> bool:
        """Return whether the tensor or object of this key in a checkpoint belongs to these parts."""
        return self.experts if is_expert(key) else self.rest


def _parts_of(launch_topology: LaunchTopology, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (stage, shard) and (stage, seat of experts) that a rank of the launch writes.

    Where ranks share no experts, each has those of its shard: the seat's number is then the shard's.
    """
    place = launch_topology.place(rank)
    assert place is not None, f"rank {rank} is beyond those of the launch"
    shard, _, stage = place
    return (stage, shard), (stage, launch_topology.expert_seat(rank) if launch_topology.experts else shard)


def duties(launch_topology: LaunchTopology, living: Sequence[int]) -> dict[int, tuple[Duty, ...]]:
    """Return rank → parts that it writes besides its own; prefers ranks of whole cells, with the fewest of them.

    Raises ``OSError`` if no rank of the launch is left.
    """
    launched = [rank for rank in sorted(living) if rank < launch_topology.slots]
    if not launched:
        raise OSError("no rank of the launch is left to write a checkpoint")
    whole = [rank for rank in launched if set(launch_topology.cell_of(rank).ranks) <= set(launched)]
    found: dict[int, list[Duty]] = {rank: [] for rank in whole or launched}
    shards, seats = (set(parts) for parts in zip(*(_parts_of(launch_topology, rank) for rank in launched), strict=True))
    for rank in range(launch_topology.slots):
        shard, seat = _parts_of(launch_topology, rank)
        if shard in shards and seat in seats:
            continue
        writer = min(found, key=lambda able: (len(found[able]), able))
        found[writer].append(Duty(rank, experts=seat not in seats, rest=shard not in shards))
        shards.add(shard)
        seats.add(seat)
    return {rank: tuple(parts) for rank, parts in found.items() if parts}


@dataclass(frozen=True)
class AbsentParts:
    """Builds models of absent places. ``build``: makes Megatron's chunks for the place in ``parallel_state``."""

    launch_topology: LaunchTopology
    build: Callable[[], list[torch.nn.Module]]
    groups: GroupKeys

    def place(self, rank: int) -> LaunchStage:
        """Return the launch stage of ``rank`` of the launch, with empty parameters."""
        args: Any = get_args()
        initialize, args.perform_initialization = args.perform_initialization, False
        try:
            with self.standing_at(rank), torch.random.fork_rng(devices=[]):
                interface = GptInterface(self.build(), args, self.groups, False, rank=rank)
        finally:
            args.perform_initialization = initialize
        launched = {unit: tuple(interface.unit_parameters(unit)) for unit in interface.held_units()}
        interface.hold(())
        return LaunchStage(rank, interface, launched)

    @contextmanager
    def standing_at(self, rank: int) -> Iterator[None]:
        """Have Megatron treat this process as the only replica of ``rank`` of the launch, inside the context."""
        args: Any = get_args()
        place = self.launch_topology.place(rank)
        assert place is not None, f"rank {rank} is beyond those of the launch"
        shard, _, stage = place
        stages, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
        homes, parts = args.expert_model_parallel_size, args.expert_tensor_parallel_size
        groups = as_place(
            tensor=GroupStandIn(shard, args.tensor_model_parallel_size),
            pipeline=GroupStandIn(stage, stages),
            expert_home=GroupStandIn(rank // parts % homes, homes),
            expert_part=GroupStandIn(rank % parts, parts),
        )
        with as_stage(stage, stages, chunks), groups:
            yield
