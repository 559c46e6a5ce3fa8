"""The comparison of gradients that every rank of a tensor-parallel cell computes.

The state has one copy of a parameter that is replicated over a cell, and its gradient is that of one rank of the cell.
So replicas never diverge. But a sum over the cell may have been left out, under sequence parallelism as a rule: then
each rank has only its part of the gradient, and the part is taken for the whole. The comparison finds that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron.elastic.engine.compute.model_interface import ModelInterface

__all__ = ["unequal_replicas"]

_UNEQUAL = 1e-2
"""Relative difference; that of parts of a sum is far larger, and that of rounding far smaller."""


def unequal_replicas(
    interface: ModelInterface, gradients: Mapping[int, Sequence[torch.Tensor]], group: dist.ProcessGroup
) -> Sequence[str]:
    """Return the replicated parameters whose finished gradients differ between the ranks of a cell.

    ``gradients``: per unit, in the order of its parameters; ``group``: the cell. Collective, equal on every rank.
    """
    held = [
        (f"{item.spec.name} (unit {unit})", gradient.reshape(-1).float())
        for unit, of_unit in sorted(gradients.items())
        for item, gradient in zip(interface.unit_parameters(unit), of_unit, strict=True)
        if not item.spec.sharded
    ]
    if not held:
        return ()
    mean = torch.cat([own for _, own in held])
    dist.all_reduce(mean, group=group)
    means = (mean / group.size()).split([own.numel() for _, own in held])
    apart = [(own - each).norm() > _UNEQUAL * each.norm() for (_, own), each in zip(held, means, strict=True)]
    found = torch.stack(apart).long()
    dist.all_reduce(found, group=group)
    return tuple(name for (name, _), count in zip(held, found.tolist(), strict=True) if count)
