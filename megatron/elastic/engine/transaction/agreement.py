"""From a broken step to the next generation (DESIGN §3, §4).

    report   what this rank holds, and where in the program it stands
    decide   wait for the one record everybody reads (control plane)
    edit     links and groups follow the members; nothing of a survivor is rebuilt
    promote  mirrors of lost blocks become owners where they lie: no byte moves
    resolve  which version is finished: roll forward, vote again, or run again

All of it is a pure function of the decision record but the edit. Any further
loss raises a ``CommError``; the caller reports again with what it holds then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from megatron.elastic.comm.errors import CommError, PeerLost
from megatron.elastic.comm.fabric import EditReport, Fabric
from megatron.elastic.config import ElasticConfig
from megatron.elastic.control.membership import Decision, Loss, Membership
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.configuration import Configuration, History
from megatron.elastic.engine.generation.hardware import Hardware
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.repartition import better_assignment
from megatron.elastic.engine.generation.report import Report, first_open, phase_is_over
from megatron.elastic.engine.generation.view import View, build_view, unit_groups, with_configuration, with_plan
from megatron.elastic.engine.inject import Injector
from megatron.elastic.engine.transaction.join import NEWCOMER, newcomers
from megatron.elastic.engine.transaction.migration import Migration
from megatron.elastic.engine.transaction.wait_for_ranks import StageGone, await_ranks
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Plan, Profile
from megatron.elastic.plan.policies.choice import Choice
from megatron.elastic.plan.topology import with_speeds
from megatron.elastic.state.domains import FailureDomains
from megatron.elastic.state.layout import BlockKey, UnitLayout
from megatron.elastic.state.ownership import rebalance
from megatron.elastic.state.placement import Rules, UnitGroup, promote_only
from megatron.elastic.state.protocol import Holdings, Resolution, all_copies, resolve
from megatron.elastic.state.record import StepRecord
from megatron.elastic.state.redundancy import replenish, short_of_mirrors

__all__ = ["Agreement", "RecoveryOutcome", "StateLost", "failure_domains", "placement_rules"]


class StateLost(RuntimeError):
    """No survivor holds some block: only the persistent checkpoint does. Names what was lost."""

    def __init__(self, version: int, blocks: tuple[BlockKey, ...]) -> None:
        units = sorted({unit for unit, _, _ in blocks})
        super().__init__(
            f"state of step {version} is lost: {len(blocks)} blocks of units {units} have no surviving copy"
        )
        self.version = version
        self.blocks = blocks


@dataclass(frozen=True)
class RecoveryOutcome:
    """What a generation has to do before work goes on, the same on every rank."""

    decision: Decision
    lost: tuple[Loss, ...]
    """Who was lost since the last generation that came about, those of decisions that did not among them."""
    resolution: Resolution
    phase_over: bool
    first_open: int
    """The first phase that is not over among the members."""
    newcomers: tuple[int, ...]
    """Members that have to be told everything (:mod:`join`)."""
    named: Configuration
    """What the newest record names."""
    step_committed: bool
    """The step under way here was committed before the loss: only its end had to be finished."""
    lost_steps: int
    """Steps that some survivor knew to be committed and that could not be kept."""
    oldest_parameters: int
    failure: tuple[int, str] | None
    """(phase, why): the fenced action that some member could not do, so that nobody does it."""
    promoted: tuple[BlockKey, ...]
    """Blocks that changed owner."""
    seconds: Mapping[str, float]
    edit: EditReport


@dataclass
class Agreement:
    """The steps above for one rank; holds what is constant over generations."""

    membership: Membership
    fabric: Fabric
    launch_topology: LaunchTopology
    config: ElasticConfig
    layouts: Mapping[tuple[int, int], UnitLayout]
    arena: Arena
    injector: Injector
    timeout: float
    choose: Choice
    """The policy: which plan the living run."""
    profile: Profile
    """Costs of units, the same on every rank."""
    hardware: Hardware
    domains: FailureDomains = field(default_factory=FailureDomains)
    """Of the present generation."""
    members: tuple[int, ...] = ()
    """Ranks, but newcomers, of a decision whose generation has yet to come about, ascending."""
    present: Decision | None = None
    """The decision of the present generation."""
    unreported: tuple[Loss, ...] = ()
    """Losses of decisions since the last generation that came about: each is told once, with the next that does."""

    def agree(
        self,
        error: CommError,
        report: Report,
        history: History,
        attempted: int,
    ) -> tuple[View, RecoveryOutcome]:
        """One attempt. Raises ``CommError`` when a newer generation began meanwhile, :class:`StateLost`.

        ``attempted`` is the version that the step under way leads to.
        """
        seconds = dict[str, float]()
        decision, edit = self._decided(error, report, seconds)
        started = time.monotonic()
        reports = {rank: Report.from_text(text) for rank, text in decision.reports.items() if text != NEWCOMER}
        named = history.in_force([record for r in reports.values() for record in r.holdings.records])
        voting = history.common(r.voting for r in reports.values())
        resolution, configuration, gone = self._resolved(decision, reports, named, voting)
        assert resolution.record is not None, "only a lost state has no record"
        assignment = self._taken_over(configuration.assignment, decision)
        groups = unit_groups(assignment, self.layouts, decision.members)
        promotion = promote_only(configuration.placement, reports.keys(), groups, gone)
        if promotion.lost:
            raise StateLost(report.holdings.newest, promotion.lost)
        lost_steps = _lost_steps(reports, resolution)
        # Somebody may have made room for units of which it has no parameters.
        undefined = assignment != named.assignment or lost_steps > 0 or bool(newcomers(decision))
        view = self.build_view(decision, Configuration(promotion.placement, assignment), resolution.record)
        seconds["plan"] = time.monotonic() - started
        outcome = RecoveryOutcome(
            decision=decision,
            lost=self.unreported,
            resolution=resolution,
            phase_over=phase_is_over(report.phase, reports, len(decision.members)),
            first_open=first_open(reports.values()),
            newcomers=newcomers(decision),
            named=named,
            lost_steps=lost_steps,
            step_committed=resolution.kind != "revote" and resolution.version >= attempted,
            oldest_parameters=-1 if undefined else min(r.parameters for r in reports.values()),
            failure=next(((r.phase, r.failure) for _, r in sorted(reports.items()) if r.failure), None),
            promoted=tuple(change.block for change in promotion.transitions),
            seconds=seconds,
            edit=edit,
        )
        return view, outcome

    def _decided(self, error: CommError, report: Report, seconds: dict[str, float]) -> tuple[Decision, EditReport]:
        """The record everybody reads, and links and groups as it has them; ``seconds`` takes what that took."""
        step = report.holdings.newest
        if isinstance(error, PeerLost) and not error.heard:
            self.membership.suspect(error.rank, error.why)
        self.injector.reach("in_recovery_freeze", step)
        started = time.monotonic()
        decision = self.membership.decide(self.fabric.address(), report.to_text(), self.timeout)
        self.members = tuple(sorted(decision.members.keys() - set(newcomers(decision))))
        self.unreported = (*self.unreported, *self.membership.overlooked(), *decision.lost)
        seconds["decide"] = time.monotonic() - started
        self.injector.enter([at.incarnation for at in decision.members.values()], self.launch_topology.slots)
        self.injector.reach("in_recovery_decide", step)
        edit = self.fabric.edit(decision.generation, decision.members, self.timeout)
        seconds["edit"] = time.monotonic() - started - seconds["decide"]
        self.injector.reach("in_recovery_edit", step)
        return decision, edit

    def _resolved(
        self, decision: Decision, reports: Mapping[int, Report], named: Configuration, voting: Configuration | None
    ) -> tuple[Resolution, Configuration, list[tuple[BlockKey, int]]]:
        """Which version is finished, under what, and which of its copies (block, rank) do not count.

        ``voting``: what the vote under way was to name. Raises :class:`StateLost`.
        """
        joined_since = _joined_since_vote(reports)
        held = {
            rank: _without_copies(r.holdings) if rank in joined_since else r.holdings for rank, r in reports.items()
        }
        counted = all_copies({key: copies.ranks for key, copies in named.placement.copies.items()}, held, joined_since)
        again = None
        if voting is not None and not joined_since and not newcomers(decision):
            # Those have no gradients to vote on; nobody knows of the vote, so the step may as well be run again.
            again = all_copies({key: copies.ranks for key, copies in voting.placement.copies.items()}, held)
        resolution = resolve(held, counted, self.launch_topology.grid.global_batch_size, again)
        if resolution.kind == "lost":
            raise StateLost(resolution.version, resolution.missing)
        gone = [(key, rank) for rank, r in reports.items() for key in r.holdings.torn]
        if resolution.kind == "revote":
            assert voting is not None and again is not None, "by whom it is taken again is known"
            return resolution, replace(voting, placement=voting.placement.with_copies(again)), gone
        placement = named.placement.with_copies(counted)
        gone += [(key, rank) for key, copies in placement.copies.items() for rank in copies.ranks
                 if rank in resolution.stale or rank in joined_since]  # fmt: skip
        return resolution, replace(named, placement=placement), gone

    def _taken_over(self, assignment: Assignment, decision: Decision) -> Assignment:
        """``assignment`` with waiting cells in lost places; recut if a stage is lost and will not be back."""
        living = decision.members
        seated = assignment.seated(living)
        movable = self.config.policy == "elaswave" and self.config.steps_before_migration >= 0
        comes_back = not seated.uncovered({*living, *decision.returning})
        if not movable or not seated.uncovered(living) or comes_back:
            return seated
        try:
            recut = better_assignment(seated, living, self.profile, self.hardware.memory_bytes)
        except PlanError:  # no shape fits: as if units could not move
            return seated
        return seated if recut is None else recut.target

    def groups(self, view: View) -> tuple[UnitGroup, ...]:
        """Living holders of every (unit, shard) that has any."""
        return unit_groups(view.assignment, self.layouts, view.living)

    def owner_is_outside_group(self, view: View) -> bool:
        """Whether some block is owned by a rank that does not compute its unit, so that it cannot be gathered."""
        holders = {(group.unit, group.shard): group.holders for group in self.groups(view)}
        return any(copies.owner not in holders.get(key[:2], ()) for key, copies in view.placement.copies.items())

    def wait_for_ranks(self, gone: StageGone, step: int, say: Callable[[str], None]) -> None:
        """Until a generation begins that may bring them. Raises ``PlanError`` when there is nothing to wait for."""
        await_ranks(self.membership, gone, step, self.config.respawn, self.config.detection_timeout, say)

    def indispensable(self, view: View, leaving: Collection[int]) -> str:
        """Why the others cannot go on without ``leaving``; empty when they can."""
        try:
            staying = [rank for rank in view.living if rank not in leaving]
            self.choose(view.assignment.topology(staying), self.profile)
        except PlanError as error:
            return str(error)
        return ""

    def migration(self, view: View, target: Assignment | None = None, leaving: Collection[int] = ()) -> Migration:
        """What balance and redundancy ask for among those who are here and stay, where units are as ``target`` says."""
        assignment = target or view.assignment
        staying = [rank for rank in view.living if rank not in leaving]
        groups = unit_groups(assignment, self.layouts, staying)
        rules = placement_rules(self.config, self.domains, staying)
        placement, changes = rebalance(view.placement, groups, rules)
        return Migration(Configuration(placement, assignment), changes)

    def short_of_mirrors(self, view: View) -> tuple[BlockKey, ...]:
        """Blocks that could have more mirrors among the living and should, ascending."""
        return short_of_mirrors(view.placement, self.config.mirrors, view.living)

    def replenishment(self, view: View) -> Migration | None:
        """The copies that blocks are short of, and nothing else; None where none is missing.

        On ranks whose copies count from the moment they are there, if these suffice: those of a rank that has not voted
        since it was let in do not.
        """
        if not self.short_of_mirrors(view):
            return None
        proven = [rank for rank in view.living if rank not in self._unproven()]
        ranks = proven if len(proven) > self.config.mirrors else view.living
        groups = unit_groups(view.assignment, self.layouts, ranks)
        placement, changes = replenish(view.placement, groups, placement_rules(self.config, self.domains, ranks))
        return Migration(Configuration(placement, view.assignment), changes, urgent=True)

    def _unproven(self) -> set[int]:
        """Members that had not voted since they were let in when this generation was decided."""
        if self.present is None:
            return set()
        reports = self.present.reports.items()
        known = {rank: Report.from_text(text) for rank, text in reports if text != NEWCOMER}
        return set(newcomers(self.present)) | (_joined_since_vote(known) if known else set())

    def with_configuration(self, view: View, configuration: Configuration) -> View:
        """The same generation on another basis."""
        if configuration.assignment == view.assignment:
            return with_configuration(view, self.fabric.rank, configuration, self.layouts, self.arena, self.fabric)
        plan = self._plan(configuration.assignment, view.living, view.speeds())
        return self._build_view(view.generation, view.living, configuration, plan)

    def prepare(self, view: View, target: Assignment) -> None:
        """Have ready what :meth:`with_configuration` on ``target`` would have to make. On any thread, beside a step."""
        self._plan(target, view.living, view.speeds())
        self.arena.prepare(target.units_of(self.fabric.rank))

    def replan(self, view: View, record: StepRecord) -> View:
        """The same standing under a plan made from the speeds of ``record``."""
        plan = self._plan(view.assignment, view.living, record.speeds)
        return with_plan(view, replace(plan, frequencies_khz=view.plan.frequencies_khz))

    def _plan(self, assignment: Assignment, living: Iterable[int], speeds: Iterable[tuple[int, int]]) -> Plan:
        topology = assignment.topology(tuple(living))
        return self.choose(with_speeds(topology, dict(speeds)), self.profile)

    def build_view(self, decision: Decision, configuration: Configuration, record: StepRecord) -> View:
        """This rank's standing in a decided generation, whose work goes on from ``record``.

        Raises :class:`StageGone` when nobody is left to compute some unit.
        """
        self.domains, self.present = failure_domains(decision), decision
        units = configuration.assignment.uncovered(decision.members)
        if units:
            holders = {rank for (unit, _), group in configuration.assignment.state_groups().items() if unit in units
                       for rank in group}  # fmt: skip
            raise StageGone(decision, units, sorted(holders - decision.members.keys()))
        plan = self._plan(
            configuration.assignment, decision.members, _speeds_for(record, decision, self.launch_topology)
        )
        return self._build_view(decision.generation, tuple(decision.members), configuration, plan)

    def _build_view(self, generation: int, living: tuple[int, ...], configuration: Configuration, plan: Plan) -> View:
        self.arena.hold(configuration.assignment.units_of(self.fabric.rank))
        return build_view(
            self.fabric.rank, generation, living, configuration, self.layouts, self.arena, self.fabric, plan
        )


def _speeds_for(record: StepRecord, decision: Decision, launch_topology: LaunchTopology) -> tuple[tuple[int, int], ...]:
    """Published speeds that hold in a generation: of a cell with a new process nothing is known yet."""
    new = {launch_topology.cell_of(rank).id for rank in newcomers(decision)}
    return tuple((cell, speed) for cell, speed in record.speeds if cell not in new)


def _joined_since_vote(reports: Mapping[int, Report]) -> set[int]:
    """Ranks that came after the newest vote: the copies that it named under their number died with an earlier life."""
    records = [record for report in reports.values() for record in report.holdings.records]
    newest = max(records, key=lambda record: record.version)
    voted = 0 if newest.gradient is None else newest.gradient.generation
    return {rank for rank, report in reports.items() if report.admitted > voted}


def _without_copies(held: Holdings) -> Holdings:
    """What a stranger knows, without copies: those it was given since the vote are void and given again."""
    return Holdings(held.rank, records=held.records, statistics=held.statistics)


def _lost_steps(reports: Mapping[int, Report], resolution: Resolution) -> int:
    known = [record.version for report in reports.values() for record in report.holdings.records]
    kept = resolution.version - 1 if resolution.kind == "revote" else resolution.version
    return max(0, max(known, default=kept) - kept)


def failure_domains(decision: Decision) -> FailureDomains:
    """Of the members, by the labels of their addresses."""
    labels = {rank: address.domain or address.host.replace("/", "-") for rank, address in decision.members.items()}
    return FailureDomains.of(labels, {rank: address.host for rank, address in decision.members.items()})


def placement_rules(config: ElasticConfig, domains: FailureDomains, ranks: Collection[int] | None = None) -> Rules:
    """How copies are spread over ``ranks`` (left out: over all of ``domains``)."""
    nodes = {rank: node for rank, node in domains.nodes.items() if ranks is None or rank in ranks}
    return Rules(config.mirrors, config.scatter_width, nodes, config.ownership, domains.wider)
