"""Stages of the launch that a rank writes beside its own, because nobody who was launched on them is here.

A checkpoint has the launch's shape, and each rank plans what its place at launch would
write. After the loss of a whole stage (its layers are computed elsewhere, or by spares)
somebody has to plan for it: Megatron's own model of that stage is built once more, as
on a rank of it, and keeps no memory: its parameters have their shapes only while a save
is planned. What is written comes from the state blocks, as everything else does.
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
    """Rank → stages it writes for, besides its own: one of a whole tensor-parallel group, if there is any.

    Raises ``OSError`` where nobody has the tensor-parallel rank to write a stage for.
    """
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
                raise OSError(f"no rank of the launch is here that could write tensor-parallel rank {shard}")
            found.setdefault((whole or able)[0], []).append(stage)
    return {rank: tuple(stages) for rank, stages in found.items()}


@dataclass(frozen=True)
class AbsentStages:
    """``build``: the chunks Megatron makes for the stage that ``parallel_state`` says this is."""

    build: Callable[[], list[torch.nn.Module]]
    groups: GroupKeys

    def place(self, stage: int) -> LaunchStage:
        """What a rank of ``stage`` would write; its parameters are empty."""
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
        """Inside, Megatron takes this process for the first replica's rank of ``stage``."""
        args, state = get_args(), parallel_state
        stages, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
        before = state._PIPELINE_MODEL_PARALLEL_GROUP, state.get_data_parallel_rank()
        with ExitStack() as stack:
            stack.enter_context(as_stage(stage, stages, chunks))
            state._PIPELINE_MODEL_PARALLEL_GROUP = GroupStandIn(stage, stages)
            state.set_data_parallel_rank(0)
            try:
                yield
            finally:
                state._PIPELINE_MODEL_PARALLEL_GROUP = before[0]
                state.set_data_parallel_rank(before[1])
