"""The tensors of a save: empty while Megatron plans over them, filled afterwards.

Megatron plans a save over tensors: it needs their shapes, not their contents. The
optimizer's and the model's own tensors are registered here as ranges in the state of
a unit. Before the plan is made, each tensor that this rank is to write is
replaced by a new one. Tensors that this rank does not write are not allocated; other
values (buffers, scalars) are copied at once.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megatron.elastic.engine.transaction.save import Want

__all__ = ["Content", "strategy_for"]


@dataclass(frozen=True)
class _Part:
    """A tensor to be written: ``values`` is the view ``size``/``stride`` from ``offset`` on of the flat want."""

    values: torch.Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Content:
    """The tensors of one save on this rank."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._known: list[tuple[int, torch.Tensor, Want]] = []
        self._parts: dict[Want, list[_Part]] = {}

    @property
    def wants(self) -> tuple[Want, ...]:
        """Ranges of state that this rank has to receive."""
        return tuple(sorted(self._parts))

    def register(self, tensor: torch.Tensor, want: Want) -> None:
        """Register ``tensor`` (contiguous) as the elements of ``want``; its contents do not matter."""
        start = tensor.data_ptr()
        at = bisect.bisect(self._starts, start)
        self._starts.insert(at, start)
        self._known.insert(at, (start + tensor.numel() * tensor.element_size(), tensor, want))

    def detach(self, sharded_state_dict: Any) -> None:
        """Give every tensor that this rank writes new storage."""
        for item in nested_values(sharded_state_dict):
            if isinstance(item, ShardedTensor) and item.data is not None and is_main_replica(item.replica_id):
                item.data = self._own(item.data.detach())

    def _own(self, data: torch.Tensor) -> torch.Tensor:
        at = bisect.bisect(self._starts, data.data_ptr()) - 1
        if at < 0 or data.data_ptr() >= self._known[at][0] or not data.numel():
            return data.clone()
        _, tensor, want = self._known[at]
        offset = (data.data_ptr() - tensor.data_ptr()) // data.element_size()
        own = torch.empty(data.shape, dtype=data.dtype)
        self._parts.setdefault(want, []).append(_Part(own, data.shape, data.stride(), offset))
        return own

    def deliver(self, want: Want, values: torch.Tensor) -> None:
        """Fill in fp32 ``[stop − start]``, rounded to the written type. Any thread."""
        for part in self._parts[want]:
            part.values.copy_(values.as_strided(part.size, part.stride, part.offset))


class _Detached(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's strategy over tensors that are filled later."""

    def __init__(self, content: Content) -> None:
        super().__init__()
        self._content = content

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> Any:
        self._content.detach(sharded_state_dict)
        return super().async_save(sharded_state_dict, checkpoint_dir, "mcore")


def strategy_for(args: Any, content: Content) -> Any:
    """Return the save strategy that Megatron would make for these arguments, over ``content``."""
    strategy = _Detached(content)
    strategy.thread_count = args.dist_ckpt_workers
    if not args.ckpt_fully_parallel_save:
        return strategy
    by_expert = args.ckpt_fully_parallel_save_process_group == "ep_dp"
    group = (
        parallel_state.get_expert_data_parallel_group()
        if by_expert
        else parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    return FullyParallelSaveStrategyWrapper(strategy, group)
