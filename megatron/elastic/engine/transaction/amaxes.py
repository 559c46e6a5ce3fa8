"""The largest values of tensors in FP8 over all ranks, from which the scales of the next step follow.

The vote cannot carry them, since it adds up. They are agreed on once gradients are shipped, right before the vote: a
rank that votes has them of all ranks, so a vote can be repeated after a loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron.elastic.engine.transaction.tools import Tools

__all__ = ["largest_over_ranks"]


def largest_over_ranks(
    tools: Tools, living: tuple[int, ...], amaxes: Mapping[int, Sequence[float]]
) -> Mapping[int, Sequence[float]]:
    """Return unit → largest absolute value of each of its tensors over all ``living`` ranks. Collective.

    ``amaxes``: the same of the units that this rank computed. NaN counts as infinity. Nothing is exchanged unless
    scales follow past steps (:class:`DelayedScaling`).
    """
    scaling = tools.settings.hyper.scaling
    if scaling is None:
        return {}
    none = (0.0,) * len(scaling.largest)
    mine = torch.tensor([amaxes.get(unit, none) for unit in scaling.units], dtype=torch.float32)
    mine.nan_to_num_(nan=math.inf, posinf=math.inf)
    tools.publish("vote", living)
    dist.all_reduce(mine, dist.ReduceOp.MAX, group=tools.fabric.world)
    return dict(zip(scaling.units, mine.tolist(), strict=True))
