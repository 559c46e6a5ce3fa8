"""Megatron's groups on ranks beyond those of the launch, which are hidden from Megatron.

Megatron derives every size from the number of ranks, and its groups from all of them. If there are more ranks than at
launch (spares, workers of further nodes), it sees W ranks while it makes its groups. During that time an extra rank
takes the same place in the first cell. So its arguments and its model are those of a
pipeline's first stage; later the engine chooses the units that it holds. Its tensor-parallel and context-parallel
groups are those of its own cell. Every other group of Megatron contains ranks of that cell only, so that no other rank
waits for it there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d as c10d

from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.mcore.parallel_state.stage import GroupStandIn

__all__ = ["as_of_the_launch", "is_extra"]


def is_extra(fabric: Fabric, args: Any) -> bool:
    """Return whether this rank is beyond those of the launch."""
    return fabric.rank >= int(args.world_size)


@contextmanager
def as_of_the_launch(fabric: Fabric, args: Any) -> Iterator[None]:
    """Have Megatron initialise its groups for the ``args.world_size`` ranks of the launch, inside the context."""
    world, rank, cell = args.world_size, fabric.rank, args.tensor_model_parallel_size * args.context_parallel_size
    if fabric.slots == world:
        yield
        return
    index = rank % cell
    own = {mate: rank - index + mate for mate in range(cell)} if rank >= world else {}
    sizes = dist.get_world_size, dist.get_rank
    new_group: Any = getattr(c10d, "_new_group_with_tag")  # noqa: B009 (set by the fabric)

    def world_size(group: Any = None) -> int:
        return world if group is None else sizes[0](group)

    def rank_in(group: Any = None) -> int:
        return (index if own else rank) if group is None else sizes[1](group)

    def own_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if own and ranks is not None and index in ranks:
            ranks = [own[mate] for mate in ranks if mate in own]
        return new_group(ranks, *args, **kwargs)

    dist.get_world_size, dist.get_rank, c10d._new_group_with_tag = world_size, rank_in, own_group
    try:
        yield
    finally:
        dist.get_world_size, dist.get_rank = sizes
        c10d._new_group_with_tag = new_group
    args.rank = rank
    if own:
        _pin(own, args)


def _pin(own: dict[int, int], args: Any) -> None:
    """Pin an extra rank's sizes to the launch's, and its ranks to the first stage and to no replica."""
    for name, ranks in vars(parallel_state).items():
        if name.endswith("_GLOBAL_RANKS") and isinstance(ranks, list) and all(isinstance(r, int) for r in ranks):
            setattr(parallel_state, name, [own[rank] for rank in ranks if rank in own])
    stages, replicas = args.pipeline_model_parallel_size, args.data_parallel_size
    parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = GroupStandIn(0, stages)
    parallel_state.set_pipeline_model_parallel_rank(0)
    parallel_state.set_pipeline_model_parallel_world_size(stages)
    parallel_state.set_data_parallel_rank(replicas)
    parallel_state._MPU_DATA_PARALLEL_WORLD_SIZE = replicas
