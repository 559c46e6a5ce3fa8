"""The engine's surface: ``step``, ``evaluate``, ``fenced``.

A call returns when its work is committed on every living rank. In between,
ranks may be lost at any instant: whoever survives agrees on a generation
(:mod:`recovery`), finishes or re-runs the step, and the caller notices nothing
but the time it took. No committed step is undone, no process that is still
healthy is restarted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.elastic.comm.errors import CommError, GenerationChanged
from megatron.elastic.engine.basis import Basis, History
from megatron.elastic.engine.certificates import (
    ALL_BYTES,
    LOOKED_AT_BYTES,
    Transition,
    examine,
    examine_memory,
    looked_at,
    name_disputes,
    statement,
)
from megatron.elastic.engine.clocks import Clocks
from megatron.elastic.engine.failures import ActionFailed, NotFinite, SilentCorruption
from megatron.elastic.engine.inject import Injector
from megatron.elastic.engine.joining import NEWCOMER, Welcome, newcomers, send_welcome
from megatron.elastic.engine.listener import Listener
from megatron.elastic.engine.movement import Moved, Movement, Streams
from megatron.elastic.engine.port import ForwardStep
from megatron.elastic.engine.recovery import Outcome, Recovery
from megatron.elastic.engine.recut import Recut, better_assignment, everybody_is_here
from megatron.elastic.engine.report import Report
from megatron.elastic.engine.settings import StepResult
from megatron.elastic.engine.source import SampleSource, StepAddress
from megatron.elastic.engine.standing import Standing, replanned
from megatron.elastic.engine.transaction import StepBody, StepInput, Tools
from megatron.elastic.engine.vote import Tally, VoteLayout, agreed_by, check_ledger, leaving_of, wishes
from megatron.elastic.engine.waiting import StageGone
from megatron.elastic.observe.phases import PhaseTimer
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Profile
from megatron.elastic.plan.pace import Pace, measured_profile, ranges_of
from megatron.elastic.state.certificate import CertificateError
from megatron.elastic.state.layout import BlockKey
from megatron.elastic.state.record import GradientKey, StepRecord, Vote, advance
from megatron.elastic.state.transfer import commit, prune, retire

__all__ = ["Engine"]

T = TypeVar("T")


_WINDOW_BYTES = 64 << 20
"""Gradients kept for copies under way to one rank, before blocks are given up and sent again later."""


def _never() -> bool:
    return False


@dataclass
class _Attempt:
    """What one attempt at a step has gathered so far, kept for a vote taken again."""

    step: StepInput
    key: GradientKey | None = None
    skipped: tuple[int, ...] = ()
    """Rows that the plan of this attempt leaves out."""
    tally: Tally | None = None
    """Set once every gradient is reduced and shipped: from then on the vote can be taken again."""
    requests: tuple[str, ...] = ()
    """What was pending when this rank voted."""


@dataclass
class Engine:
    """Owns the record, the standing and the position in the program of one rank."""

    tools: Tools
    recovery: Recovery
    record: StepRecord
    standing: Standing
    injector: Injector
    timer: PhaseTimer
    blocks: tuple[BlockKey, ...]
    """Every block of the job, in the order of the vote."""
    listener: Listener = field(default_factory=Listener)
    host_state: Callable[[], Mapping[str, Any]] = dict
    """The host's counters, for whoever joins."""
    save_due: Callable[[], bool] = _never
    """Whether this rank knows of a checkpoint to be written at the next boundary: an agreement between all ranks."""
    share_written: Callable[[], bool] = _never
    """Whether this rank's share of the checkpoint under way is written."""
    phase: int = 0
    """Number of the phase entered last, equal on all ranks that stand at the same place of the program."""
    under_way: bool = False
    """Whether that phase is not over yet, as far as this rank knows."""
    done: bool = False
    parameters: int = 0
    attempts: int = 0
    """How often the present step was computed."""
    computed: int = 0
    """Samples computed in the newest step: fewer than consumed where the policy lets the batch shrink."""
    history: History = field(default_factory=History)
    """Placements that may be in force after a loss."""
    pace: Pace = field(default_factory=Pace)
    """Measured speeds of the cells, from the votes of this generation."""
    clocks: Clocks | None = None
    """The frequency axis; None where it is off."""
    _clocked: tuple[tuple[int, int], ...] | None = None
    """(cell, kHz) to go on with from the next boundary."""
    _paced: bool = False
    """Published speeds changed: plan again at the next boundary."""
    _attempt: _Attempt | None = None
    _fenced: bool = False
    _catching_up: bool = False
    _arrived: int = 0
    _inside: bool = False
    """Let in while the members were in a step: they have passed the boundary before it."""
    _heeded: int = -1
    """Newest version whose agreed requests were acted on."""
    _failure: str = ""
    """Why the present fenced action could not be done here."""
    _hopeless: tuple[int, str] | None = None
    """(phase, why) of a fenced action that failed on some rank: perhaps one this rank has yet to reach."""
    _doubted: tuple[int, int] = (-1, -1)
    """(step, generation) of the newest step computed again because a gradient was not finite."""
    _refused: tuple[int, ...] = ()
    """Ranks whose wish to leave was turned down last."""
    _after_step: bool = False
    """In the fenced action that follows each step."""
    _end_only: bool = False
    """Let in at the end of a step that was committed before."""
    _unsettled: bool = False
    """Placement may be out of balance or short of mirrors."""
    _streams: Streams | None = None
    """The movement under way."""
    _switching: bool = False
    """All ranks are ready: the movement ends at the next boundary."""
    _settled_at: int = 0
    """Version at the begin of this generation."""
    _measured: Profile | None = None
    """Costs of units as the votes of this generation have them; ``None`` while measuring is off or not steady."""
    _considered: bool = True
    """Whether units should change place has been asked in this generation."""
    _reassigned: bool = False
    """Units have changed place, and no vote has confirmed it yet: after a loss they are where they were before,
    and everybody's parameters are gathered anew."""
    _leaving: Movement | None = None
    """A movement whose new placement no vote has confirmed yet: old copies are still here."""
    _followed: int = -1
    """Version that all mirrors are known to have (``state`` mode)."""
    _movements: int = 0
    """Begun in this generation."""
    _abandoned: list[Streams] = field(default_factory=list)
    """Kept until the next edit has made sure that nobody writes into their buffers."""
    _zeros: int = 0
    _keys: tuple[str, ...] = ()
    _keys_of: int = -1
    _body: StepBody | None = field(default=None, repr=False)

    # -- before the first step -----------------------------------------------------

    def adopt_parameters(self) -> None:
        """Masters of owned blocks are what the model's parameters say; moments are zero."""
        pool, arena = self.tools.pool, self.tools.arena
        for block in self.standing.owned:
            pool.put(block.key, arena.unit_parameters(block.unit)[block.start : block.stop], self.record.version)
        pool.start(self.record)

    def share_state(self) -> None:
        """Bring mirrors and every replica's parameters to what the owners hold: the run starts from one state."""
        body = self._steps()
        body.share(self.record.version)
        body.gather(self.record.version)
        self.parameters = self.record.version

    def resume(self, record: StepRecord, units: Mapping[int, torch.Tensor] | None) -> None:
        """Go on from a loaded state: ``units[u]`` fp32 ``[3, numel]``, or ``None`` to take masters from parameters."""
        self.record = record
        if units is None:
            self.adopt_parameters()
        else:
            for block in self.standing.owned:
                master, exp_avg, exp_avg_sq = units[block.unit][:, block.start : block.stop]
                self.tools.pool.put(block.key, master, record.version, exp_avg, exp_avg_sq)
            self.tools.pool.start(record)
        self.share_state()
        everything = [block.key for layout in self.recovery.layouts.values() for block in layout.blocks]
        self._certify("start" if units is None else "load", everything)

    def empty_state(self) -> dict[int, torch.Tensor]:
        """Zeros for the whole state of every held unit: fp32 ``[3, numel]`` (master, exp_avg, exp_avg_sq)."""
        rows = torch.zeros((3, self.tools.arena.parameters.numel()), dtype=torch.float32)
        return {unit: rows[:, piece.start : piece.stop] for unit, piece in self.tools.arena.slices.items()}

    # -- surface -----------------------------------------------------------------

    def step(self, forward_step: ForwardStep, source: SampleSource | None, address: StepAddress) -> StepResult:
        """Compute and commit the next step; ``address`` says which samples it consumes."""
        self.injector.reach("between_steps", self.record.version)
        if self._inside:
            self._inside = False
        else:
            self._at_boundary()
        self._enter()
        target, self._end_only = self.record.version + (not self._end_only), False
        work = StepInput(target, address, forward_step, source)
        self.timer.begin(target, "prepare")
        self.attempts, started = 0, time.monotonic()
        if not self._unsettled and self._streams is None and self._leaving is None:
            self.injector.restore()
        self.injector.reach("before_step", target)
        while not self._attempted(work):
            pass
        self._attempt, self.under_way = None, False
        self.injector.reach("after_step", target)
        self.listener.stepped(self, address, time.monotonic() - started, self.timer.finish())
        return self._result()

    def _attempted(self, work: StepInput) -> bool:
        """Compute and commit once, or finish what is committed. False: something was lost, try again."""
        try:
            try:
                if self.record.version < work.step:
                    self.attempts += 1
                    self._commit(work)
                self._finish()
                return True
            except CommError as error:
                self._recover(error)
        except NotFinite as error:
            # Every rank sees it in the same vote. A fault of the machine is gone when computed again.
            if self._doubted == (work.step, self.standing.generation):
                raise
            self._doubted = (work.step, self.standing.generation)
            self.listener.noticed(f"{error}: the step is computed again")
        return False

    def evaluate(
        self, forward_step: ForwardStep, source: SampleSource | None, addresses: Sequence[StepAddress]
    ) -> dict[str, tuple[float, float]]:
        """Sums of what the loss function reports over whole batches, forward only."""

        def body() -> dict[str, tuple[float, float]]:
            self.tools.port.train(False)
            try:
                tally = Tally()
                for number, address in enumerate(addresses):
                    self.injector.reach("in_evaluate", self.record.version)
                    step = StepInput(number, address, forward_step, source)
                    result = self._steps().compute(step, 1.0, training=False)
                    if self.standing.position == 0:
                        for key, (total, count) in result.report.items():
                            before = tally.report.get(key, (0.0, 0.0))
                            tally.report[key] = (before[0] + total, before[1] + count)
                layout = VoteLayout((), self._report_keys(tally.report))
                vector = layout.pack(tally)
                dist.all_reduce(vector, group=self.tools.fabric.world)
                return layout.unpack(vector).report
            finally:
                self.tools.port.train(True)

        return self.fenced(body)

    def fenced(self, body: Callable[[], T], together: bool = False, after_step: bool = False) -> T:
        """Run a collective action; repeat it in the next generation if one begins before all have finished.

        ``body`` must be repeatable. Returns its last result on this rank. Inside
        another fenced action it is part of that one. ``together``: an ``OSError`` in it
        on any rank is :class:`ActionFailed` on every rank. ``after_step``: the host does
        this right after each step, so that whoever begins with the end of a step gets here.
        """
        if self._fenced:
            return body()
        self._fenced, self._after_step = True, after_step
        try:
            return self._run_fenced(body, together)
        finally:
            self._fenced = self._after_step = False

    def _run_fenced(self, body: Callable[[], T], together: bool) -> T:
        self._enter()
        result = body_result = None
        while True:
            if self._hopeless is not None and self._hopeless[0] == self.phase:
                raise ActionFailed(self._hopeless[1])
            try:
                if not self.done:
                    body_result = body()
                    self.done = True
                result = body_result
                dist.barrier(group=self.tools.fabric.world)
                break
            except CommError as error:
                over = self._recover(error)
            except OSError as error:
                # The others wait inside the action: a generation ends that, and its reports tell them why.
                if not together:
                    raise
                self._failure = " ".join(str(error).split())
                self.recovery.membership.request("reform")
                over = self._recover(GenerationChanged(self.standing.generation + 1))
            if over:
                result = body_result
                break
            self.done = False
        self.under_way = False
        return result  # type: ignore[return-value]

    def parameter_norm(self) -> float:
        """L2 norm of all parameters, each counted once, from the masters of their owners."""

        def body() -> float:
            layouts, total = self.recovery.layouts, torch.zeros(1, dtype=torch.float64)
            for block in self.standing.owned:
                if layouts[block.unit, block.shard].counts_in_norm(block):
                    total += self.tools.pool.get(block.key).master.double().square().sum()
            dist.all_reduce(total, group=self.tools.fabric.world)
            return float(total.sqrt())

        return self.fenced(body)

    @property
    def state_bytes(self) -> int:
        """Bytes of state received in added copies so far, used or not."""
        return self._arrived + (0 if self._streams is None else self._streams.bytes_received)

    @property
    def draining(self) -> bool:
        """Everybody was asked to save and leave at this boundary."""
        return "drain" in self.record.agreed

    @property
    def in_step(self) -> bool:
        """Whether a step is under way (as against evaluation, saving, or the time between steps)."""
        return self._attempt is not None

    @property
    def present_step(self) -> int:
        """The step under way, or the newest committed one between steps."""
        return self.record.version if self._attempt is None else self._attempt.step.step

    @property
    def is_reporter(self) -> bool:
        """Whether this rank speaks for the job (the highest living one, as Megatron's last rank)."""
        return self.standing.living[-1] == self.tools.fabric.rank

    # -- between steps -----------------------------------------------------------

    def _at_boundary(self) -> None:
        """Let ranks come and go as agreed, then restore balance and redundancy, before the next step."""
        agreed = self.record.agreed if self._heeded < self.record.version else ()
        self._heeded = self.record.version
        if "join" in agreed:
            self._change("join")
        if self._switching:
            self._switch()
        leaving = self._part(leaving_of(agreed))
        if self._streams is None:
            recut = None if leaving else self._considered_recut()
            if recut is not None:
                self.listener.recut(self, recut)
            if recut is not None or self._unsettled or self._holds_state(leaving):
                target = None if recut is None else recut.target
                self.move(self.recovery.movement(self.standing, target, leaving))
                self._unsettled = False
        if self._paced:
            self._replan()
        elif self._clocked is not None:
            plan = replace(self.standing.plan, frequencies_khz=self._clocked)
            self.standing, self._body = replanned(self.standing, plan), None
        if self.clocks is not None:
            self.clocks.apply(self.standing.plan, self.standing.cell)
        self._clocked = None

    # -- proofs ----------------------------------------------------------------------

    def _certify(self, transition: Transition, moved: Iterable[BlockKey]) -> None:
        """Have everybody compare what all hold and will do. Collective; raises ``CertificateError``."""
        limit = ALL_BYTES if transition in ("start", "load") else LOOKED_AT_BYTES
        contents = looked_at(self.recovery.layouts, moved, self.record.version, limit)
        mine = statement(self.tools, self.standing, self.record, self.parameters, contents)
        verdict = examine(self.tools, self.standing, self.recovery.groups(self.standing), mine, transition)
        self.listener.examined(self, verdict)
        if verdict.findings:
            raise CertificateError(verdict.findings)

    def _examine_memory(self, body: StepBody) -> None:
        """Copies made alike differ: find out who is wrong, and go on without that copy; it is made anew."""
        changes, verdict = examine_memory(self.tools, self.standing, self.record, body.disputes)
        self.listener.examined(self, verdict)
        if not changes:
            raise SilentCorruption(f"step {self.record.version}: " + "; ".join(verdict.findings))
        for change in changes:
            if change.kind == "drop" and change.rank == self.tools.fabric.rank:
                self.tools.pool.condemn(change.block)
        self._forget_movement()
        self._stand_on(replace(self.standing.basis, placement=self.standing.placement.apply(changes)), {})
        self._unsettled = True

    def _considered_recut(self) -> Recut | None:
        """Units that should change place; asked once a generation, when it is time, by all ranks at one boundary."""
        recovery, standing = self.recovery, self.standing
        if self._considered or recovery.config.migrate_after < 0 or recovery.config.policy != "elaswave":
            return None
        steps = self.record.version - self._settled_at
        complete = everybody_is_here(standing.assignment, standing.living)
        due = complete or not recovery.config.respawn or steps >= recovery.config.migrate_after
        if not due or steps == 0:  # before a vote of this generation not everybody knows the same measurements
            return None
        self._considered = True
        costs = self._measured or recovery.profile
        speeds = dict(standing.speeds())
        try:
            return better_assignment(standing.assignment, standing.living, costs, recovery.memory_bytes, speeds)
        except PlanError:  # nothing better is known to fit; the plan that runs goes on
            return None

    def _change(self, what: str) -> None:
        """The generation that all members ask for at this boundary ('join', 'leave').

        No phase of its own: whoever is kept from asking by a loss is not a phase behind afterwards.
        """
        self.recovery.membership.request(what)
        self._recover(GenerationChanged(self.standing.generation + 1))

    def _part(self, asked: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks leave on request, once nothing is left of them; returns those whose state has to move first.

        Raises ``Released`` on those that leave.
        """
        leaving = tuple(rank for rank in asked if rank in self.standing.living)
        obstacle = self.recovery.indispensable(self.standing, leaving) if leaving else ""
        if obstacle:
            if self._refused != leaving:
                self.listener.noticed(f"ranks {', '.join(map(str, leaving))} cannot leave: {obstacle}")
            self._refused = leaving
            self.recovery.membership.request("stay")
            return ()
        if leaving and self._streams is None and self._leaving is None and not self._holds_state(leaving):
            self._change("leave")
        return leaving

    def _holds_state(self, ranks: tuple[int, ...]) -> bool:
        copies = self.standing.placement.copies.values()
        return bool(ranks) and any(rank in copy.ranks for copy in copies for rank in ranks)

    def _replan(self) -> None:
        """Plan again with the speeds of the record. Every rank does, alone: the next vote compares the plans."""
        self._paced, before = False, self.standing
        with self.timer.phase("plan"):
            self.standing, self._body = self.recovery.replan(before, self.record), None
        self.listener.paced(self, before)

    # -- copies that change place ---------------------------------------------------

    def move(self, movement: Movement) -> None:
        """Begin ``movement`` in the background; at one boundary, on every rank alike, with none under way."""
        if self._streams is not None:
            raise RuntimeError("a movement is under way")
        if not movement.changes and movement.target.assignment == self.standing.assignment:
            return
        tools = self.tools
        self._movements += 1
        self._streams = Streams(movement, tools.pool, tools.fabric, self._movements, _WINDOW_BYTES)
        self.injector.reach("in_movement_begin", self.record.version)

    def _switch(self) -> None:
        """At a boundary that all ranks agreed on: the new placement is in force from here, unless somebody is lost."""
        self._switching = False  # no phase of its own: whoever was kept from it by a loss does not come back to it
        streams, version, began = self._streams, self.record.version, time.monotonic()
        assert streams is not None, "ranks are counted ready only while something moves"
        movement = streams.movement
        with self.timer.phase("movement"):
            try:
                self._switch_over()
                if self._reassigned:
                    self._steps().gather(version)
                self._certify("movement", {change.block for change in movement.changes if change.kind != "drop"})
                self.injector.reach("in_movement_switch", version)
            except CommError as error:
                self._recover(error)
                return
        stall = time.monotonic() - began
        self.listener.moved(self, Moved(movement, streams.bytes_received, began - streams.began, stall))

    def _switch_over(self) -> None:
        """What moves is brought to the present version, and its target is what the next step is taken under."""
        streams, version = self._streams, self.record.version
        assert streams is not None
        self.tools.publish("movement", streams.peers)
        self.injector.reach("in_movement_finish", version)
        streams.finish(version)
        commit(self.tools.pool, streams.movement.changes, streams.received, version)
        streams.abandon()
        self._arrived += streams.bytes_received
        self._streams, self._leaving = None, streams.movement
        self._reassigned = streams.movement.target.assignment != self.standing.assignment
        self._stand_on(streams.movement.target, streams.movement.followers())

    def _stand_on(self, basis: Basis, followers: Mapping[BlockKey, tuple[int, ...]]) -> None:
        self.history.enter(basis)
        self.standing, self._body = self.recovery.restand(self.standing, basis, followers), None

    def _confirm(self) -> None:
        """A vote was taken under the present placement: copies it does not name go."""
        self.history.confirm(self.standing.basis)
        self.tools.pool.absolve()
        movement, self._leaving, self._reassigned = self._leaving, None, False
        if movement is not None:
            retire(self.tools.pool, movement.changes)
            self._stand_on(movement.target, {})

    def flip_bit(self, copy: str, tensor: str) -> None:
        """Damage the first block this rank owns (``copy`` "owner") or mirrors (fault injection)."""
        blocks = self.standing.owned if copy == "owner" else self.standing.mirrored
        self.tools.pool.flip_bit(blocks[0].key, tensor)

    def _forget_movement(self) -> None:
        """The generation ends: what is under way is begun anew in the next one, or not at all."""
        if self._streams is not None:
            self._streams.abandon()
            self._arrived += self._streams.bytes_received
            self._abandoned.append(self._streams)
        self._streams, self._leaving, self._switching = None, None, False

    def close(self) -> None:
        """This rank leaves: stop what runs in the background, put its clock back. Idempotent."""
        if self.clocks is not None:
            self.clocks.restore()
        self._forget_movement()

    # -- a step ------------------------------------------------------------------

    def _enter(self) -> None:
        self.phase += 1
        self.under_way, self.done = True, False
        self._failure = ""

    def _steps(self) -> StepBody:
        if self._body is None:
            self._body = StepBody(self.tools, self.standing, self.recovery.config.verify_interval)
        return self._body

    def _commit(self, work: StepInput) -> None:
        """Compute, reduce, ship, vote. On return ``self.record`` is that of ``work.step``."""
        body, step = self._steps(), work.step
        self._attempt = _Attempt(work, skipped=self.standing.plan.skipped)
        self.computed = self.standing.plan.rows
        self.injector.reach("after_prepare", step)
        with self.timer.phase("compute"):
            result = body.train(work, self.record.loss_scale)
        self.injector.reach("before_reduce", step)
        with self.timer.phase("reduce"):
            body.reduce(step)
        self.injector.reach("after_reduce", step)
        with self.timer.phase("ship"):
            body.ship(step)
        self.injector.reach("after_ship", step)
        self._attempt.key = body.key(step)
        self._attempt.tally = body.tally(work, result)
        self._attempt.requests = self.recovery.membership.pending()
        wishes(self._attempt.tally, self._attempt.requests)
        self._attempt.tally.saves, self._attempt.tally.written = self.save_due(), self.share_written()
        if self.clocks is not None and self.standing.cell is not None:
            self._attempt.tally.clocks = {self.standing.cell.id: self.clocks.state()}
        self._attempt.tally.ready = self._streams is not None and self._streams.ready
        self._vote(body, self._attempt)

    def _vote(self, body: StepBody, attempt: _Attempt) -> None:
        """The commit point: with the vote's sum every rank computes the same record."""
        assert attempt.tally is not None and attempt.key is not None
        step, address = attempt.step.step, attempt.step.address
        with self.timer.phase("vote"):
            layout = VoteLayout(
                self.blocks, self._report_keys(attempt.tally.report), ranges_of(self.standing.plan),
                self._clocked_cells(),
            )
            self.injector.reach("before_vote", step)
            total = body.vote(layout, attempt.tally)
        if total.disputes:
            verdict = name_disputes(self.tools, self.standing, self.record, body.disputes)
            self.listener.examined(self, verdict)
            raise CertificateError(verdict.findings)
        check_ledger(total, address, step, attempt.skipped)
        settings = self.tools.settings
        if total.overflows and settings.check_finite:
            raise NotFinite(f"step {step}: a gradient is not finite (--no-check-for-nan-in-loss-and-grad lets it pass)")
        self._measure(total)
        vote = Vote(
            gradient=attempt.key,
            norm_sq=total.norms,
            found_nonfinite=total.overflows > 0,
            denominator=total.tokens if settings.per_token_loss else self.standing.plan.grid.data_parallel_size,
            tokens=total.tokens,
            samples=address.size,
            losses=total.report,
            ledger_hash=f"{total.ledger:x}",
            plan_hash=self.standing.plan_hash,
            placement=self.standing.basis.digest,
            agreed=agreed_by(total, attempt.requests),
            speeds=self.pace.speeds(),
        )
        self.record = advance(self.record, vote, settings.hyper)
        self._zeros = total.zeros
        self.tools.pool.remember(self.record)
        self._switching = total.ready == total.voters
        self._confirm()
        if total.suspects:
            self._examine_memory(body)
        self.injector.reach("after_vote", step)

    def _clocked_cells(self) -> tuple[int, ...]:
        return () if self.clocks is None else tuple(cell.id for cell in self.standing.plan.cells)

    def _measure(self, total: Tally) -> None:
        """What the vote says about devices; what follows from it begins at the next boundary, on every rank alike."""
        plan, times = self.standing.plan, total.times
        if self.clocks is not None:
            chosen = self.clocks.observe(plan, times, total.clocks, self.recovery.profile)
            self._clocked = None if chosen is None else chosen.frequencies_khz
            times = self.clocks.at_nominal(times)
        if total.steady == total.voters:
            self._measured = measured_profile(plan, times, self.recovery.profile)
            self._paced = self.pace.observe(plan, times) or self._paced

    def _update(self) -> None:
        """Every copy held here to the record's version. Safe to repeat."""
        pool, step = self.tools.pool, self.record.version
        with self.timer.phase("update"):
            owned = [block.key for block in self.standing.owned]
            keys = owned if pool.snapshot == "state" else tuple(pool)
            pool.apply(self.record, keys[: len(keys) // 2])
            self.injector.reach("mid_update", step)
            pool.apply(self.record, keys)
        self.injector.reach("after_update", step)
        if pool.snapshot == "state" and self._followed < step:
            with self.timer.phase("ship"):
                self._steps().follow(self.record)
            self._followed = step

    def _finish(self) -> None:
        """From a committed record to parameters: update, then gather. Safe to repeat."""
        self._update()
        step = self.record.version
        if self.parameters < step:
            if not self.record.skipped or self._catching_up:
                with self.timer.phase("gather"):
                    self._steps().gather(step)
            self.parameters = step
        self.injector.reach("after_gather", step)

    def _report_keys(self, mine: dict[str, tuple[float, float]]) -> tuple[str, ...]:
        """Names the loss functions report, agreed once a generation (and anew when one is unknown)."""
        if self._keys_of != self.standing.generation:
            gathered: list[object] = [None] * self.tools.fabric.slots
            dist.all_gather_object(gathered, tuple(mine), group=self.tools.fabric.world)
            found = {key for keys in gathered if isinstance(keys, tuple) for key in keys}
            self._keys = tuple(sorted(found | set(self._keys)))
            self._keys_of = self.standing.generation
        return self._keys

    def _result(self) -> StepResult:
        record = self.record
        losses = {key: total / count if count else 0.0 for key, (total, count) in record.losses.items()}
        zeros = self._zeros if self.tools.settings.count_zeros else None
        return StepResult(losses, record.skipped, record.grad_norm, zeros, record.loss_scale)

    # -- recovery ----------------------------------------------------------------

    def _report(self) -> Report:
        attempt, statistics = self._attempt, dict[GradientKey, list[tuple[int, int]]]()
        if attempt is not None and attempt.tally is not None and attempt.key is not None:
            known = (*attempt.tally.rows, *attempt.skipped)  # of a row left out there is nothing to know
            statistics[attempt.key] = [(row, row + 1) for row in known]
        parameters = -1 if self._reassigned else self.parameters
        waits = self.in_step or self._after_step or not self.under_way
        return Report(
            self.tools.pool.holdings(statistics), self.phase, self.done, parameters, self._failure, waits
        )

    def _recover(self, error: CommError) -> bool:
        """Agree on a generation and settle in it. Returns whether the present phase is over."""
        started = time.monotonic()
        while True:
            try:
                self.timer.enter("recover")
                self._forget_movement()
                standing, outcome = self.recovery.agree(
                    error,
                    self._report(),
                    self.history,
                    self.present_step if self.in_step else self.record.version + 1,
                )
                self._abandoned.clear()
                self._movements = 0
                self._hopeless = outcome.failure or self._hopeless
                self.standing, self._body, self._unsettled = standing, None, True
                self.injector.reach("in_recovery_promote", self.record.version)
                self._settle(outcome)
                self.injector.reach("in_recovery_resume", self.record.version)
                self.injector.settle()
                self.listener.settled(outcome, self.standing, time.monotonic() - started)
                self.recovery.untold = ()
                return outcome.phase_over
            except StageGone as gone:
                error = self._wait_for_ranks(gone)
            except CommError as again:
                error = again

    def _wait_for_ranks(self, gone: StageGone) -> CommError:
        """Nobody is left to compute a stage: until a newer generation is being agreed, which may bring its ranks."""
        # The same conclusion everywhere: nobody leaves while others wait.
        if not all(Report.from_text(text).waits for text in gone.decision.reports.values() if text != NEWCOMER):
            raise gone.final("lost in evaluation or saving, which cannot wait for them")
        try:
            if newcomers(gone.decision):  # some have come, not all
                send_welcome(self.tools.fabric, gone.decision, self._welcome())
            self.recovery.wait_for_ranks(gone, self.present_step)
        except CommError as error:
            return error
        return GenerationChanged(gone.decision.generation + 1)

    def _house(self) -> None:
        """Blocks that only ranks elsewhere kept come to those who compute their units, now: nobody can go on before."""
        if self.recovery.homeless(self.standing):
            self.move(self.recovery.movement(self.standing))
            self._switch_over()

    def _welcome(self) -> Welcome:
        logging = self.under_way and self._after_step  # a newcomer begins with the end of the step before
        return Welcome(
            catalog={key: tuple(slot.spec for slot in layout.slots) for key, layout in self.recovery.layouts.items()},
            memory_bytes=self.recovery.memory_bytes,
            basis=self.standing.basis,
            confirmed=self.history.of(self.record),
            record=self.record,
            phase=self.phase - self.under_way - logging,
            in_step=self.in_step or logging,
            step_committed=logging or (self.in_step and self.record.version == self.present_step),
            report_keys=self._keys,
            host=self.host_state(),
        )

    def joined(self, welcome: Welcome) -> None:
        """A newcomer's first act as a member: take the members' position, then the parameters."""
        self.record, self.phase, self._keys = welcome.record, welcome.phase, welcome.report_keys
        self.history, self._inside = welcome.history(), welcome.in_step
        self._heeded = self.record.version
        self.pace.resume(self.standing.speeds(), self.record.version)
        self._end_only = welcome.step_committed
        self.tools.pool.start(self.record)
        self.injector.reach("in_join", self.record.version)
        if self.tools.pool.snapshot == "state":
            dist.barrier(group=self.tools.fabric.world)  # the one that ends StepBody.follow
            self._followed = self.record.version
        self._unsettled = True
        self._house()
        self._steps().gather(self.record.version)
        self.parameters = self.record.version
        self._settled_at, self._considered = self.record.version, False
        self._certify("join", self.blocks)
        self.injector.settle()

    def _settle(self, outcome: Outcome) -> None:
        """Bring every survivor to the same version, with parameters to match."""
        resolution = outcome.resolution
        record = resolution.record
        assert record is not None, "only a lost state has no record"
        pool = self.tools.pool
        prune(pool, self.standing.placement)
        if pool.snapshot == "state":
            # Possibly one step back; what the record of the lost step named stays in force.
            record = replace(record, placement=outcome.basis)
            pool.revert(record)
            self._followed = -1
        pool.remember(record)
        # What was agreed before is void: some may not have got to ask for it, and the next vote agrees anew.
        self.record, self._heeded, self._paced, self._clocked = record, record.version, False, None
        if self.clocks is not None:
            self.clocks.forget()
        self.history.enter(self.standing.basis)
        if outcome.newcomers:
            send_welcome(self.tools.fabric, outcome.decision, self._welcome())
        self.pace.resume(self.standing.speeds(), record.version)
        self.tools.pool.discard(resolution.gradient_key, record.version)
        # Everybody gathers when anybody has to: a gather cut short left some parameters behind.
        self.parameters = min(outcome.oldest_parameters, record.version)
        self._catching_up = True
        try:
            self._update()
            self._house()
            self._finish()
            if resolution.kind == "revote":
                attempt, body = self._attempt, self._steps()
                assert attempt is not None and attempt.tally is not None and resolution.gradient_key is not None
                attempt.key = resolution.gradient_key
                attempt.tally.times, attempt.tally.clocks = {}, {}  # measured under another plan
                body.weigh(attempt.tally, attempt.key)
                self._vote(body, attempt)
                self._finish()
        finally:
            self._catching_up = False
        self._settled_at, self._considered, self._reassigned = self.record.version, False, False
        self._measured = None
        if outcome.newcomers:
            self._certify("join", self.blocks)
        else:
            self._certify("recovery", outcome.promoted)
