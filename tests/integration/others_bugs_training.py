"""``pretrain_gpt.py`` with the mechanism of a bug that another project reported, on rank ``OTHERS_RANK``.

``OTHERS_BUG`` names it. Each does what the code did or left undone there; everything else is the real job. The cases
and their sources: ``docs/bugs-of-others.md``.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.elastic.adaptor  # noqa: F401 - it patches Megatron

# isort: split

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.training import training

from megatron.elastic.engine.compute.model_interface import UnitParameter
from megatron.elastic.engine.transaction.save import Want
from megatron.elastic.mcore.checkpoint.background_save import _Write
from megatron.elastic.mcore.checkpoint.content import Content
from megatron.elastic.mcore.checkpoint.state_dict import LoadedState, OptimizerCheckpoint
from megatron.elastic.mcore.model.gpt import GptInterface

ROOT = Path(__file__).resolve().parents[2]


def tiny_numbers_written() -> None:
    """The writer emits another tensor than the one it was given: denormals."""
    deliver, struck = Content.deliver, list[Want]()

    def wrong(self: Content, want: Want, values: torch.Tensor) -> None:
        if not struck:
            struck.append(want)
            values = torch.full_like(values, 1e-42)
        deliver(self, want, values)

    Content.deliver = wrong  # type: ignore[method-assign]


def moments_of_another_optimizer() -> None:
    """Loaded moments go to parameters of the same size that another optimizer has."""
    finish_load = OptimizerCheckpoint.finish_load

    def mixed(self: OptimizerCheckpoint, state_dict: Any) -> LoadedState:
        loaded = finish_load(self, state_dict)
        for rows in loaded.state.values():
            rows[1:] = rows[1:].roll(rows.shape[1] // 2, dims=1)
        return loaded

    OptimizerCheckpoint.finish_load = mixed  # type: ignore[method-assign]


def moments_begin_at_zero() -> None:
    """Weights are restored, moments are not: the shards that hold them were mis-sliced into nothing."""
    finish_load = OptimizerCheckpoint.finish_load

    def empty(self: OptimizerCheckpoint, state_dict: Any) -> LoadedState:
        loaded = finish_load(self, state_dict)
        for rows in loaded.state.values():
            rows[1:] = 0
        return loaded

    OptimizerCheckpoint.finish_load = empty  # type: ignore[method-assign]


def own_shard_taken_for_a_replica() -> None:
    """A tensor-parallel rank declares its own shards to be copies of those of another rank, and writes none of them."""
    save = OptimizerCheckpoint.save

    def declared(self: OptimizerCheckpoint, model_state: Any, groups: Any, metadata: Any) -> Any:
        state = save(self, model_state, groups, metadata)
        for item in nested_values([model_state, state]):
            if isinstance(item, ShardedTensor) and "linear_fc1.weight" in item.key:
                item.replica_id = (0, 1, 0)
        return state

    OptimizerCheckpoint.save = declared  # type: ignore[method-assign]


def share_not_written() -> None:
    """A rank reports that its share is written, and has written none."""

    def nothing(self: _Write) -> None:
        if self.request is not None and self.request.async_fn is not None:
            self.request.async_fn_args[2].put({})

    _Write._write = nothing  # type: ignore[method-assign]


def partial_sums_of_a_norm() -> None:
    """Under sequence parallelism the gradient of the final norm is not summed over the tensor-parallel group."""
    partial = GptInterface._partial

    def unmarked(self: GptInterface, item: UnitParameter) -> bool:
        return "final_layernorm" not in item.spec.name and partial(self, item)

    GptInterface._partial = unmarked  # type: ignore[method-assign]


def frozen_before_start() -> None:
    """The script freezes the final norm before the optimizer is made."""
    get_model = training.get_model

    def frozen(*args: Any, **kwargs: Any) -> Any:
        model = get_model(*args, **kwargs)
        for chunk in model:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_("final_layernorm" not in name)
        return model

    training.get_model = frozen


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__: bug
    for bug in (
        tiny_numbers_written,
        moments_of_another_optimizer,
        moments_begin_at_zero,
        own_shard_taken_for_a_replica,
        share_not_written,
        partial_sums_of_a_norm,
        frozen_before_start,
    )
}


if __name__ == "__main__":
    if os.environ["OTHERS_RANK"] in (os.environ["RANK"], "all"):
        BUGS[os.environ["OTHERS_BUG"]]()
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
