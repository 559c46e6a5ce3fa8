"""Plans, views and migrations that follow from a decision, for one rank.

Invariant: every result is a function of the decision, the configuration, the record (all equal on every rank) and
constants of the run. Therefore all ranks of a generation have the same plan and the same migrations. Only the arena
is changed: it allocates memory for the units of a view.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.config import ElasticConfig
from megatron.elastic.control.membership import Decision
from megatron.elastic.control.requests import ParallelSizes
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.engine.compute.model_interface import Covered, only_at_launch
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.cell_sizes import CellSizes
from megatron.elastic.engine.generation.configuration import Configuration
from megatron.elastic.engine.generation.domains import failure_domains, placement_rules
from megatron.elastic.engine.generation.hardware import Hardware
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.migration import Migration
from megatron.elastic.engine.generation.repartition import better_assignment
from megatron.elastic.engine.generation.report import Report, joined_since_vote, newcomers
from megatron.elastic.engine.generation.reshape import reshaped
from megatron.elastic.engine.generation.shape import CellCut
from megatron.elastic.engine.generation.view import View, build_view, unit_groups, with_configuration, with_plan
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Plan, Profile, Topology
from megatron.elastic.plan.policies.registry import Choice
from megatron.elastic.plan.profile import PPM
from megatron.elastic.plan.schedule.validate import memory_peaks
from megatron.elastic.plan.tensor import is_reduced, reduced_cells
from megatron.elastic.plan.topology import with_speeds
from megatron.elastic.state.layout import BlockKey, UnitLayout
from megatron.elastic.state.ownership import rebalance
from megatron.elastic.state.placement import UnitGroup
from megatron.elastic.state.record import StepRecord
from megatron.elastic.state.redundancy import replenish, short_of_mirrors

__all__ = ["StageGone", "ViewFactory"]


class StageGone(PlanError):
    """Some units have no whole tensor-parallel group left. Ranks ``missing`` would complete the groups."""

    def __init__(self, decision: Decision, units: Collection[int], missing: Collection[int]) -> None:
        self.decision = decision
        self.missing = tuple(missing)
        super().__init__(
            f"no whole tensor-parallel group is left to compute units {list(units)}: ranks {list(missing)} are gone, "
            "though copies of their state survive"
        )

    def final(self, why: str) -> PlanError:
        """Return the error that ends the job, with the reason ``why`` no rank comes back."""
        return PlanError(f"{self}; {why}; resume from the last checkpoint (--load)")


@dataclass(frozen=True)
class ViewFactory:
    """Makes plans, views and migrations from decisions and the constants of the run."""

    fabric: Fabric
    launch_topology: LaunchTopology
    config: ElasticConfig
    layouts: Mapping[tuple[int, int], UnitLayout]
    """(unit, tensor-parallel shard) → layout of its state."""
    arena: Arena
    choose: Choice
    """Chooses the policy's plan for the living ranks."""
    moves_units: bool
    """True if units may change place after a loss."""
    profile: Profile
    """Costs of units, the same on every rank."""
    hardware: Hardware
    sizes: CellSizes
    lives_on: bool = False
    """True if damaged cells go on with their living ranks."""
    batch_size: Callable[[int], int] | None = None
    """Samples of the step that follows so many consumed ones (:attr:`Settings.batch_size`)."""
    covered: Covered = only_at_launch
    """The shards of a unit that a rank of a cell of any size computes (:meth:`ModelInterface.covered`)."""
    refusal: Callable[[int, int, int], str] = lambda tensor, parts, stages: ""
    """Why no job has cells of so many tensor-parallel ranks and parts in so many stages
    (:meth:`ModelInterface.refusal`)."""

    # -- views -----------------------------------------------------------------

    def build_view(
        self,
        decision: Decision,
        configuration: Configuration,
        record: StepRecord,
        measured: Assignment,
        reports: Mapping[int, Report],
    ) -> View:
        """Return this rank's view of a decided generation that goes on from ``record``.

        ``measured``: the assignment that the record names, whose cells have the record's speeds. ``reports``: those of
        the decision's members. Raises :class:`StageGone` if some unit has no whole living cell.
        """
        assignment = configuration.assignment
        units = assignment.uncovered(decision.members)
        if units:
            launched = replace(
                assignment, formed=(), rehomed=()
            )  # a dissolved cell lists no rank that could complete it
            groups = (*assignment.state_groups(self.covered).items(), *launched.state_groups(self.covered).items())
            holders = {rank for (unit, _), group in groups if unit in units for rank in group}
            raise StageGone(decision, units, sorted(holders - decision.members.keys()))
        speeds = _speeds_of_kept(dict(record.speeds), measured, assignment, newcomers(decision))
        plan = self._plan(assignment, decision.members, speeds, self.rows_after(record))
        view = self._build_view(decision.generation, tuple(decision.members), configuration, plan)
        unproven = {*newcomers(decision), *(joined_since_vote(reports) if reports else ())}
        return replace(view, domains=failure_domains(decision), unproven=frozenset(unproven))

    def with_configuration(self, view: View, configuration: Configuration) -> View:
        """Return the view of the same generation under another configuration."""
        if configuration.assignment == view.assignment:
            rank, layouts = self.fabric.rank, self.layouts
            return with_configuration(view, rank, configuration, layouts, self.arena, self.fabric, self.covered)
        speeds = _speeds_of_kept(dict(view.speeds()), view.assignment, configuration.assignment)
        plan = self._plan(configuration.assignment, view.living, speeds, view.plan.grid.global_batch_size)
        fresh = self._build_view(view.generation, view.living, configuration, plan)
        return replace(fresh, domains=view.domains, unproven=view.unproven)

    def replan(self, view: View, record: StepRecord) -> View:
        """Return the same view with a plan made from the speeds of ``record``."""
        return self._replanned(view, dict(record.speeds), self.rows_after(record))

    def sized(self, view: View, rows: int) -> View:
        """Return the same view with a plan for a batch of ``rows`` samples."""
        if rows == view.plan.grid.global_batch_size:
            return view
        return self._replanned(view, dict(view.speeds()), rows)

    def rows_after(self, record: StepRecord) -> int:
        """Return the number of samples of the step that follows ``record``."""
        if self.batch_size is None:
            return self.launch_topology.grid.global_batch_size
        return self.batch_size(record.consumed_samples)

    def _replanned(self, view: View, speeds: Mapping[int, int], rows: int) -> View:
        plan = self._plan(view.assignment, view.living, speeds, rows)
        return with_plan(view, replace(plan, frequencies_khz=view.plan.frequencies_khz))

    def prepare(self, view: View, target: Assignment) -> None:
        """Make plan and memory for :meth:`with_configuration` to ``target``. On any thread, beside a step."""
        speeds = _speeds_of_kept(dict(view.speeds()), view.assignment, target)
        self._plan(target, view.living, speeds, view.plan.grid.global_batch_size)
        self.arena.prepare(target.held_by(self.fabric.rank, self.covered))

    def _build_view(self, generation: int, living: tuple[int, ...], configuration: Configuration, plan: Plan) -> View:
        rank, layouts = self.fabric.rank, self.layouts
        self.arena.hold(configuration.assignment.held_by(rank, self.covered))
        return build_view(rank, generation, living, configuration, layouts, self.arena, self.fabric, plan, self.covered)

    # -- plans -----------------------------------------------------------------

    def indispensable(self, view: View, leaving: Collection[int]) -> str:
        """Return why the other ranks cannot go on without ``leaving``; empty if they can."""
        try:
            staying = [rank for rank in view.living if rank not in leaving]
            assignment = self._manned(view.assignment, staying) if self._shrinks else view.assignment
            self._plan(assignment, staying, {}, view.plan.grid.global_batch_size)
        except PlanError as error:
            return str(error)
        return ""

    @cached_property
    def _launched(self) -> Assignment:
        """The assignment at launch."""
        return Assignment.at_launch(self.launch_topology)

    @property
    def _shrinks(self) -> bool:
        """True if other ranks take over the parts of those that leave a cell or a crew."""
        return self.lives_on or self.launch_topology.experts > 0

    def taken_over(self, assignment: Assignment, decision: Decision) -> Assignment:
        """Return ``assignment`` with waiting cells in place of lost ones; re-cut if a lost stage will not come back.

        Where cells live on, the other damaged ones go on with their living ranks. An assignment that is known, as after
        most losses and returns, is returned as the object that has worked out its tables.
        """
        found = self._taken_over(assignment, decision)
        return next((known for known in (assignment, self._launched) if known == found), found)

    def _taken_over(self, assignment: Assignment, decision: Decision) -> Assignment:
        living = decision.members
        seated = self._manned(assignment, living)
        comes_back = not seated.uncovered({*living, *decision.returning})
        if not self.moves_units or not seated.uncovered(living) or comes_back:
            return seated
        try:
            recut = better_assignment(seated, living, self.profile, self.hardware.memory_bytes, sizes=self.sizes)
        except PlanError:  # no cut fits the memory: keep the present one
            return seated
        return seated if recut is None else recut.target

    def _manned(self, assignment: Assignment, living: Collection[int]) -> Assignment:
        """Return the assignment after losses and returns, with the same cut. Crews without a cell deal its experts."""
        return self._whole_cells(assignment, living).crewed(living)

    def _whole_cells(self, assignment: Assignment, living: Collection[int]) -> Assignment:
        """Return the assignment whose cells are whole, as far as possible.

        A formed cell whose ranks lack the memory needs more of them. Its ranks are free for other cells then, and those
        compute its rows, so the memory of all is examined again. Cells of leftover ranks stay as they are where forming
        all anew, for ranks that have returned, would leave a stage without a cell.
        """
        if not self.lives_on:
            return assignment.undamaged().seated(living)
        least = dict[int, int]()
        while True:
            formed = self.sizes.living_on(assignment, living, least)
            crowded = self._crowded(formed, living)
            if not crowded:
                stage_goes = formed.uncovered(living) and not assignment.uncovered(living)
                return assignment if stage_goes else formed
            least.update((cell, len(formed.cells[cell].ranks) + 1) for cell in crowded)

    def _crowded(self, assignment: Assignment, living: Collection[int]) -> frozenset[int]:
        """Return the formed cells whose ranks lack the memory for their parts of their units."""
        if not assignment.formed or assignment.uncovered(living):
            return frozenset()
        need = self._bytes_of_a_rank(assignment, living)
        return frozenset(cell for cell, _ in assignment.formed if need.get(cell, 0) > self.hardware.memory_bytes)

    def _bytes_of_a_rank(self, assignment: Assignment, living: Collection[int]) -> dict[int, int]:
        """Return (whole cell) → bytes that the rank with the largest part of its units needs."""
        topology = self.sizes.topology(assignment, living)
        need = memory_peaks(self.choose(topology, self.profile), self.profile, topology.tied)
        base = assignment.base
        room = {cell.id: self.sizes.room(base.cut(len(cell.ranks))) for cell in topology.cells}
        return {cell: need.get(cell, 0) * PPM // ppm for cell, ppm in room.items()}

    def lacking_for_replicas(self, assignment: Assignment, living: Collection[int]) -> int:
        """Return the bytes that a rank with all replicas that it may have lacks; 0 if none may have any."""
        if not self.launch_topology.expert_replicas:
            return 0
        return max(0, max(self._bytes_of_a_rank(assignment, living).values()) - self.hardware.memory_bytes)

    def reshaped(self, living: Collection[int], sizes: ParallelSizes) -> Assignment:
        """Return the assignment of other sizes over the living ranks.

        Raises :class:`PlanError` with one line if it cannot be; whether there are enough ranks is for the caller.
        """
        launch, why = self.launch_topology, next(self._refusals(sizes), None)
        if why is not None:
            raise PlanError(why)
        elements = {key: layout.numel for key, layout in self.layouts.items()}
        only_launch = self.sizes.only_launch
        whole = sum(all(rank in living for rank in cell.ranks) for cell in launch.cells)
        if only_launch and whole < sizes.pipeline * sizes.data:
            raise PlanError("this model is computed by the tensor-parallel groups of the launch only")
        target = reshaped(launch, sizes, living, elements, self.covered, whole_cells=only_launch)
        most, memory = max(self._bytes_of_a_rank(target, living).values()), self.hardware.memory_bytes
        if launch.experts:  # as if a rank had nothing but experts
            most *= max(1, -(-launch.deal.ranks // launch.deal.over(sizes.experts, sizes.cell).ranks))
        if most > memory:
            raise PlanError(f"a rank would need {most / 2**30:.1f} GiB and has {memory / 2**30:.1f} GiB")
        return target

    def _refusals(self, sizes: ParallelSizes) -> Iterator[str]:
        """Yield why the job cannot go on with ``sizes``, whatever ranks there are."""
        launch, grid, config = self.launch_topology, self.launch_topology.grid, self.config
        if launch.experts:
            yield from self._expert_refusals(sizes)
        elif sizes.experts > 1:
            yield f"EP {sizes.experts} takes a job that was launched with --expert-model-parallel-size above 1"
        batches = grid.global_batch_size // grid.micro_batch_size
        if sizes.tensor != launch.tensor and config.exact:
            yield f"TP {launch.tensor} decides how sums are rounded, and --elastic-exact keeps it"
        if sizes.context != launch.context and config.exact:
            yield "--elastic-exact needs all of a sample on one rank"
        if sizes.context > 1 and config.policy != "elaswave":
            yield f"--elastic-policy {config.policy} is not tested where ranks share the sequence"
        why = self.refusal(sizes.tensor, sizes.context, sizes.pipeline)
        if why:
            yield why
        if self.sizes.speed(CellCut(sizes.tensor, sizes.context)) is None:
            groups, shared = f"tensor-parallel groups of {sizes.tensor} ranks", " that share the sequence"
            some = f"{sizes.context} {groups}{shared}" if sizes.context > 1 else groups
            yield f"this model is not computed by {some}"
        if sizes.pipeline > launch.compute_units:
            yield f"{sizes.pipeline} stages for {launch.compute_units} layers, embedding and head counted"
        if sizes.data > batches:
            yield f"{sizes.data} replicas for {batches} micro-batches a step"

    def _expert_refusals(self, sizes: ParallelSizes) -> Iterator[str]:
        """Yield why ranks that share experts cannot go on with ``sizes``."""
        why = self.launch_topology.deal.over(sizes.experts, sizes.cell).refusal(sizes.data)
        if why:
            yield why

    def _plan(self, assignment: Assignment, living: Iterable[int], speeds: Mapping[int, int], rows: int) -> Plan:
        """Return the plan of the living cells for a batch of ``rows`` samples."""
        alive = tuple(living)
        topology = self.sizes.topology(assignment, alive)
        topology = replace(topology, grid=replace(topology.grid, global_batch_size=rows))
        topology = with_speeds(topology, dict(speeds))
        plan = self.choose(topology, self.profile)
        whole = not assignment.broken(alive) and not reduced_cells(topology)
        if whole or self._fits(plan, topology):
            return plan
        try:
            return self.choose(self._limited(topology), self.profile)
        except PlanError:  # the profile is an estimate: it must not end a job that may well go on
            return plan

    def _fits(self, plan: Plan, topology: Topology) -> bool:
        """Return whether cells that have lost no rank have the memory for the samples that they have in flight.

        They compute rows of lost cells too. Cells that have lost ranks are examined before (:meth:`_whole_cells`).
        """
        need, memory = memory_peaks(plan, self.profile, topology.tied), self.hardware.memory_bytes
        return all(need.get(cell.id, 0) <= memory for cell in topology.cells if not is_reduced(cell))

    def _limited(self, topology: Topology) -> Topology:
        """Return the topology whose whole cells take fewer samples at a time where more do not fit their memory.

        The launch's plan did fit, whatever the profile says.
        """
        launch = self.sizes.topology(self._launched, range(self.launch_topology.slots))
        fits = max(memory_peaks(self.choose(launch, self.profile), self.profile, launch.tied).values())
        memory = max(self.hardware.memory_bytes, fits)
        cells = (cell if is_reduced(cell) else replace(cell, memory_bytes=memory) for cell in topology.cells)
        return replace(topology, cells=tuple(cells))

    # -- placement -------------------------------------------------------------

    def groups(self, view: View) -> tuple[UnitGroup, ...]:
        """Return the living holders of every (unit, shard) that has any."""
        return self.groups_of(view.assignment, view.living)

    def groups_of(self, assignment: Assignment, ranks: Collection[int]) -> tuple[UnitGroup, ...]:
        """Return the holders among ``ranks`` of every (unit, shard) that has any, under ``assignment``."""
        return unit_groups(assignment, self.layouts, ranks, self.covered)

    def migration(self, view: View, target: Assignment | None = None, leaving: Collection[int] = ()) -> Migration:
        """Return the migration to balance and full redundancy on the ranks that stay, under assignment ``target``.

        Without a target the cells keep their units. Where cells live on, those of ranks that leave are formed without
        them, so that the state of these ranks has other holders. Raises ``RuntimeError`` if a block would have none.
        """
        staying = [rank for rank in view.living if rank not in leaving]
        shrinks = bool(leaving) and self._shrinks
        assignment = target or (self._manned(view.assignment, staying) if shrinks else view.assignment)
        groups = self.groups_of(assignment, staying)
        kept = {(group.unit, group.shard) for group in groups}
        lost = sorted(key for key in view.placement.copies if key[:2] not in kept)
        if lost:
            raise RuntimeError(f"no rank would hold blocks {lost} of the state without ranks {sorted(leaving)}")
        placement, changes = rebalance(view.placement, groups, placement_rules(self.config, view.domains, staying))
        return Migration(Configuration(placement, assignment), changes)

    def short_of_mirrors(self, view: View) -> tuple[BlockKey, ...]:
        """Return the blocks with fewer mirrors than configured and possible among the living ranks, ascending."""
        return short_of_mirrors(view.placement, self.config.mirrors, view.living)

    def replenishment(self, view: View) -> Migration | None:
        """Return the urgent migration that only adds missing copies; None if none is missing.

        New copies go to ranks that have voted since they were admitted, if there are enough of them: copies on other
        ranks do not count before the next vote.
        """
        if not self.short_of_mirrors(view):
            return None
        proven = [rank for rank in view.living if rank not in view.unproven]
        ranks = proven if len(proven) > self.config.mirrors else view.living
        groups = self.groups_of(view.assignment, ranks)
        placement, changes = replenish(view.placement, groups, placement_rules(self.config, view.domains, ranks))
        return Migration(Configuration(placement, view.assignment), changes, urgent=True)


def _speeds_of_kept(
    speeds: Mapping[int, int], measured: Assignment, assignment: Assignment, new: Collection[int] = ()
) -> Mapping[int, int]:
    """Return the speeds, by cell, of the cells that have the same processes as when they were measured.

    A cell is as slow as its slowest rank, and no measurement tells which rank that is. ``new``: ranks whose process is
    new.
    """
    return {
        cell: speed
        for cell, speed in assignment.same_cells(measured, speeds.items())
        if not set(new).intersection(assignment.cells[cell].ranks)
    }
