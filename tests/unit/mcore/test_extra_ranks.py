"""A rank beyond the launch gets the sizes of the launch, its own tensor-parallel group, and no group to wait in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from torch.distributed import distributed_c10d as c10d

from megatron.elastic.mcore.parallel_state.extra_ranks import as_of_the_launch, is_extra

Groups = dict[str, tuple[int, ...]]


class Group:
    """A group that was asked for; ``rank`` is this process's."""

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        self.ranks, self.own = ranks, rank

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self.own)


def initialized(
    rank: int, tensor: int, pipeline: int, data: int, extra: int, context: int = 1
) -> tuple[Groups, SimpleNamespace, Any]:
    """Megatron's own groups as made by ``rank``: name → members; the arguments, and sizes that Megatron then tells."""
    world = tensor * pipeline * data * context
    args = SimpleNamespace(
        world_size=world,
        rank=0,
        tensor_model_parallel_size=tensor,
        context_parallel_size=context,
        pipeline_model_parallel_size=pipeline,
        data_parallel_size=data,
    )
    fabric: Any = SimpleNamespace(rank=rank, slots=world + extra)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vars(parallel_state).items():
            patch.setattr(parallel_state, name, value)  # all undone at the end
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_world_size", lambda group=None: world + extra if group is None else len(group.ranks))
        patch.setattr(dist, "get_rank", lambda group=None: rank if group is None else group.ranks.index(rank))
        patch.setattr(c10d, "_new_group_with_tag", lambda ranks, *a, **k: Group(tuple(ranks), rank))
        patch.setattr(dist, "barrier", lambda *_, **__: None)
        with as_of_the_launch(fabric, args):
            assert dist.get_world_size() == world
            parallel_state.initialize_model_parallel(tensor, pipeline, context_parallel_size=context)
        assert dist.get_world_size() == world + extra, "put back"
        groups = {
            "tensor": parallel_state._TENSOR_MODEL_PARALLEL_GROUP,
            "data": parallel_state._DATA_PARALLEL_GROUP,
            "context": parallel_state._CONTEXT_PARALLEL_GROUP,
            "model": parallel_state._MODEL_PARALLEL_GROUP,
        }
        sizes = (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
        )
        found = {name: group.ranks for name, group in groups.items() if isinstance(group, Group)}
        return found, args, (sizes, is_extra(fabric, args))


@settings(max_examples=40, deadline=None)
@given(
    tensor=st.integers(1, 3),
    pipeline=st.integers(1, 3),
    data=st.integers(1, 3),
    cells=st.integers(1, 2),
    context=st.integers(1, 3),
    d=st.data(),
)
def test_an_extra_rank_waits_for_its_own_cell_alone(
    tensor: int, pipeline: int, data: int, cells: int, context: int, d: st.DataObject
) -> None:
    size = tensor * context
    world, extra = size * pipeline * data, cells * size
    rank = d.draw(st.integers(world, world + extra - 1))
    groups, args, (sizes, beyond) = initialized(rank, tensor, pipeline, data, extra, context)
    cell = range(rank - rank % size, rank - rank % size + size)
    assert beyond and args.rank == rank
    first = rank - rank % tensor
    assert groups["tensor"] == tuple(range(first, first + tensor))
    assert groups["context"] == tuple(cell[rank % tensor :: tensor])
    assert groups["data"] == (rank,)
    assert set(groups["model"]) <= set(cell) and rank in groups["model"]
    assert sizes == (pipeline, 0, data), "the first stage of no replica"


@settings(max_examples=20, deadline=None)
@given(
    tensor=st.integers(1, 3), pipeline=st.integers(1, 3), data=st.integers(1, 3), extra=st.integers(0, 2), d=st.data()
)
def test_a_rank_of_the_launch_has_the_groups_of_a_job_without_more_ranks(
    tensor: int, pipeline: int, data: int, extra: int, d: st.DataObject
) -> None:
    rank = d.draw(st.integers(0, tensor * pipeline * data - 1))
    groups, args, (sizes, beyond) = initialized(rank, tensor, pipeline, data, extra * tensor)
    plain, _, (plain_sizes, _) = initialized(rank, tensor, pipeline, data, 0)
    assert groups == plain and sizes == plain_sizes and not beyond
    assert args.rank == (rank if extra else 0), "set only where Megatron could not know it"
