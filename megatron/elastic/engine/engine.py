"""The engine's surface: ``step``, ``evaluate``, ``fenced``.

A call returns when its work is committed on every living rank. Meanwhile ranks may be
lost at any instant. The survivors then agree on a generation (:mod:`recover`) and finish or
re-run the step; the caller only sees a longer call. No committed step is undone, and no
healthy process is restarted.

The parts of a step:

    boundary      admit and release ranks, begin migrations              :mod:`boundary`
    prepare       take the samples of this step, the plan of this generation
    compute, reduce, ship, vote                                          :mod:`commit`, :mod:`phases`
    update, gather                                                       the same
    recover       after a loss in any of them                            :mod:`recover`

All parts share one :class:`Context`. Each part knows only those before it in this list:
context, certifier, migrator, rebalancer, step commit, recovery, boundary and fence, engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import CommError
from megatron.elastic.engine.compute.ledger import Expected, Ledger, LedgerError
from megatron.elastic.engine.compute.model_interface import ForwardStep
from megatron.elastic.engine.compute.samples import SampleSource, StepAddress
from megatron.elastic.engine.compute.vote import Tally, VoteLayout
from megatron.elastic.engine.failures import NotFinite
from megatron.elastic.engine.generation.factory import ViewFactory
from megatron.elastic.engine.generation.view import View
from megatron.elastic.engine.inject import InjectedFault
from megatron.elastic.engine.settings import StepResult
from megatron.elastic.engine.transaction.agreement import Agreement
from megatron.elastic.engine.transaction.boundary import Boundary
from megatron.elastic.engine.transaction.certify import Certifier
from megatron.elastic.engine.transaction.commit import StepCommit
from megatron.elastic.engine.transaction.context import Context
from megatron.elastic.engine.transaction.early_end import EarlyEnd, Reasons
from megatron.elastic.engine.transaction.fence import Fence, Program
from megatron.elastic.engine.transaction.join import JoinState
from megatron.elastic.engine.transaction.listener import Stepped
from megatron.elastic.engine.transaction.migrate import Migrator
from megatron.elastic.engine.transaction.rebalance import Rebalancer
from megatron.elastic.engine.transaction.recover import Recovery
from megatron.elastic.engine.transaction.tools import StepInput, Tools
from megatron.elastic.state.layout import BlockKey, UnitShard
from megatron.elastic.state.record import StepRecord

__all__ = ["Engine"]

T = TypeVar("T")


class Engine:
    """One rank's engine.

    ``host_state``: returns the host's counters for newcomers. ``newcomer``: this rank's first call is :meth:`join`;
    otherwise all ranks start together with :meth:`resume`.
    """

    def __init__(
        self,
        context: Context,
        rebalancer: Rebalancer,
        host_state: Callable[[], str] = str,
        newcomer: bool = False,
    ) -> None:
        self.context = context
        self.attempts = 0
        """Number of times the present step was computed."""
        self._program = Program()
        self._certifier = Certifier(context)
        self._migrator = Migrator(context, self._certifier)
        self._rebalancer = rebalancer
        self._step_commit = StepCommit(context, self._migrator, self._certifier, rebalancer)
        self._recovery = Recovery(
            context, self._program, self._migrator, self._certifier, rebalancer, self._step_commit, host_state
        )
        considered = -1 if newcomer else context.view.generation
        self._boundary = Boundary(context, self._migrator, rebalancer, self._recovery, considered)
        self._fence = Fence(self._program, context.tools.fabric, self._recovery, lambda: context.view.reporter)
        self._doubted = (-1, -1)
        """(step, generation) of the newest step computed again because a gradient was not finite."""

    # -- before the first step -----------------------------------------------------

    def adopt_parameters(self) -> None:
        """Set masters of owned blocks to the model's parameters, and moments to zero."""
        at = self.context
        for block in at.view.owned:
            parameters, pool = at.tools.arena.block_parameters(block), at.tools.pool
            pool.put(block.key, parameters, at.record.version, place=pool.owners)
        at.tools.pool.start(at.record)

    def resume(
        self,
        record: StepRecord,
        state: Mapping[UnitShard, torch.Tensor] | None,
        saved: Mapping[BlockKey, str] = MappingProxyType({}),
    ) -> None:
        """Go on from a loaded state, or with ``None`` take masters from parameters.

        ``state``: (unit, shard) → fp32 ``[3, numel]``, in the form of :meth:`empty_state`. Collective. Mirrors and
        the parameters of all replicas are set from the owners' state. ``saved``: hashes of the contents that the
        checkpoint was made from. Raises ``CertificateError`` if the state is other than that.
        """
        at = self.context
        at.record = record
        at.listener.recorded(record, at.view, "start" if state is None else "load")
        if state is None:
            self.adopt_parameters()
        else:
            for block in at.view.owned:
                master, exp_avg, exp_avg_sq = state[block.key[:2]][:, block.start : block.stop]
                pool = at.tools.pool
                pool.put(block.key, master, record.version, exp_avg, exp_avg_sq, place=pool.owners)
            at.tools.pool.start(record)
        at.body.share(record.version)
        at.body.gather(record.version)
        at.parameters = at.settled_at = record.version
        everything = [block.key for layout in at.views.layouts.values() for block in layout.blocks]
        self._certifier.certify("start" if state is None else "load", everything, saved)

    def join(self, join_state: JoinState) -> None:
        """Take over the members' context; a newcomer's first call. Raises ``CommError``: the caller tries again."""
        self._recovery.join(join_state)

    def empty_state(self) -> dict[UnitShard, torch.Tensor]:
        """Return zeros for the state of every held (unit, shard): fp32 ``[3, numel]`` (master, exp_avg, exp_avg_sq)."""
        arena = self.tools.arena
        rows = torch.zeros((3, arena.state_stop), dtype=torch.float32)
        return {key: rows[:, piece.start : piece.stop] for key, piece in arena.slices.items()}

    def agree_on_saves(self, due: Callable[[], bool], written: Callable[[], bool]) -> None:
        """Have each vote carry this rank's ``due()`` (needs a checkpoint) and ``written()`` (has written its share)."""
        self._step_commit.save_due, self._step_commit.share_written = due, written

    # -- a step ----------------------------------------------------------------------

    def step(
        self, forward_step: ForwardStep, source: SampleSource | None, address: StepAddress, left_out: bool = False
    ) -> StepResult:
        """Compute and commit the next step, on the samples of ``address``.

        ``left_out``: commit a step that consumes its samples and changes nothing else; nothing is computed. Raises
        ``ValueError`` if there are not as many samples as the settings give this step.
        """
        at, program = self.context, self._program
        at.tools.reach("between_steps", at.record.version)
        if not program.inside:
            self._boundary.cross()
        program.inside = False
        program.enter_step()
        target, program.end_only = at.record.version + (not program.end_only), False
        work = StepInput(target, address, forward_step, source, left_out)
        self._size(work)
        at.timer.begin(target, "prepare")
        self.attempts, started = 0, at.tools.threads.monotonic()
        if not at.needs_rebalance and not self._migrator.under_way:
            at.injector.restore()
        at.tools.reach("before_step", target)
        while not self._attempted(work):
            pass
        self._step_commit.close()
        program.over()
        at.tools.reach("after_step", target)
        seconds = at.tools.threads.monotonic() - started
        at.listener.stepped(
            at.record,
            at.view,
            Stepped(
                address,
                seconds,
                at.timer.finish(),
                self.attempts,
                self.computed,
                self.state_bytes,
                at.tools.pool.notes.take_applied(),
            ),
        )
        return self._step_commit.result()

    def _size(self, work: StepInput) -> None:
        """Plan for the samples of this step, if they are not as many as those of the plan."""
        at = self.context
        if at.record.version == work.step:
            return  # committed already, with the plan of its own generation
        if work.address.size != at.views.rows_after(at.record):
            raise ValueError(
                f"step {work.step} is called with {work.address.size} samples, and {at.views.rows_after(at.record)} "
                f"are due after {at.record.consumed_samples}"
            )
        with at.timer.phase("plan"):
            at.view = at.views.sized(at.view, work.address.size)

    def _attempted(self, work: StepInput) -> bool:
        """Compute and commit once, or finish a committed step. Returns False if the attempt must be repeated."""
        try:
            try:
                if self.record.version < work.step:
                    self.attempts += 1
                    self._step_commit.commit(work)
                self._step_commit.finish()
                return True
            except CommError as error:
                self._recovery.recover(error)
        except NotFinite as error:
            # Every rank sees it in the same vote. A transient hardware fault disappears when the step is run again.
            if self._doubted == (work.step, self.view.generation):
                raise
            self._doubted = (work.step, self.view.generation)
            self.context.listener.noticed(f"{error}: the step is computed again")
        return False

    # -- beside steps ------------------------------------------------------------------

    def fenced(self, body: Callable[[], T], together: bool = False, reads_parameters: bool = True) -> T:
        """Run a collective action, repeated in the next generation if one begins (:meth:`Fence.run`).

        Parameters are those of the newest step inside, unless ``reads_parameters`` is false: then their gather may
        still go on.
        """

        def settled() -> T:
            self.context.settle_parameters()
            return body()

        return self._fence.run(settled if reads_parameters else body, together)

    def evaluate(
        self,
        forward_step: ForwardStep,
        source: SampleSource | None,
        addresses: Sequence[StepAddress],
        ends: Reasons = MappingProxyType({}),
    ) -> dict[str, tuple[float, float]] | str:
        """Run whole batches of one size forward only; return the loss function's sums: name → (total, count).

        Returns the name of a reason in ``ends`` instead if all ranks left a long evaluation for it.
        """
        sizes = {address.size for address in addresses}
        if len(sizes) > 1:
            raise ValueError(f"batches of {sorted(sizes)} samples are to be evaluated together")

        def body() -> dict[str, tuple[float, float]] | str:
            for size in sizes:
                self.context.view = self.views.sized(self.view, size)
            self.tools.interface.train(False)
            try:
                return self._reported(
                    [StepInput(number, address, forward_step, source) for number, address in enumerate(addresses)], ends
                )
            finally:
                self.tools.interface.train(True)

        return self.fenced(body)

    def _reported(self, batches: Sequence[StepInput], ends: Reasons) -> dict[str, tuple[float, float]] | str:
        at, tally = self.context, Tally()
        early = EarlyEnd(at.tools.fabric, at.tools.threads.monotonic, ends, len(batches))
        for done, batch in enumerate(batches):
            why = early.reason(done)
            if why:
                return why
            at.tools.reach("in_evaluate", at.record.version)
            result = at.body.compute(batch, at.record, training=False)
            if at.view.leads:
                tally.ledger.add(result.ledger)
                for key, (total, count) in result.report.items():
                    before = tally.report.get(key, (0.0, 0.0))
                    tally.report[key] = (before[0] + total, before[1] + count)
        total_of_all = self._added_up(tally)
        self._check_evaluated(total_of_all.ledger, [batch.address for batch in batches])
        return total_of_all.report

    def _added_up(self, tally: Tally) -> Tally:
        """Return the sum over all ranks of reported values and ledgers."""
        at, anew = self.context, False
        while True:
            layout = VoteLayout((), at.agree_on_keys(tally.report, anew))
            total = layout.unpack(*at.tools.fabric.sum_over_ranks(*layout.pack(tally)))
            if not total.unannounced:
                return total
            anew = True

    def _check_evaluated(self, ledger: Ledger, addresses: Sequence[StepAddress]) -> None:
        skipped = frozenset(self.view.plan.skipped)
        samples = [at.first + row for at in addresses for row in range(at.size) if row not in skipped]
        findings = ledger.findings(Expected(samples, self.tools.interface.compute_units, training=False))
        if findings:
            raise LedgerError(f"evaluation after step {self.record.version}: {'; '.join(findings)}")

    def parameter_norm(self) -> float:
        """Return the L2 norm of all parameters, each counted once, from the masters of their owners."""

        def body() -> float:
            total = torch.zeros(1, dtype=torch.float64)
            for block in self.view.owned:
                total += self.tools.pool.get(block.key).master.double().square().sum().cpu()
            dist.all_reduce(total, group=self.tools.fabric.world)
            return float(total.sqrt())

        return self.fenced(body)

    def flip_bit(self, copy: str, tensor: str) -> None:
        """Flip a bit of the first block that this rank owns (``copy`` "owner") or mirrors (fault injection).

        Raises :class:`InjectedFault` if this rank has no such copy.
        """
        blocks = self.view.owned if copy == "owner" else self.view.mirrored
        if not blocks:
            raise InjectedFault(f"flip: rank {self.view.rank} is the {copy} of no block")
        self.tools.pool.flip_bit(blocks[0].key, tensor)

    def spoil_gradient(self) -> None:
        """Make a number of this rank's unreduced gradient infinite (fault injection).

        Raises :class:`InjectedFault` if this rank computes no layers.
        """
        gradients = self.tools.arena.gradients
        if not gradients.numel():
            raise InjectedFault(f"nonfinite: rank {self.view.rank} has no gradients")
        if self.tools.exact is not None:
            self.tools.exact.spoil()
        else:
            gradients[0] = math.inf

    def close(self) -> None:
        """Stop background work and restore this rank's clock before it leaves. Idempotent."""
        self._rebalancer.close()
        self._migrator.forget()
        if self.tools.relocation is not None:
            self.tools.relocation.close()

    # -- read by other parts -------------------------------------------------------------

    @property
    def tools(self) -> Tools:
        """The objects that every phase uses."""
        return self.context.tools

    @property
    def views(self) -> ViewFactory:
        """Makes this rank's plans and views."""
        return self.context.views

    @property
    def agreement(self) -> Agreement:
        """The agreement on generations, with the membership."""
        return self.context.agreement

    @property
    def record(self) -> StepRecord:
        """Record of the newest committed step."""
        return self.context.record

    @property
    def view(self) -> View:
        """This rank's view of the present generation."""
        return self.context.view

    @property
    def computed(self) -> int:
        """Samples computed in the newest step: fewer than consumed if the policy lets the batch shrink."""
        return self._step_commit.computed

    @property
    def state_bytes(self) -> int:
        """Bytes of state received in added copies so far, used or not."""
        return self._migrator.bytes_received

    @property
    def draining(self) -> bool:
        """True if all ranks were asked to save and leave at this boundary."""
        return self.record.agreed.drain

    @property
    def in_step(self) -> bool:
        """True if a step is under way (as against evaluation, saving, or the time between steps)."""
        return self._step_commit.under_way

    @property
    def present_step(self) -> int:
        """The step under way, or the newest committed one between steps."""
        return self._step_commit.present_step

    @property
    def behind(self) -> bool:
        """True if this rank joined late and passes phases that are over, which other ranks have logged."""
        return self._program.behind

    @property
    def is_reporter(self) -> bool:
        """True if this rank logs for the job (:attr:`View.reporter`)."""
        return self.view.reporter == self.view.rank
