"""Arguments that c10d's Python callers pass to a process group, in any of its spellings.

A collective may come as (tensors, options), (tensor, op), or with keywords,
depending on the caller and the release of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist

__all__ = ["Op", "broadcast_in", "op_in", "options_in", "tensor_list"]

Op = dist.ReduceOp | dist.ReduceOp.RedOpType


def tensor_list(tensors: Any) -> list[torch.Tensor]:
    """Return one tensor or several as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def options_in(args: tuple[Any, ...], kwargs: dict[str, Any], kind: Callable[[], Any]) -> Any:
    """Return torch's options object among the arguments, or the default one of this ``kind``."""
    for value in (*args, *kwargs.values()):
        if hasattr(value, "rootRank") or hasattr(value, "reduceOp"):
            return value
    return kind()


def broadcast_in(tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], Any]:
    """Tensors and options of a broadcast, whose root may come as a bare number in the options' place."""
    opts = options_in(args, kwargs, dist.BroadcastOptions)
    if args and isinstance(args[0], int):
        opts.rootRank = args[0]
    return tensor_list(tensors), opts


def op_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op:
    """Return the reduction that the arguments ask for; the sum if they ask for none."""
    for value in (*args, *kwargs.values()):
        if hasattr(value, "reduceOp"):
            return cast(Op, value.reduceOp)
        if isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            return value
    return dist.ReduceOp.SUM
