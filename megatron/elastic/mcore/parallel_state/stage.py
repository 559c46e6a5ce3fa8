"""Another place than the one at launch: Megatron's global idea of the running stage for a time, and groups by value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

__all__ = ["GroupStandIn", "as_stage", "whole_tensor_group"]


@dataclass(frozen=True)
class GroupStandIn:
    """A parallel group for code that only asks for its rank and size."""

    number: int
    count: int

    def rank(self) -> int:
        """This process's rank in it."""
        return self.number

    def size(self) -> int:
        """Number of members."""
        return self.count


@contextmanager
def as_stage(rank: int, size: int, chunks: int | None = None) -> Iterator[None]:
    """Inside, ``parallel_state`` says stage ``rank`` of ``size``, with ``chunks`` model chunks (None: not interleaved).

    What it said before returns afterwards.
    """
    before = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
    )
    _stand_at(rank, size, chunks)
    try:
        yield
    finally:
        _stand_at(*before)


def _stand_at(rank: int, size: int, chunks: int | None) -> None:
    parallel_state.set_pipeline_model_parallel_rank(rank)
    parallel_state.set_pipeline_model_parallel_world_size(size)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)


@contextmanager
def whole_tensor_group(model: torch.nn.Module) -> Iterator[None]:
    """Inside, Megatron finds the tensor-parallel group of the launch, also where a member of it is missing.

    By value only: a parked rank has its cut of every parameter, and says so in a checkpoint, but computes nothing.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    launch_topology = GroupStandIn(
        parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    )
    if group.size() == launch_topology.size():
        yield
        return
    collections = {id(found): found for module in model.modules() if (found := getattr(module, "pg_collection", None))}
    owners = (*model.modules(), *collections.values())
    places = [(owner, name) for owner in owners for name, value in vars(owner).items() if value is group]
    _put(places, launch_topology)
    try:
        yield
    finally:
        _put(places, group)


def _put(places: Iterable[tuple[object, str]], group: object) -> None:
    for owner, name in places:
        setattr(owner, name, group)
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = group
