"""The recovery of one rank from a loss, from the error to the next step (docs/design.md §3, §4).

    agree    on a generation and a resolution, from the reports of all survivors (:mod:`agreement`)
    settle   bring every survivor to the same version, with matching parameters: roll forward, vote
             again, or prepare to run the step again; begin to make missing copies
    wait     for ranks to be started again, if a stage has too few left (:mod:`wait_for_ranks`)
    join     for a newcomer: take over the members' context

A further loss starts the recovery anew, from the state held then. A recovery commits
nothing without a vote.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from megatron.elastic.comm.errors import CommError, CommTimeout, GenerationChanged, PeerLost
from megatron.elastic.control.requests import Request
from megatron.elastic.engine.failures import CommunicationFault, NotFinite, SilentCorruption
from megatron.elastic.engine.generation.factory import StageGone
from megatron.elastic.engine.generation.report import Report, first_open, newcomers, reports_of
from megatron.elastic.engine.generation.view import View, have_parameters
from megatron.elastic.engine.transaction.agreement import RecoveryOutcome, StateLost
from megatron.elastic.engine.transaction.certificates import CertificateOutcome
from megatron.elastic.engine.transaction.certify import Certifier
from megatron.elastic.engine.transaction.commit import StepCommit
from megatron.elastic.engine.transaction.context import Context
from megatron.elastic.engine.transaction.fence import Program
from megatron.elastic.engine.transaction.join import JoinState, send_join_state
from megatron.elastic.engine.transaction.migrate import Migrator
from megatron.elastic.engine.transaction.rebalance import Rebalancer
from megatron.elastic.engine.transaction.wait_for_ranks import await_ranks
from megatron.elastic.observe.phases import RECOVER
from megatron.elastic.platform.garbage import garbage_later
from megatron.elastic.state.record import GradientKey
from megatron.elastic.state.transfer import prune

__all__ = ["Recovery"]


class Recovery:
    """The recovery of one rank. For the training thread. ``host_state``: returns the host's counters for newcomers."""

    def __init__(
        self,
        context: Context,
        program: Program,
        migrator: Migrator,
        certifier: Certifier,
        rebalancer: Rebalancer,
        step_commit: StepCommit,
        host_state: Callable[[], str],
    ) -> None:
        self._context = context
        self._program = program
        self._migrator = migrator
        self._certifier = certifier
        self._rebalancer = rebalancer
        self._step_commit = step_commit
        self._host_state = host_state
        self._unexplained = -1
        """Version at which communication last failed without the loss of a rank."""

    # -- members -------------------------------------------------------------------

    def ask(self, what: Request) -> bool:
        """Request a generation (JOIN, LEAVE or REFORM) and recover in it. Returns whether the present phase is over."""
        at = self._context
        at.agreement.membership.request(what)
        return self.recover(GenerationChanged(at.view.generation + 1))

    @garbage_later()
    def recover(self, error: CommError) -> bool:
        """Agree on a generation and settle in it. Returns whether the present phase is over.

        ``StateLost``, ``SilentCorruption``, ``PlanError``, ``CertificateError`` and ``CommunicationFault`` end the job.
        """
        at = self._context
        started = at.tools.threads.monotonic()
        while True:
            before = at.view
            at.abandon_gather()
            self._certifier.drop()
            try:
                self._explain(error)
                at.timer.enter(RECOVER)
                self._migrator.forget()
                attempted = self._step_commit.present_step if self._step_commit.under_way else at.record.version + 1
                view, outcome = at.agreement.agree(error, self._report(), at.history, attempted)
                if outcome.lost:  # which explains the error after all
                    self._unexplained = -1
                self._migrator.renew()
                self._program.failures.update(outcome.failures)
                at.view, at.needs_rebalance = view, True
                at.tools.reach("in_recovery_promote", at.record.version)
                self._settle(outcome, before)
                at.tools.reach("in_recovery_resume", at.record.version)
                at.injector.settle()
                at.listener.settled(outcome, at.view, at.tools.threads.monotonic() - started)
                self._migrator.exposed(started, outcome.newcomers)
                at.agreement.unreported, at.agreement.members = (), ()
                return outcome.phase_over
            except StateLost as lost:
                at.listener.lost(lost, at.tools.pool)
                raise
            except SilentCorruption as changed:
                finding = CertificateOutcome("recovery", at.record.version, 0.0, None, (str(changed),))
                at.listener.examined(at.view, finding)
                raise
            except StageGone as gone:
                error = self._wait_for_ranks(gone)
            except CommError as again:
                error = again

    def _explain(self, error: CommError) -> None:
        """Request new groups for an error without a loss, which other ranks may not have seen; once a step."""
        if isinstance(error, GenerationChanged | PeerLost | CommTimeout):
            return
        version = self._context.record.version
        if self._unexplained == version:
            raise CommunicationFault(
                f"communication after step {version} failed twice, the second time in new groups: {error}"
            ) from error
        self._unexplained = version
        self._context.agreement.membership.request(Request.REFORM)

    def _report(self) -> Report:
        at, program = self._context, self._program
        if at.tools.fabric.unfinished():
            self._take_back()
        report = Report(
            holdings=at.tools.pool.holdings(
                self._step_commit.known_rows(), at.history.of(at.record).placement, self._step_commit.voting.placement
            ),
            phase=program.phase,
            done=program.done,
            parameters=at.parameters,
            held_for=at.view.assignment.digest(),
            failures=program.failures,
            under_way=program.under_way,
            voting=self._step_commit.voting.digest,
            admitted=at.admitted,
            doubts=at.tools.pool.doubts(),
            reporter=program.reporter,
        )
        at.listener.reporting(report)
        return report

    def _take_back(self) -> None:
        """Count nothing as done that a device may have been left with: parameters, sums for a vote, a fenced action."""
        at = self._context
        at.parameters, at.tools.arena.filled = -1, False
        self._step_commit.void()
        self._program.done = False

    def _settle(self, outcome: RecoveryOutcome, before: View) -> None:
        """Bring every survivor to the same version, with matching parameters. ``before``: the view until now."""
        at, resolution = self._context, outcome.resolution
        record, pool = resolution.record, at.tools.pool
        assert record is not None, "only a lost state has no record"
        revote = resolution.kind == "revote"
        # Keep the copies that the record names until a vote: the repeated vote may fail too.
        prune(pool, at.view.placement, *([outcome.named.placement] if revote else []))
        if pool.snapshot == "state":
            # Possibly one step back; the configuration that the lost step's record named stays in force.
            record = record.in_place_of(outcome.named.digest)
            pool.revert(record)
            self._step_commit.followed = -1
        pool.remember(record)
        # Requests agreed before are void: some ranks may not have asked for them yet. The next vote agrees anew.
        at.record, at.acted_on = record, record.version
        at.listener.recorded(record, at.view, "decision", resolution=resolution)
        at.history.enter(at.view.configuration)
        if outcome.newcomers:
            place = outcome.first_open, outcome.between_steps
            send_join_state(at.tools.fabric, outcome.decision, lambda: self._join_state(*place))
        self._rebalancer.renew()
        pool.discard(resolution.gradient_key, record.version)
        # All ranks gather if one has to: an interrupted gather left some parameters at an older version.
        at.parameters = min(outcome.oldest_parameters, record.version)
        self._step_commit.update()
        if outcome.newcomers:
            self._fill_newcomers(outcome, before)
        refused = None
        if revote:
            refused = self._vote_again(resolution.gradient_key)
            self._step_commit.update()
        else:
            self._step_commit.void()
        self._step_commit.finish(catching_up=True)
        at.settled_at = at.record.version
        if outcome.newcomers and outcome.between_steps:
            self._certifier.begin("join", self._every_block())
            at.know_keys()
        elif outcome.newcomers:
            self._certifier.certify("join", self._every_block())
        else:
            self._certifier.certify("recovery", outcome.promoted)
        self._migrator.replenish()
        if refused is not None:
            raise refused

    def _fill_newcomers(self, outcome: RecoveryOutcome, before: View) -> None:
        """Gather parameters with the newcomers; members that have them all wait for that in the next step only."""
        at = self._context
        groups = at.views.groups(before), at.views.groups(at.view)
        whole = at.parameters == at.record.version and have_parameters(*groups, outcome.newcomers)
        beside = whole and outcome.between_steps and at.tools.fabric.writes_values_only()
        if not beside:
            at.parameters = -1  # of no version until the gather is over: the loss of a newcomer may cut it off
        at.gathering = at.body.begin_gather(at.record.version, for_others=beside)
        if not beside:
            at.settle_parameters()

    def _vote_again(self, key: GradientKey | None) -> NotFinite | None:
        """Repeat the vote over retained gradients. Returns the vote's refusal, to be raised once all have settled."""
        assert key is not None, "a repeated vote has the key of its gradients"
        try:
            self._step_commit.vote_again(key)
        except NotFinite as error:
            return error
        return None

    def _every_block(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(block.key for layout in self._context.views.layouts.values() for block in layout.blocks)

    def _wait_for_ranks(self, gone: StageGone) -> CommError:
        """Wait until a newer generation is frozen, which may bring back ranks of the lost stage."""
        at = self._context
        try:
            if newcomers(gone.decision):  # some ranks have come back, not all that are needed
                first = first_open(reports_of(gone.decision).values())
                send_join_state(at.tools.fabric, gone.decision, lambda: self._join_state(first, between_steps=False))
            config, membership = at.views.config, at.agreement.membership
            step, say = self._step_commit.present_step, at.listener.noticed
            await_ranks(membership, gone, step, config.respawn, config.detection_timeout, say, at.agreement.threads)
        except CommError as error:
            return error
        return GenerationChanged(gone.decision.generation + 1)

    # -- newcomers -----------------------------------------------------------------

    def _join_state(self, first: int, between_steps: bool) -> JoinState:
        """Return the join state. ``first``: the members' first open phase."""
        at = self._context
        place, in_step = self._program.place(first), self._step_commit.under_way
        committed = not in_step or at.record.version == self._step_commit.present_step
        return JoinState(
            catalog={key: tuple(slot.spec for slot in layout.slots) for key, layout in at.views.layouts.items()},
            hardware=at.views.hardware,
            configuration=at.view.configuration,
            confirmed=at.history.of(at.record),
            record_text=at.record.to_json(),
            place=place,
            step_committed=place.inside and committed,
            between_steps=between_steps,
            report_keys=at.report_keys,
            host=self._host_state(),
        )

    def join(self, join_state: JoinState) -> None:
        """Take over the members' context, then gather parameters; a newcomer's first call."""
        at, program = self._context, self._program
        at.record, at.history, at.report_keys = join_state.record, join_state.history(), join_state.report_keys
        at.acted_on, at.admitted = at.record.version, at.view.generation
        at.listener.recorded(at.record, at.view, "join")
        at.parameters = -1
        program.take(join_state.place)
        program.end_only = join_state.step_committed
        self._rebalancer.renew()
        at.tools.pool.start(at.record)
        at.tools.reach("in_join", at.record.version)
        body = at.body  # begins its groups: over gloo members use them before the barrier, and all ranks connect them
        if at.tools.pool.snapshot == "state":
            dist.barrier(group=at.tools.fabric.world)  # the one that ends StepBody.follow
            self._step_commit.followed = at.record.version
        at.needs_rebalance = True
        at.gathering = body.begin_gather(at.record.version)
        at.settle_parameters()
        at.settled_at = at.record.version
        self._certifier.begin("join", self._every_block())
        if join_state.between_steps:
            at.know_keys()
        else:
            self._certifier.conclude()
        self._migrator.replenish()
        at.injector.settle()
