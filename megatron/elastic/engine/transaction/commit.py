"""The commit of a step, from one attempt at it to the state it leads to (docs/design.md §3).

    commit   compute, reduce and ship, then vote: with the vote's sum every rank makes the same
             record, and the step can no longer be undone. A step that is left out has the vote alone
    finish   update every copy held here, then gather parameters; safe to repeat

An attempt is kept until the step is over. If every rank that had the vote's sum is lost,
:meth:`StepCommit.vote_again` repeats the vote over the retained gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron.elastic.comm.exchange import gather_messages
from megatron.elastic.control.requests import Pending
from megatron.elastic.engine.compute.block_checksums import Disputes
from megatron.elastic.engine.compute.executor import PassResult
from megatron.elastic.engine.compute.ledger import Expected, Ledger, LedgerError, differences
from megatron.elastic.engine.compute.vote import Tally, VoteLayout, agreed_by, mean_of, plan_digest, wishes
from megatron.elastic.engine.failures import NotFinite
from megatron.elastic.engine.generation.configuration import Configuration
from megatron.elastic.engine.generation.view import block_index
from megatron.elastic.engine.settings import StepResult
from megatron.elastic.engine.transaction.amaxes import largest_over_ranks
from megatron.elastic.engine.transaction.certify import Certifier
from megatron.elastic.engine.transaction.context import Context
from megatron.elastic.engine.transaction.listener import Voted
from megatron.elastic.engine.transaction.migrate import Migrator
from megatron.elastic.engine.transaction.rebalance import Rebalancer
from megatron.elastic.engine.transaction.reshape import open_requests
from megatron.elastic.engine.transaction.tools import StepInput
from megatron.elastic.plan.pace import ranges_of
from megatron.elastic.state.record import GradientKey, Vote, advance
from megatron.elastic.state.verify import compared

__all__ = ["StepCommit"]

Contents = tuple[dict[int, int], dict[int, int]]
"""Sample number → digest of its contents, as read for the first unit and for the loss."""


@dataclass
class _Attempt:
    """The results of one attempt at a step so far."""

    step: StepInput
    key: GradientKey
    """Key of its gradients."""
    skipped: tuple[int, ...]
    """Rows that the plan of this attempt leaves out."""
    named: Configuration
    """The configuration that its vote is to name; gradients are shipped to the copies of it."""
    tally: Tally | None = None
    """Set once every gradient is reduced and shipped: from then on the vote can be taken again."""
    requests: Pending = field(default_factory=Pending)
    """Requests that were pending when this rank voted."""
    disputes: Disputes = field(default_factory=Disputes)
    """Copies of this rank that differ from their owners', as found while shipping."""
    compared: int = 0
    """Interval of the comparison of contents in this attempt; 0: none were compared."""
    contents: Contents = field(default_factory=lambda: ({}, {}))
    """Digests of the samples that this rank read."""
    amaxes: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Largest values of tensors in FP8, over all ranks."""


def _never() -> bool:
    return False


class StepCommit:
    """The step of one rank. Each vote calls ``save_due`` and ``share_written``, by which ranks agree on saves."""

    def __init__(self, context: Context, migrator: Migrator, certifier: Certifier, rebalancer: Rebalancer) -> None:
        self._context = context
        self._migrator = migrator
        self._certifier = certifier
        self._rebalancer = rebalancer
        self._blocks = block_index(context.views.layouts)
        self.save_due: Callable[[], bool] = _never
        """Tells whether this rank needs a checkpoint at the next boundary; one such rank is enough."""
        self.share_written: Callable[[], bool] = _never
        """Tells whether this rank has written its share of the checkpoint under way."""
        self.computed = 0
        """Samples computed in the newest step: fewer than consumed where the policy lets the batch shrink."""
        self.followed = -1
        """Version that all mirrors are known to have (``state`` mode)."""
        self._attempt: _Attempt | None = None
        self._key: GradientKey | None = None
        """Key of the newest gradients computed here."""
        self._voted = context.view, VoteLayout((), ())
        """The view and the layout of the last vote."""

    # -- the present attempt -------------------------------------------------------

    @property
    def under_way(self) -> bool:
        """True if a step is being computed or finished."""
        return self._attempt is not None

    @property
    def present_step(self) -> int:
        """The step under way, or the newest committed one between steps."""
        return self._context.record.version if self._attempt is None else self._attempt.step.step

    def known_rows(self) -> dict[GradientKey, list[tuple[int, int]]]:
        """Return the ranges of rows whose loss this rank can report in a repeated vote, by gradient.

        None where routers have a bias, or layers add losses: the tokens that a lost rank counted, and the losses of its
        layers, are lost with it, also those of rows whose loss a survivor reports.
        """
        attempt, settings = self._attempt, self._context.tools.settings
        if attempt is None or attempt.tally is None or settings.hyper.balance is not None or settings.layer_losses:
            return {}
        known = (*attempt.tally.rows, *attempt.skipped)  # a row left out has no loss to report
        return {attempt.key: [(row, row + 1) for row in known]}

    @property
    def voting(self) -> Configuration:
        """The configuration that the vote under way is to name, as of the shipping of its gradients."""
        return self._context.view.configuration if self._attempt is None else self._attempt.named

    def void(self) -> None:
        """Note that the attempt's gradients were discarded, so that no vote can be repeated over them."""
        if self._attempt is not None:
            self._attempt.tally = None

    def close(self) -> None:
        """Forget the attempt: the step is over on every rank."""
        self._attempt = None

    # -- up to the vote ------------------------------------------------------------

    def commit(self, work: StepInput) -> None:
        """Compute, reduce, ship, vote. On return the context's record is that of ``work.step``."""
        at, body, step = self._context, self._context.body, work.step
        self._key = key = self._next_key(step)
        skipped = tuple(range(work.address.size)) if work.left_out else at.view.plan.skipped
        attempt = self._attempt = _Attempt(work, key, skipped, self._migrator.heading)
        self.computed = work.address.size - len(skipped)
        at.tools.reach("after_prepare", step)
        self._migrator.link_is_free()
        if work.left_out:
            at.settle_parameters()
        result, computing = (None, 0.0) if work.left_out else self._reduced(attempt)
        with at.timer.phase("ship"):
            self._migrator.agree(computing)
            attempt.named = self._migrator.heading
            self._migrator.arrive()
            if result is not None:
                body.ship(key, attempt.named.placement)
        at.tools.reach("after_ship", step)
        if result is None:
            attempt.tally = Tally()
        else:
            attempt.amaxes = largest_over_ranks(at.tools, at.view.living, result.amaxes)
            attempt.tally, attempt.disputes, attempt.contents = body.tally(result, key), body.disputes, result.contents
            attempt.compared = body.compared
        attempt.requests = open_requests(at)
        wishes(attempt.tally, attempt.requests)
        attempt.tally.saves, attempt.tally.written = self.save_due(), self.share_written()
        attempt.tally.ready = self._migrator.ready(computing)
        self._rebalancer.add_to(attempt.tally)
        self._vote(attempt, attempt.tally)

    def _reduced(self, attempt: _Attempt) -> tuple[PassResult, float]:
        """Compute and reduce the gradients; return the result of the pass and the seconds it took."""
        at, step = self._context, attempt.step.step
        began = at.tools.threads.monotonic()
        with at.timer.phase("compute"):
            # A migration under way may change between reducing and shipping to whom gradients go: ship then.
            ships = not self._migrator.under_way
            result = at.body.train(attempt.step, at.record, attempt.key, ships, at.gathering)
            at.settle_parameters()
        computing = at.tools.threads.monotonic() - began
        self._migrator.link_is_taken()
        at.tools.reach("before_reduce", step)
        with at.timer.phase("reduce"):
            at.body.reduce(attempt.key)
        at.tools.reach("after_reduce", step)
        return result, computing

    def _next_key(self, step: int) -> GradientKey:
        """Return the key of a new attempt's gradients; equal on every rank, since all saw the same refused votes."""
        key, before = GradientKey(step - 1, self._context.view.generation), self._key
        if before is None or (before.step, before.generation) != (key.step, key.generation):
            return key
        return key._replace(attempt=before.attempt + 1)

    def vote_again(self, key: GradientKey) -> None:
        """Repeat the vote over the complete gradients of an earlier generation, retained under ``key``."""
        attempt = self._attempt
        if attempt is None or attempt.tally is None:
            raise RuntimeError("the vote must be repeated, but this rank has not shipped its gradients")
        attempt.key = key
        attempt.tally.steady, attempt.tally.times, attempt.tally.clocks = 0, {}, {}  # measured under another plan
        attempt.compared = 0  # copies of lost ranks have no say in the repair, so origins stay known
        attempt.tally.ready = 0  # the migration of that generation has ended with it
        self._context.body.weigh(attempt.tally, key)
        self._vote(attempt, attempt.tally)

    def _vote(self, attempt: _Attempt, tally: Tally) -> None:
        """Take the vote, the commit point: from its sum every rank computes the same record."""
        at, step, address = self._context, attempt.step.step, attempt.step.address
        named = self._migrator.heading  # in a repeated vote: the configuration of its attempt without the lost ranks
        samples = f"{address} left out" if attempt.step.left_out else str(address)
        tally.plan = plan_digest(at.view.plan.digest, named.digest, at.record.digest, samples)
        with at.timer.phase("vote"):
            self._certifier.conclude()
            rates = at.tools.settings.hyper.schedule.rates(at.record.scheduler_steps)
            tally.rates = rates if at.tools.fabric.rank == at.view.living[0] else ()
            layout = self._layout_for(at.agree_on_keys(tally.report), len(rates))
            at.tools.reach("before_vote", step)
            at.agreement.membership.await_begin(at.agreement.timeout)
            oldest, retained = at.tools.pool.oldest(), at.tools.pool.notes.take_retained()
            total = at.body.vote(layout, tally)
            if total.unannounced:  # the loss functions of some rank report something new
                total = at.body.vote(replace(layout, report_keys=at.agree_on_keys(tally.report, anew=True)), tally)
        self._refuse(total, attempt)
        self._rebalancer.observe(total)
        self._rebalancer.follow(named.assignment)
        voted = Voted(at.record, address, named, oldest, retained, *self._migrator.named_in_time())
        at.record = advance(at.record, self._outcome(total, attempt), at.tools.settings.hyper)
        at.admitted = 0
        at.tools.pool.remember(at.record)
        at.listener.recorded(at.record, at.view, "vote", voted)
        self._migrator.voted(total.ready == total.voters)
        cells = at.view.assignment.cells
        self._migrator.confirm()
        if at.view.assignment.cells != cells:
            self._rebalancer.renew()
        if total.suspects:
            self._migrator.forget(keep=False)
            self._certifier.mend_memory(attempt.disputes)
            at.tools.pool.doubt([key for key in attempt.disputes.contents if key in at.tools.pool], -1)
            self._migrator.exposed(at.tools.threads.monotonic())
        if attempt.compared:
            compared(at.tools.pool, step - 1, attempt.compared)
        at.tools.reach("after_vote", step)

    def _layout_for(self, report_keys: tuple[str, ...], groups: int) -> VoteLayout:
        """Return the layout of the vote, the one before if nothing has changed: it knows where its slots are."""
        at, clocked = self._context, self._rebalancer.clocked_cells()
        view, layout = self._voted
        if view is not at.view or (layout.report_keys, layout.clocked, layout.groups) != (report_keys, clocked, groups):
            counted = at.tools.settings.hyper.counted
            layout = VoteLayout(self._blocks, report_keys, ranges_of(at.view.plan), clocked, groups, counted)
            self._voted = at.view, layout
        return layout

    def _refuse(self, total: Tally, attempt: _Attempt) -> None:
        """Raise for a sum that must not become a record; the same on every rank."""
        step = attempt.step.step
        if total.disputes:
            self._certifier.dispute(attempt.disputes)
        self._check_ledger(total.ledger, attempt)
        if total.overflows and self._context.tools.settings.check_finite:
            raise NotFinite(f"step {step}: a gradient is not finite (--no-check-for-nan-in-loss-and-grad lets it pass)")

    def _check_ledger(self, ledger: Ledger, attempt: _Attempt) -> None:
        """Compare the samples that all ranks computed with the plan of the attempt. Raises ``LedgerError``."""
        at, address, skipped = self._context, attempt.step.address, frozenset(attempt.skipped)
        unweighted = at.tools.settings.per_token_loss or attempt.step.left_out
        expected = Expected(
            samples=[address.first + row for row in range(address.size) if row not in skipped],
            units=at.tools.interface.compute_units,
            weights=0.0 if unweighted else at.view.plan.grid.data_parallel_size,
            complete=attempt.key.generation == at.view.generation,
        )
        findings = ledger.findings(expected)
        if findings:
            findings += differences(gather_messages(at.tools.fabric, Contents, attempt.contents))
            raise LedgerError(f"step {attempt.step.step} is not committed: {'; '.join(findings)}")

    def _outcome(self, total: Tally, attempt: _Attempt) -> Vote:
        view, settings = self._context.view, self._context.tools.settings
        return Vote(
            gradient=attempt.key,
            norm_sq=total.squares,
            found_nonfinite=total.overflows > 0,
            denominator=total.tokens if settings.per_token_loss else view.plan.grid.data_parallel_size,
            tokens=total.tokens,
            zeros=total.zeros,
            samples=attempt.step.address.size,
            left_out=attempt.step.left_out,
            losses=total.report,
            ledger_hash=total.ledger.digest,
            plan_hash=view.plan.digest,
            placement=self._migrator.heading.digest,
            agreed=agreed_by(total, attempt.requests),
            speeds=self._migrator.heading.assignment.same_cells(view.assignment, self._rebalancer.pace.speeds()),
            rates=total.rates,
            expert_tokens=total.expert_tokens,
            amaxes=attempt.amaxes,
        )

    # -- after it ------------------------------------------------------------------

    def update(self) -> None:
        """Bring every copy held here to the record's version. Safe to repeat."""
        at = self._context
        pool, step = at.tools.pool, at.record.version
        with at.timer.phase("update"):
            keys = [block.key for block in at.view.owned] if pool.snapshot == "state" else tuple(pool)
            unread, middle = at.view.mirrored_keys, len(keys) // 2
            pool.apply(at.record, keys[:middle], unread)
            at.tools.reach("mid_update", step)
            pool.apply(at.record, keys[middle:], unread)
        at.tools.reach("after_update", step)
        if pool.snapshot == "state" and self.followed < step:
            with at.timer.phase("ship"):
                at.body.follow(at.record)
            self.followed = step

    def finish(self, catching_up: bool = False) -> None:
        """Update copies to the committed record, then gather parameters. Safe to repeat.

        ``catching_up``: gather also after a skipped step, because an earlier gather may have been interrupted.
        """
        self.update()
        self._migrator.updated()
        at = self._context
        step = at.record.version
        if at.parameters < step and at.gathering is None:
            gathers = not at.record.skipped or catching_up or at.parameters < step - 1
            with at.timer.phase("gather"):
                if gathers and not catching_up and self._goes_on():
                    at.gathering = at.body.begin_gather(step)
                elif gathers:
                    at.body.gather(step, self._migrator.came)
            if at.gathering is None:
                at.parameters = step
        at.tools.reach("after_gather", step)
        self._migrator.link_is_free()
        self._migrator.prove()
        if at.tools.relocation is not None:
            at.tools.relocation.follow(at.view.owned)

    def _goes_on(self) -> bool:
        """Return whether the gather may go on behind the next forward; the same on every rank.

        Not if members change before that, as far as the vote agreed on it, or no step follows. A migration that the
        vote has ended takes a certificate of the parameters now.
        """
        at, agreed = self._context, self._context.record.agreed
        steps = at.tools.settings.steps
        last = agreed.drain or (steps is not None and at.record.version >= steps)
        changes = agreed.join or bool(agreed.leave) or bool(agreed.reshape)
        return at.body.overlap.gather and not last and not changes and not self._migrator.has_ended

    def result(self) -> StepResult:
        """Return the newest step in the form that the host's loop expects."""
        record, settings = self._context.record, self._context.tools.settings
        losses = {key: mean_of(*sums) for key, sums in record.losses.items()}
        zeros = record.zeros if settings.count_zeros else None
        return StepResult(losses, record.skipped, record.grad_norm, zeros, record.loss_scale)
