"""Lower bounds on step times by counting, for any schedule.

Idea: take any set of pipelines in which a cell serves one of them. Let ``n`` micro-batches have the deadline ``T``. A
stage ``[a, b)`` meets it only if each of three sums does; no schedule takes less than any of them:

* *chain*: the first row arrives after the forwards of all units before ``a``. After the stage's last input gradient
  come the backwards of those units and one weight gradient. In between lie all forwards and input gradients of the
  stage, and the weight gradients that memory does not let it defer.
* *round trip*: until the first gradient comes back, the stage runs only forwards, at most as many as memory holds.
* *residence*: each micro-batch is held from its forward to the end of its backward, at least for one trip to the end
  of the pipeline and back. If memory holds ``k``, the forward of number ``j + k`` waits until ``j + 1`` are finished.
  Gradients that came back are processed one after the other, each with the forward that it allows.

All sums grow with the stage, and a stage that begins later but ends at the same unit has less to do. So if every stage
reaches as far as it can, ``n`` micro-batches meet ``T`` on the fewest cells. An unbounded knapsack over such pipelines
tells how many micro-batches the living cells can finish, and bisection finds the least sufficient deadline.
Micro-batches, units and cells are whole throughout.

Unequal cells count as the fastest of them with the memory of the largest. Transfers are free.
Plans in which one cell serves two pipelines are outside (``graph.work_bound``
holds for them too). The counting is native (``csrc/plan/reach.cpp``).
"""

from __future__ import annotations

import math
from itertools import pairwise

from megatron.elastic import _plan
from megatron.elastic.plan.cost import PPM, unit_sums
from megatron.elastic.plan.dataflow import PlanError, microbatches
from megatron.elastic.plan.model import Profile, Topology
from megatron.elastic.plan.search.graph import work_bound
from megatron.elastic.plan.search.partition import Model

__all__ = ["Reach", "schedule_bound"]


class Reach:
    """Which pipelines may meet a deadline, and on how few cells."""

    def __init__(self, topology: Topology, profile: Profile, split_backward: bool) -> None:
        rows = topology.grid.micro_batch_size
        self.speed = max(cell.rate_ppm for cell in topology.cells)
        self.memory = max(cell.memory_bytes for cell in topology.cells)
        self.units = len(profile.units)
        weight = [unit.weight_grad_ns if split_backward else 0 for unit in profile.units]
        self.forward = unit_sums(self._fastest(u.forward_ns * rows) for u in profile.units)
        self.weight = unit_sums(self._fastest(w * rows) for w in weight)
        self.gradient = unit_sums(
            self._fastest((u.backward_ns - w) * rows) for u, w in zip(profile.units, weight, strict=True)
        )
        model = Model(profile, rows, topology.grid.data_parallel_size, topology.tied)
        self.native = _plan.Reach(
            self.forward, self.gradient, self.weight, model.static, model.held, topology.tied, self.memory
        )

    def _fastest(self, time: int) -> int:
        return time * PPM // self.speed

    def quantum(self) -> int:
        """Every event of a schedule without transfers falls on a multiple of this many ns."""
        steps = [b - a for sums in (self.forward, self.gradient, self.weight) for a, b in pairwise(sums)]
        return math.gcd(*steps) if self.speed == PPM else 1

    def room(self, first: int, end: int) -> int:
        """Number of micro-batches that fit the memory of a stage ``[first, end)``."""
        return self.native.room(first, end)

    def least(self, first: int, end: int, count: int, held: int | None = None) -> int:
        """Return a lower bound on the time of ``count`` micro-batches through ``[first, end)``.

        ``held``: micro-batches held at once; the default is the number that fits memory (at least one).
        """
        return self.native.least(first, end, count, max(1, self.room(first, end)) if held is None else held)

    def cuts(self, count: int, deadline: int) -> tuple[int, ...] | None:
        """The pipeline of fewest stages that may finish ``count`` micro-batches by ``deadline``: its cut points."""
        cuts = self.native.cuts(count, deadline)
        return None if cuts is None else tuple(cuts)

    def late_cuts(self, count: int, deadline: int) -> tuple[int, ...] | None:
        """Another such pipeline, from the end backwards: long stages come as late as they may."""
        cuts = self.native.late_cuts(count, deadline)
        return None if cuts is None else tuple(cuts)

    def pipelines(self, cells: int, total: int, deadline: int) -> tuple[list[tuple[int, ...]], list[int]]:
        """Cuts and micro-batches of the set of pipelines on ``cells`` cells that may finish most by ``deadline``."""
        found = self.native.pipelines(cells, total, deadline)
        return [tuple(cuts) for cuts, _ in found], [count for _, count in found]


def schedule_bound(topology: Topology, profile: Profile, split_backward: bool = False) -> int:
    """Step time (ns) that no set of pipelines over the living cells can beat, under any schedule and their memory.

    Where units are now is ignored. Raises :class:`PlanError` if the model does not fit the cells' memory.
    """
    reach, total, cells = Reach(topology, profile, split_backward), microbatches(topology.grid), len(topology.cells)
    quantum = reach.quantum()
    limit = 16 * total * (reach.forward[-1] + reach.gradient[-1] + reach.weight[-1])
    found = reach.native.least_deadline(cells, total, quantum, work_bound(topology, profile) // quantum, limit)
    if found is None:
        raise PlanError("no shape of the living cells fits their memory")
    return found
