"""Megatron's global idea of which pipeline stage is running, for a limited time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core import parallel_state

__all__ = ["as_stage"]


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
