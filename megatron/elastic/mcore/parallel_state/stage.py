"""Temporary changes of Megatron's global stage and tensor-parallel group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

__all__ = [
    "GroupStandIn",
    "as_context_group",
    "as_first_of_tensor_group",
    "as_place",
    "as_stage",
    "as_tensor_group",
    "whole_tensor_group",
]


@dataclass(frozen=True)
class GroupStandIn:
    """A parallel group for code that only uses its rank and size."""

    number: int
    count: int

    def rank(self) -> int:
        """Return this process's rank in it."""
        return self.number

    def size(self) -> int:
        """Return the number of members."""
        return self.count


@contextmanager
def as_stage(rank: int, size: int, chunks: int | None = None) -> Iterator[None]:
    """Set ``parallel_state`` to stage ``rank`` of ``size`` with ``chunks`` model chunks (None: not interleaved).

    The context restores the previous values at its end.
    """
    before = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
    )
    _set_stage(rank, size, chunks)
    try:
        yield
    finally:
        _set_stage(*before)


def _set_stage(rank: int, size: int, chunks: int | None) -> None:
    parallel_state.set_pipeline_model_parallel_rank(rank)
    parallel_state.set_pipeline_model_parallel_world_size(size)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)


@contextmanager
def as_tensor_group(group: dist.ProcessGroup) -> Iterator[None]:
    """Make ``group`` the tensor-parallel group of ``parallel_state``, with its rank and size, inside the context."""
    mine = {
        "_TENSOR_MODEL_PARALLEL_GROUP": group,
        "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": dist.get_process_group_ranks(group),
        "_MPU_TENSOR_MODEL_PARALLEL_RANK": group.rank(),
        "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE": group.size(),
    }
    with _set(mine):
        yield


@contextmanager
def as_context_group(group: dist.ProcessGroup) -> Iterator[None]:
    """Make ``group`` the context-parallel group of ``parallel_state`` inside the context."""
    ranks = dist.get_process_group_ranks(group)
    with _set({"_CONTEXT_PARALLEL_GROUP": group, "_CONTEXT_PARALLEL_GLOBAL_RANKS": ranks}):
        yield


@contextmanager
def as_place(
    *, tensor: GroupStandIn, pipeline: GroupStandIn, expert_home: GroupStandIn, expert_part: GroupStandIn
) -> Iterator[None]:
    """Show Megatron these ranks in its groups, and no other replica, inside the context.

    ``expert_home``: among the ranks with other experts; ``expert_part``: among those with parts of the same ones.
    There is no group of the stages that share the embedding: a model that is built exchanges nothing.
    """
    seat = expert_home.rank() * expert_part.size() + expert_part.rank()
    mine = {
        "_TENSOR_MODEL_PARALLEL_GROUP": tensor,
        "_MPU_TENSOR_MODEL_PARALLEL_RANK": tensor.rank(),
        "_PIPELINE_MODEL_PARALLEL_GROUP": pipeline,
        "_EMBEDDING_GROUP": None,
        "_MPU_DATA_PARALLEL_RANK": 0,
        "_EXPERT_MODEL_PARALLEL_GROUP": expert_home,
        "_EXPERT_TENSOR_PARALLEL_GROUP": expert_part,
        "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": GroupStandIn(seat, expert_home.size() * expert_part.size()),
        "_EXPERT_DATA_PARALLEL_GROUP": GroupStandIn(0, 1),
    }
    with _set(mine):
        yield


@contextmanager
def _set(mine: Mapping[str, object]) -> Iterator[None]:
    """Set these names of ``parallel_state`` inside the context."""
    before = {name: getattr(parallel_state, name) for name in mine}
    try:
        for name, value in mine.items():
            setattr(parallel_state, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(parallel_state, name, value)


@contextmanager
def as_first_of_tensor_group() -> Iterator[None]:
    """Show Megatron the first rank of the tensor-parallel group inside the context: only that one builds data sets."""
    before = parallel_state.get_tensor_model_parallel_rank()
    parallel_state.set_tensor_model_parallel_rank(0)
    try:
        yield
    finally:
        parallel_state.set_tensor_model_parallel_rank(before)


@contextmanager
def whole_tensor_group(model: torch.nn.Module) -> Iterator[None]:
    """Show Megatron the tensor-parallel group of the launch inside the context, also if a member is missing.

    Only rank and size are shown: a parked rank writes its slice of every parameter to a checkpoint, but computes
    nothing.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    whole = GroupStandIn(
        parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    )
    if group.size() == whole.size():
        yield
        return
    collections = {id(found): found for module in model.modules() if (found := getattr(module, "pg_collection", None))}
    owners = (*model.modules(), *collections.values())
    places = [(owner, name) for owner in owners for name, value in vars(owner).items() if value is group]
    _put(places, whole)
    try:
        yield
    finally:
        _put(places, group)


def _put(places: Iterable[tuple[object, str]], group: object) -> None:
    for owner, name in places:
        setattr(owner, name, group)
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = group
