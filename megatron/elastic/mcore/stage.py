"""Another place than the one at launch: Megatron's global idea of the running stage for a time, and groups by value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron.core import parallel_state

__all__ = ["GroupStandIn", "as_stage"]


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
def as_stage(rank: int, size: int) -> Iterator[None]:
    """Inside, ``parallel_state`` says stage ``rank`` of ``size``; what it said before returns afterwards."""
    before = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    parallel_state.set_pipeline_model_parallel_rank(rank)
    parallel_state.set_pipeline_model_parallel_world_size(size)
    try:
        yield
    finally:
        parallel_state.set_pipeline_model_parallel_rank(before[0])
        parallel_state.set_pipeline_model_parallel_world_size(before[1])
