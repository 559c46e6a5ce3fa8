"""Nonuniform tensor parallelism (NTP, arXiv 2504.06095): a damaged replica goes on with smaller groups.

A replica that has lost devices computes with tensor-parallel groups of one smaller size. It computes as many
micro-batches as it finishes in the time of a whole replica, and the batch shrinks. Or its damaged groups get more power
and keep up: then its other groups keep their size, and the batch is whole (``gain_ppm``).

NTP is static: sizes are known at start-up (``non_active_ranks_per_dp`` of Megatron's ``nonuniform_tp``). So a loss is a
restart, and the restart seats damaged groups in as few replicas as possible. :meth:`NonuniformTP.respond` models that.
In the engine the rules for sizes and samples are NTP's, but groups shrink inside the step, and none changes its
replica. Whole groups of a damaged replica keep their ranks there; they wait for the damaged one.

Not modelled: gradients that are sent again between groups of different size, activations over fewer links, and other
work on the devices that a whole group frees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.elastic.plan.cost import PPM
from megatron.elastic.plan.dataflow import PlanError, Share, home_rows
from megatron.elastic.plan.model import Cell, Plan, Profile, Replica, Topology
from megatron.elastic.plan.planner import assemble, instant_plan, replica_times
from megatron.elastic.plan.policies.base import STOPPED, Policy, PolicyOutcome, TableOptions, damaged_replicas
from megatron.elastic.plan.policies.whole_replicas import without_damaged
from megatron.elastic.plan.search.graph import Pipeline, Shape
from megatron.elastic.plan.search.shapes import ShapeTimer
from megatron.elastic.plan.tensor import crowded, is_reduced, packed, parked, raised, reduced_cells

__all__ = ["NonuniformTP"]


@dataclass(frozen=True)
class NonuniformTP(Policy):
    """Smaller groups and fewer samples for damaged replicas.

    ``gain_ppm``: highest speed of a device with more power, relative to its nominal speed.
    """

    summary = "its replica goes on with fewer ranks and fewer samples, and the batch shrinks"
    keeps_batch = False
    smaller_cells = "needs"
    gain_ppm: int = PPM

    def instant(self, topology: Topology, profile: Profile, options: TableOptions) -> Plan:
        if not damaged_replicas(topology) and not reduced_cells(topology):
            return instant_plan(topology, profile, split_backward=options.split_backward)
        plan = self._shrunk(topology, profile, options.split_backward)
        while small := crowded(plan, profile, topology.tied):
            topology = parked(topology, small)
            plan = self._shrunk(topology, profile, options.split_backward)
        return plan

    def respond(self, topology: Topology, profile: Profile) -> PolicyOutcome:
        if not damaged_replicas(topology) and not reduced_cells(topology):
            return without_damaged(topology, profile)
        seated = self._sized(packed(topology, seats_change=True))
        quotas = _quotas(seated, profile)
        if not any(quotas):
            return STOPPED
        alive = {cell.id for cell in seated.cells}
        pipelines = tuple(
            Pipeline(segments, quota)
            for replica, quota in zip(seated.replicas, quotas, strict=True)
            if (segments := tuple(s for s in replica.segments if s.cell in alive))
        )
        shape = ShapeTimer(seated, profile, False).timed(Shape(pipelines, 0, "ntp"))
        rows = sum(quotas) * topology.grid.micro_batch_size
        return PolicyOutcome(shape, shape.time_ns, rows, restarts=True, instant=shape, instant_ns=shape.time_ns)

    def _shrunk(self, topology: Topology, profile: Profile, split_backward: bool) -> Plan:
        """Each replica computes the first of its own micro-batches, as many as its slowest cell allows."""
        quotas = _quotas(self._sized(topology), profile)
        if not any(quotas):
            raise PlanError("policy ntp: every replica has lost a whole group; it restarts from the last checkpoint")
        homes = home_rows(topology)
        shares = [
            Share(segment.cell, segment.first, segment.end, rows, wave)
            for replica, home, quota in zip(topology.replicas, homes, quotas, strict=True)
            for wave, rows in enumerate(home[:quota])
            for segment in replica.segments
        ]
        skipped = sorted(
            row for home, quota in zip(homes, quotas, strict=True) for rows in home[quota:] for row in rows
        )
        return replace(assemble(topology, profile, shares, split_backward, ("ntp",)), skipped=tuple(skipped))

    def _sized(self, topology: Topology) -> Topology:
        """The topology as NTP runs it: groups of a damaged replica alike, or the damaged ones with more power."""
        cells = {cell.id: replace(cell, speed_ppm=PPM) for cell in topology.cells}
        if self.gain_ppm > PPM:
            return raised(replace(topology, cells=tuple(cells.values())), self.gain_ppm)
        for replica in topology.replicas:
            mine = [cells[s.cell] for s in replica.segments if s.cell in cells]
            if any(map(is_reduced, mine)):
                cells.update(_alike(replica, cells, min(mine, key=lambda cell: cell.nominal_ppm)))
        return replace(topology, cells=tuple(cells.values()))


def _alike(replica: Replica, cells: dict[int, Cell], smallest: Cell) -> dict[int, Cell]:
    """The replica's living cells with the size of ``smallest``."""
    return {
        s.cell: replace(
            cells[s.cell],
            ranks=cells[s.cell].ranks[: len(smallest.ranks)],
            nominal_ppm=smallest.nominal_ppm,
            memory_bytes=smallest.memory_bytes,
        )
        for s in replica.segments
        if s.cell in cells
    }


def _quotas(topology: Topology, profile: Profile) -> tuple[int, ...]:
    """Micro-batches of each replica: those that it finishes in the time of the fastest; none without all its cells.

    Times are rounded up, and speeds are exact to a millionth: a replica that is late by less than that is in time.
    """
    waves = topology.grid.global_batch_size // (topology.grid.micro_batch_size * topology.grid.data_parallel_size)
    resting = set(damaged_replicas(topology))
    times = replica_times(topology, profile, topology.grid.micro_batch_size)
    able = [time for number, time in enumerate(times) if number not in resting]
    deadline = min((time.of(waves) for time in able), default=0)
    deadline += deadline // PPM
    return tuple(0 if n in resting else min(waves, time.fits(deadline)) for n, time in enumerate(times))
