"""What no plan can beat: least step times by counting, whatever the schedule.

Idea: take any set of pipelines in which a cell serves one of them. For a deadline
``T`` and ``n`` micro-batches, a stage ``[a, b)`` can only keep up if a few sums
fit, each of which every schedule has to pay:

* *chain*: the first row arrives after the forwards of all units before ``a``; the
  last input gradient has their backwards, and one weight gradient, still to go;
  in between lie all forwards and input gradients of the stage, and the weight
  gradients that memory does not let it put off;
* *round trip*: until the first gradient comes back, the stage runs forwards and
  nothing else, no more than memory holds;
* *residence*: each micro-batch is held from its forward to the end of its backward,
  at least one trip to the end of the pipeline and back. Where memory holds ``k``,
  the forward of number ``j + k`` waits until ``j + 1`` have gone; gradients that
  came back are taken one after the other, with the forwards they make room for.

All sums grow with the stage, and a stage that begins later but ends at the same
unit has less to do: so letting every stage reach as far as it can gives the
fewest cells on which ``n`` micro-batches can meet ``T``. An unbounded knapsack
over such pipelines says how many micro-batches the living cells can finish, and
bisection finds the least sufficient deadline. Micro-batches, units and cells are
whole throughout.

Unequal cells count as the fastest and roomiest of them. Transfers are free.
Plans in which one cell serves two pipelines are outside (``graph.work_bound``
holds for them too).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from megatron.elastic.plan.cost import PPM, unit_sums
from megatron.elastic.plan.dataflow import PlanError, microbatches
from megatron.elastic.plan.graph import knapsack, work_bound
from megatron.elastic.plan.model import Profile, Topology
from megatron.elastic.plan.partition import Model

__all__ = ["Reach", "schedule_bound"]


@dataclass(frozen=True)
class _Stage:
    """Times of one micro-batch, ns: in a stage ``[first, end)``, before it and after it."""

    forward: int
    gradient: int
    """Input gradient; the whole backward where it is not split."""
    weight: int
    forward_before: int
    gradient_before: int
    trip: int
    """From the end of the stage to the end of the pipeline and back."""
    tail: int
    """Weight gradient that still has to follow the last input gradient somewhere."""

    def least(self, count: int, room: int) -> int:
        """No schedule of ``count`` micro-batches, ``room`` of them held at once, is shorter than this."""
        return max(self._sums(count, room), self._returns(count, room))

    def meets(self, count: int, room: int, deadline: int) -> bool:
        """Whether ``least`` is within ``deadline``; the costly part only where the sums allow it."""
        return self._sums(count, room) <= deadline and self._returns(count, room) <= deadline

    def _sums(self, count: int, room: int) -> int:
        """Chain, work and round trip."""
        each = self.forward + self.gradient
        late = max(0, count - room) * self.weight
        after = self.gradient_before + self.tail
        chain = self.forward_before + count * each + late + after
        work = self.forward_before + count * (each + self.weight)
        early = min(room, count) * self.forward
        arrival = self.forward + self.trip
        return max(chain, work) + max(0, arrival - early)

    def _returns(self, count: int, room: int) -> int:
        """With ``room`` held at once, forward number ``j`` follows ``j - room + 1`` weight gradients.

        Of the micro-batches these belong to, all but ``i`` went forward as number ``i`` or later, for any
        ``i``: so their gradients came back, and were taken, after forward ``i`` had ended and its trip was over. So
        did forwards ``i + room`` to ``j``, each of which follows one of those. ``ends[j]``: when forward ``j`` may
        have ended; what the stage has still to do after the return of number ``i`` gives the whole.
        """
        forward, trip, each = self.forward, self.trip, self.forward + self.gradient + self.weight
        end = self.forward_before + forward
        if count <= room:
            return max(self._after_return(end, count, 0), self._after_return(end + (count - 1) * forward, 1, 0))
        ends: list[int] = []
        latest, whole = 0, 0
        for j in range(count):
            if j >= room:
                i = j - room
                latest = max(latest, ends[i] + trip - i * each)
                end = max(end, latest + (i + 1) * each)
            ends.append(end)
            whole = max(whole, self._after_return(end, count - j, max(0, count - room - j)))
            end += forward
        return whole

    def _after_return(self, end: int, left: int, again: int) -> int:
        """Whole time when a forward ends at ``end`` with ``left`` gradients to take, ``again`` forwards held back."""
        back = end + self.trip + again * self.forward + left * self.gradient
        return back + max(left * self.weight, again * self.weight + self.gradient_before + self.tail)


class Reach:
    """Which pipelines may meet a deadline, and on how few cells."""

    def __init__(self, topology: Topology, profile: Profile, split_backward: bool) -> None:
        rows = topology.grid.micro_batch_size
        self.speed = max(cell.speed_ppm for cell in topology.cells)
        self.memory = max(cell.memory_bytes for cell in topology.cells)
        self.units = len(profile.units)
        self.model = Model(profile, rows, topology.grid.data_parallel_size, topology.tied)
        weight = [unit.weight_grad_ns if split_backward else 0 for unit in profile.units]
        self.forward = unit_sums(self._fastest(u.forward_ns * rows) for u in profile.units)
        self.weight = unit_sums(self._fastest(w * rows) for w in weight)
        self.gradient = unit_sums(
            self._fastest((u.backward_ns - w) * rows) for u, w in zip(profile.units, weight, strict=True)
        )
        self.stages: dict[tuple[int, int], tuple[_Stage, int]] = {}

    def _fastest(self, time: int) -> int:
        return time * PPM // self.speed

    def quantum(self) -> int:
        """Every event of a schedule without transfers falls on a multiple of this many ns."""
        steps = [b - a for sums in (self.forward, self.gradient, self.weight) for a, b in pairwise(sums)]
        return math.gcd(*steps) if self.speed == PPM else 1

    def stage(self, first: int, end: int) -> tuple[_Stage, int]:
        """The stage and how many micro-batches its memory holds."""
        if (first, end) not in self.stages:
            f, g, w = self.forward, self.gradient, self.weight
            found = _Stage(
                f[end] - f[first],
                g[end] - g[first],
                w[end] - w[first],
                f[first],
                g[first],
                f[-1] - f[end] + g[-1] - g[end],
                w[1] if first else w[end],
            )
            fixed = self.model.stage_bytes(first, end, 0)
            each = max(1, self.model.stage_bytes(first, end, 1) - fixed)
            self.stages[first, end] = found, max(0, (self.memory - fixed) // each)
        return self.stages[first, end]

    def cuts(self, count: int, deadline: int) -> tuple[int, ...] | None:
        """The pipeline of fewest stages that may finish ``count`` micro-batches by ``deadline``: its cut points."""
        cuts = [0]
        while cuts[-1] < self.units:
            low, high = cuts[-1], self.units
            while low < high:
                middle = (low + high + 1) // 2
                stage, room = self.stage(cuts[-1], middle)
                if room and stage.meets(count, room, deadline):
                    low = middle
                else:
                    high = middle - 1
            if low == cuts[-1]:
                return None
            cuts.append(low)
        return tuple(cuts)

    def late_cuts(self, count: int, deadline: int) -> tuple[int, ...] | None:
        """Another such pipeline, from the end backwards: long stages come as late as they may."""
        cuts = [self.units]
        while cuts[-1]:
            low, high = 0, cuts[-1]
            while low < high:
                middle = (low + high) // 2
                stage, room = self.stage(middle, cuts[-1])
                if room and stage.meets(count, room, deadline):
                    high = middle
                else:
                    low = middle + 1
            if low == cuts[-1]:
                return None
            cuts.append(low)
        return tuple(reversed(cuts))

    def pipelines(self, cells: int, total: int, deadline: int) -> tuple[list[tuple[int, ...]], list[int]]:
        """Cuts and micro-batches of the set of pipelines on ``cells`` cells that may finish most by ``deadline``."""
        best: dict[int, tuple[int, tuple[int, ...]]] = {}
        for count in range(1, total + 1):
            cuts = self.cuts(count, deadline)
            if cuts is None or len(cuts) > cells + 1:
                break
            best[len(cuts) - 1] = count, cuts
        lengths, _ = knapsack(cells, {length: count for length, (count, _) in best.items()})
        return [best[length][1] for length in lengths], [best[length][0] for length in lengths]


def schedule_bound(topology: Topology, profile: Profile, split_backward: bool = False) -> int:
    """Step time (ns) that no set of pipelines over the living cells can beat, under any schedule and their memory.

    Where units are now is ignored. Raises :class:`PlanError` if the model does not fit the cells' memory.
    """
    reach, total, cells = Reach(topology, profile, split_backward), microbatches(topology.grid), len(topology.cells)
    quantum = reach.quantum()

    def enough(deadline: int) -> bool:
        return sum(reach.pipelines(cells, total, deadline * quantum)[1]) >= total

    low, high = work_bound(topology, profile) // quantum, 1
    while not enough(high):
        high *= 2
        if high * quantum > 16 * total * (reach.forward[-1] + reach.gradient[-1] + reach.weight[-1]):
            raise PlanError("no shape of the living cells fits their memory")
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return low * quantum
