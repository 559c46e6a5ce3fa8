"""Sums of numbers over the living ranks of a group, in memory that is kept from one sum to the next.

They are few and their ranks are busy otherwise, so what a sum takes is what the processor's caches have lost: memory
and code of each layer on the way. This one goes past ``torch.distributed.all_reduce`` to the group.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["Sums"]


class Sums:
    """See the module docstring. For one thread."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._options = dist.AllreduceOptions()
        self._options.asyncOp = False
        self._numbers = array("d")
        self._tensor = [torch.empty(0, dtype=torch.float64)]

    def over_ranks(self, values: Sequence[float]) -> list[float]:
        """Return the sums of ``values``, fp64, one at least and as many on every rank. Raises ``CommError``."""
        if len(values) == len(self._numbers):
            self._numbers[:] = array("d", values)
        else:
            self._numbers = array("d", values)
            self._tensor = [torch.frombuffer(self._numbers, dtype=torch.float64)]
        self._group.allreduce(self._tensor, self._options).wait()
        return self._numbers.tolist()
