"""From a broken step to the next generation (docs/design.md §3, §4).

    report   hand in the state this rank holds and its place in the program
    decide   wait for the decision, one record that all members read (control plane)
    edit     change links and groups to the new members; a survivor keeps its own
    promote  make mirrors of lost blocks owners in place: no byte is sent
    resolve  choose the version to finish: roll forward, vote again, or run again

Promotion and resolution are pure functions of the decision record. Any further
loss raises a ``CommError``; the caller then calls again with a new report.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from megatron.elastic.comm.errors import CommError, PeerLost
from megatron.elastic.comm.fabric import EditReport
from megatron.elastic.control.membership import Decision, Loss, Membership
from megatron.elastic.engine.failures import SilentCorruption
from megatron.elastic.engine.generation.configuration import Configuration, History
from megatron.elastic.engine.generation.factory import ViewFactory
from megatron.elastic.engine.generation.report import (
    Report,
    first_open,
    joined_since_vote,
    newcomers,
    phase_is_over,
    reports_of,
)
from megatron.elastic.engine.generation.view import View
from megatron.elastic.engine.inject import Injector
from megatron.elastic.platform.threads import OS_THREADS, Threads
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.placement import Placement, promote_only
from megatron.elastic.state.protocol import Holdings, Resolution, all_copies, resolve

__all__ = ["Agreement", "RecoveryOutcome", "StateLost"]


class StateLost(RuntimeError):
    """Some block has no copy on a survivor; only the checkpoint on disk has it. Names the lost blocks."""

    def __init__(self, version: int, blocks: tuple[BlockKey, ...]) -> None:
        units = sorted({unit for unit, _, _ in blocks})
        super().__init__(
            f"state of step {version} is lost: {len(blocks)} blocks of units {units} have no surviving copy"
        )
        self.version = version
        self.blocks = blocks


@dataclass(frozen=True)
class RecoveryOutcome:
    """The work of a new generation before steps go on, equal on every rank."""

    decision: Decision
    lost: tuple[Loss, ...]
    """Ranks lost since the last generation in which steps went on, including losses of abandoned decisions."""
    resolution: Resolution
    phase_over: bool
    first_open: int
    """Number of the first phase that some member has yet to finish."""
    newcomers: tuple[int, ...]
    """Members that receive a :class:`JoinState` (:mod:`join`)."""
    named: Configuration
    """The configuration that the newest record names."""
    step_committed: bool
    """True if the step under way was committed before the loss, so that only update and gather remain."""
    lost_steps: int
    """Number of committed steps that some survivor knows and that cannot be kept."""
    oldest_parameters: int
    """Version that the parameters of all members but newcomers have at least; -1 if some may lack some."""
    between_steps: bool
    """True if all members come from the boundary between two steps, at which a newcomer is let in."""
    failures: Mapping[int, str]
    """Phase → why a fenced action failed on some member and therefore fails on every rank."""
    promoted: tuple[BlockKey, ...]
    """Blocks that changed owner."""
    seconds: Mapping[str, float]
    edit: EditReport


@dataclass
class Agreement:
    """The steps above for one rank, with the losses that no listener has been told of yet."""

    membership: Membership
    views: ViewFactory
    injector: Injector
    timeout: float
    """Seconds that an agreement or an edit of the groups may take."""
    threads: Threads = OS_THREADS
    members: tuple[int, ...] = ()
    """Members without newcomers of a decision after which steps have not gone on yet, ascending."""
    unreported: tuple[Loss, ...] = ()
    """Losses decided since steps last went on. Each is reported once, when steps go on again."""

    def agree(
        self,
        error: CommError,
        report: Report,
        history: History,
        attempted: int,
    ) -> tuple[View, RecoveryOutcome]:
        """Try once to agree on a view. Raises ``CommError`` if a newer generation began, and :class:`StateLost`.

        Raises ``SilentCorruption`` if the last copy of a block may be the wrong one.
        ``attempted``: version that the step under way leads to.
        """
        seconds = dict[str, float]()
        decision, edit = self._decided(error, report, seconds)
        started = self.threads.monotonic()
        reports = reports_of(decision)
        named = history.in_force([record for r in reports.values() for record in r.holdings.records])
        voting = history.common(r.voting for r in reports.values())
        resolution, configuration, gone = self._resolved(decision, reports, named, voting)
        assert resolution.record is not None, "only a lost state has no record"
        assignment = self.views.taken_over(configuration.assignment, decision)
        groups = self.views.groups_of(assignment, decision.members)
        promotion = promote_only(configuration.placement, reports.keys(), groups, gone)
        if promotion.lost:
            raise StateLost(report.holdings.newest, promotion.lost)
        if found := _doubtful(reports, promotion.placement):
            raise SilentCorruption("; ".join(found))
        lost_steps = _lost_steps(reports, resolution)
        # A rank that held its parameters for another assignment may lack some now. This need not be the assignment that
        # the record names: a generation that was abandoned may have had one of its own, and gathered all of them.
        held_for = {r.held_for for r in reports.values()}
        undefined = held_for != {assignment.digest()} or lost_steps > 0
        configuration = Configuration(promotion.placement, assignment)
        view = self.views.build_view(decision, configuration, resolution.record, named.assignment, reports)
        seconds["plan"] = self.threads.monotonic() - started
        outcome = RecoveryOutcome(
            decision=decision,
            lost=self.unreported,
            resolution=resolution,
            phase_over=phase_is_over(report.phase, reports, decision.members),
            first_open=first_open(reports.values()),
            newcomers=newcomers(decision),
            named=named,
            lost_steps=lost_steps,
            step_committed=resolution.kind != "revote" and resolution.version >= attempted,
            oldest_parameters=-1 if undefined else min(r.parameters for r in reports.values()),
            between_steps=_between_steps(reports.values()),
            failures=_failures(reports),
            promoted=tuple(change.block for change in promotion.transitions),
            seconds=seconds,
            edit=edit,
        )
        return view, outcome

    def _decided(self, error: CommError, report: Report, seconds: dict[str, float]) -> tuple[Decision, EditReport]:
        """Return the decision after links and groups were edited to it. Adds the time of both to ``seconds``."""
        step = report.holdings.newest
        if isinstance(error, PeerLost) and not error.heard:
            self.membership.suspect(error.rank, error.why, error.silent)
        self.injector.reach("in_recovery_freeze", step)
        started = self.threads.monotonic()
        decision = self.membership.decide(self.views.fabric.address(), report.to_text(), self.timeout)
        self.members = tuple(sorted(decision.members.keys() - set(newcomers(decision))))
        self.unreported = (*self.unreported, *self.membership.overlooked(), *decision.lost)
        seconds["decide"] = self.threads.monotonic() - started
        self.injector.enter([at.incarnation for at in decision.members.values()], self.views.launch_topology.slots)
        self.injector.reach("in_recovery_decide", step)
        edit = self.views.fabric.edit(decision.generation, decision.members, self.timeout)
        seconds["edit"] = self.threads.monotonic() - started - seconds["decide"]
        self.injector.reach("in_recovery_edit", step)
        return decision, edit

    def _resolved(
        self, decision: Decision, reports: Mapping[int, Report], named: Configuration, voting: Configuration | None
    ) -> tuple[Resolution, Configuration, list[tuple[BlockKey, int]]]:
        """Return the resolution, its configuration, and the copies (block, rank) that do not count.

        ``voting``: configuration that the vote under way was to name. Raises :class:`StateLost`.
        """
        joined_since = joined_since_vote(reports)
        held = {
            rank: _without_copies(r.holdings) if rank in joined_since else r.holdings for rank, r in reports.items()
        }
        counted = all_copies({key: copies.ranks for key, copies in named.placement.copies.items()}, held, joined_since)
        again = None
        if voting is not None and not joined_since and not newcomers(decision):
            # Ranks that joined have no gradients to vote on. No survivor knows the vote: the step may be run again.
            again = all_copies({key: copies.ranks for key, copies in voting.placement.copies.items()}, held)
        resolution = resolve(held, counted, self.views.rows_after, again)
        if resolution.kind == "lost":
            raise StateLost(resolution.version, resolution.missing)
        gone = [(key, rank) for rank, r in reports.items() for key in r.holdings.torn]
        if resolution.kind == "revote":
            assert voting is not None and again is not None, "a vote taken again has a configuration"
            return resolution, replace(voting, placement=voting.placement.with_copies(again)), gone
        placement = named.placement.with_copies(counted)
        gone += [
            (key, rank)
            for key, copies in placement.copies.items()
            for rank in copies.ranks
            if rank in resolution.stale or rank in joined_since
        ]
        return resolution, replace(named, placement=placement), gone


def _without_copies(held: Holdings) -> Holdings:
    """The report of a rank that joined after the last vote, without copies: it receives its copies again."""
    return Holdings(records=held.records, statistics=held.statistics)


def _doubtful(reports: Mapping[int, Report], placement: Placement) -> list[str]:
    """Return one line for each last copy of a block that had other contents than the copy of an owner that is lost."""
    return [
        f"block {block}: the last copy, at rank {rank}, had other contents than that of rank {owner}, which is lost: "
        "the right one is not known; resume from the last checkpoint (--load)"
        for rank, report in sorted(reports.items())
        for block, owner in sorted(report.doubts.items())
        if placement.copies[block].ranks == (rank,) and owner != rank
    ]


def _between_steps(reports: Collection[Report]) -> bool:
    """Return whether all members report from a boundary: only there is no phase under way."""
    return len({report.phase for report in reports}) == 1 and not any(report.under_way for report in reports)


def _failures(reports: Mapping[int, Report]) -> dict[int, str]:
    """Return phase → why it failed, as far as some rank knows; where ranks differ, the lowest one's words."""
    found = dict[int, str]()
    for _, report in sorted(reports.items(), reverse=True):
        found.update(report.failures)
    return found


def _lost_steps(reports: Mapping[int, Report], resolution: Resolution) -> int:
    known = [record.version for report in reports.values() for record in report.holdings.records]
    kept = resolution.version - 1 if resolution.kind == "revote" else resolution.version
    return max(0, max(known, default=kept) - kept)
