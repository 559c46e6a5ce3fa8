"""Stages of the launch that a rank writes beside its own, because all ranks launched on them are lost.

A checkpoint has the launch's shape, and each rank plans the part of its place at launch.
After the loss of a whole stage (other ranks or spares compute its layers) another
rank has to plan for it. It builds Megatron's own model of that stage once more, as
on a rank of it. The model takes no memory: its parameters have their shapes only while a
save is planned. The written values come from the state blocks, like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.training import get_args

from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.mcore.checkpoint.launch_stage import LaunchStage
from megatron.elastic.mcore.model.gpt import GptInterface
from megatron.elastic.mcore.model.param_groups import GroupKeys
from megatron.elastic.mcore.parallel_state.stage import GroupStandIn, as_stage

__all__ = ["AbsentStages", "duties"]


def duties(launch_topology: LaunchTopology, living: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return rank → stages that it writes besides its own; prefers ranks of whole tensor-parallel groups.

    Raises ``OSError`` if no living rank of the launch has the tensor-parallel rank of such a stage, or some experts.
    """
    _require_experts(launch_topology, living)
    places = {rank: place for rank in living if (place := launch_topology.place(rank)) is not None}
    launched = {(shard, stage) for shard, _, stage in places.values()}
    found: dict[int, list[int]] = {}
    for stage in range(launch_topology.pipeline):
        for shard in range(launch_topology.tensor):
            if (shard, stage) in launched:
                continue
            able = [rank for rank, place in sorted(places.items()) if place[0] == shard]
            whole = [rank for rank in able if set(launch_topology.cell_of(rank).ranks) <= set(living)]
            if not able:
                raise OSError(f"no living rank can write the part of tensor-parallel rank {shard}")
            found.setdefault((whole or able)[0], []).append(stage)
    return {rank: tuple(stages) for rank, stages in found.items()}


def _require_experts(launch_topology: LaunchTopology, living: Sequence[int]) -> None:
    """Raise ``OSError`` unless each expert has a living rank of the launch that had it there."""
    if not launch_topology.experts:
        return
    placed = [(rank, place[2]) for rank in living if (place := launch_topology.place(rank)) is not None]
    launched = {(stage, launch_topology.expert_seat(rank)) for rank, stage in placed}
    for stage in range(launch_topology.pipeline):
        for seat in range(launch_topology.expert_ranks):
            if (stage, seat) not in launched:
                experts = ", ".join(map(str, launch_topology.experts_of_seat(seat)))
                raise OSError(f"all ranks are missing that write experts {experts} of pipeline stage {stage}")


@dataclass(frozen=True)
class AbsentStages:
    """Builds models of absent stages. ``build``: makes Megatron's chunks for the stage in ``parallel_state``."""

    build: Callable[[], list[torch.nn.Module]]
    groups: GroupKeys

    def place(self, stage: int) -> LaunchStage:
        """Return the launch stage of a rank of ``stage``, with empty parameters."""
        args: Any = get_args()
        initialize, args.perform_initialization = args.perform_initialization, False
        try:
            with self.standing_at(stage), torch.random.fork_rng(devices=[]):
                chunks = self.build()
        finally:
            args.perform_initialization = initialize
        interface = GptInterface(chunks, args, self.groups, False)
        launched = {unit: tuple(interface.unit_parameters(unit)) for unit in interface.held_units()}
        interface.hold(())
        return LaunchStage(interface, launched)

    @contextmanager
    def standing_at(self, stage: int) -> Iterator[None]:
        """Have Megatron treat this process as the first replica's rank of ``stage``, inside the context.

        There is no group of the stages that share the embedding: a model that is built exchanges nothing.
        """
        args, state = get_args(), parallel_state
        stages, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
        before = state._PIPELINE_MODEL_PARALLEL_GROUP, state.get_data_parallel_rank(), state._EMBEDDING_GROUP
        with ExitStack() as stack:
            stack.enter_context(as_stage(stage, stages, chunks))
            state._PIPELINE_MODEL_PARALLEL_GROUP, state._EMBEDDING_GROUP = GroupStandIn(stage, stages), None
            state.set_data_parallel_rank(0)
            try:
                yield
            finally:
                state._PIPELINE_MODEL_PARALLEL_GROUP, state._EMBEDDING_GROUP = before[0], before[2]
                state.set_data_parallel_rank(before[1])
