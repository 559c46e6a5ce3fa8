"""Log lines and events of recoveries, steps, migrations and certificates.

Every rank writes its own events; the lowest living rank prints the lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from megatron.elastic.control.membership import Loss
from megatron.elastic.engine.generation.repartition import Recut
from megatron.elastic.engine.generation.report import Report
from megatron.elastic.engine.generation.shape import GridShape
from megatron.elastic.engine.generation.view import View
from megatron.elastic.engine.transaction.agreement import RecoveryOutcome, StateLost
from megatron.elastic.engine.transaction.certificates import CertificateOutcome
from megatron.elastic.engine.transaction.listener import Stepped, Voted
from megatron.elastic.engine.transaction.protection import Protected
from megatron.elastic.engine.transaction.streams import Moved
from megatron.elastic.observe.event_kinds import (
    CertificateEvent,
    ClockEvent,
    ExpertsEvent,
    GenerationEvent,
    LostStateEvent,
    MigrationEvent,
    PhasesEvent,
    PlanEvent,
    ProtectionEvent,
    RankLostEvent,
    RecordEvent,
    RecoveryEvent,
    ReportEvent,
    SlowRankEvent,
    StepEvent,
    TraceEvent,
)
from megatron.elastic.observe.events import EventLog
from megatron.elastic.observe.summary import protection_line, ranks_text, recovery_line
from megatron.elastic.observe.timeline import Timeline
from megatron.elastic.plan import model
from megatron.elastic.platform.frequency import Applied
from megatron.elastic.state.expert_load import SPAN, ExpertLoad
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.protocol import Resolution
from megatron.elastic.state.record import StepRecord

__all__ = [
    "write_certificate",
    "write_clock",
    "write_experts",
    "write_lost_state",
    "write_migration",
    "write_protection",
    "write_record",
    "write_recovery",
    "write_recut",
    "write_rehoming",
    "write_report",
    "write_speeds",
    "write_step",
]

_OUTCOMES = {"roll_forward": "rolled forward", "revote": "voted again", "rerun": "re-run"}


def write_record(
    events: EventLog,
    record: StepRecord,
    view: View,
    source: str,
    voted: Voted | None = None,
    resolution: Resolution | None = None,
) -> None:
    """Record that ``record`` is this rank's newest in the generation of ``view``, to which later lines belong."""
    if not events.enabled:
        return
    events.generation = view.generation
    address, key = None if voted is None else voted.address, record.gradient
    again = None if resolution is None or resolution.kind != "revote" else resolution.gradient_key
    events.write(
        RecordEvent(
            step=record.version,
            source=source,
            digest=record.digest,
            before="" if voted is None else voted.before.digest,
            samples=None if address is None else (address.first, address.first + address.size),
            gradient=None if key is None else (key.step, key.generation, key.attempt),
            ledger=record.ledger_hash,
            grad_norm=record.grad_norm,
            skipped=record.skipped,
            members=() if voted is not None else view.living,
            placement=(view.configuration if voted is None else voted.named).digest,
            homes=() if voted is None or not events.is_new(voted.named.digest) else voted.named.placement.homes,
            oldest=None if voted is None else voted.oldest,
            retained=0 if voted is None else voted.retained,
            coming=None if voted is None else voted.coming,
            short=0 if voted is None else voted.short,
            resolution="" if resolution is None else resolution.kind,
            again=None if again is None else (again.step, again.generation, again.attempt),
        )
    )


def write_report(events: EventLog, report: Report) -> None:
    """Record what this rank is about to report."""
    if not events.enabled:
        return
    held = report.holdings
    rows = [(*key, *span) for key, spans in held.statistics for span in _joined(spans)]
    events.write(
        ReportEvent(
            step=max((record.version for record in held.records), default=-1),
            oldest=held.oldest,
            newest=held.newest,
            gradients=tuple((key.step, key.generation, key.attempt) for key in held.gradients),
            rows=tuple(rows),
            voting=report.voting,
            torn=len(held.torn),
            admitted=report.admitted > 0,
        )
    )


def _joined(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the same rows as ascending ``spans``, those that adjoin as one."""
    begun: tuple[int, int] | None = None
    for start, stop in spans:
        if begun is not None and start <= begun[1]:
            begun = (begun[0], max(begun[1], stop))
            continue
        if begun is not None:
            yield begun
        begun = (start, stop)
    if begun is not None:
        yield begun


def write_lost_state(events: EventLog, lost: StateLost, pool: StatePool) -> None:
    """Record that state is lost, and the copies of lost blocks in ``pool``, which should be none that could go on."""
    copies = [pool.get(key) for key in lost.blocks if key in pool]
    held = [
        (
            *copy.block.key,
            copy.version,
            tuple((key.step, key.generation, key.attempt) for key in sorted(copy.gradients)),
        )
        for copy in copies
        if copy.counted and copy.version >= 0
    ]
    events.write(LostStateEvent(lost.version, len(lost.blocks), tuple(held)))


def write_recovery(
    events: EventLog,
    outcome: RecoveryOutcome,
    view: View,
    step: int,
    in_step: bool,
    seconds: float,
    speaks: bool,
) -> RecoveryEvent:
    """Record one finished recovery that took ``seconds`` in ``step`` (the newest committed one between steps).

    ``in_step``: a step was under way, so it was finished or computed again.
    """
    decision = outcome.decision
    events.generation = decision.generation
    losses = [_rank_lost(loss, view.assignment.base, step) for loss in outcome.lost]
    parked = view.plan.parked
    events.write(
        GenerationEvent(
            number=decision.generation,
            reason=decision.reason,
            members=view.living,
            lost=tuple(loss.rank for loss in outcome.lost),
            joined=outcome.newcomers,
            parked=parked,
            left_out=decision.left_out,
        )
    )
    for loss in losses:
        events.write(loss)
    spent = {**outcome.seconds, "settle": max(0.0, seconds - sum(outcome.seconds.values()))}
    what = _outcome(outcome, in_step)
    agreement = RecoveryEvent(
        step=step,
        outcome=what,
        seconds=spent,
        lost_steps=outcome.lost_steps,
        links_opened=outcome.edit.links_opened,
        links_ahead=outcome.edit.links_ahead,
    )
    events.write(agreement)
    if _is_first_witness(view) and any(loss.rank < events.rank for loss in outcome.lost):
        events.write_held()  # the rank that logged before may be lost and may not have logged its last step
    if speaks:
        events.write(_plan(step, view))
        smaller = [rank for _, ranks in view.assignment.formed for rank in ranks]
        recovered = recovery_line(agreement, decision.generation, losses, parked, smaller)
        for line in (recovered, *batch_lines(view.plan)):
            print(line, flush=True)
    return agreement


def _is_first_witness(view: View) -> bool:
    """Return whether this rank is the lowest one that took part in the newest vote.

    Lower ones may have been started since: they know nothing of the step before.
    """
    return next((rank for rank in view.living if rank not in view.unproven), None) == view.rank


def batch_lines(plan: model.Plan) -> tuple[str, ...]:
    """Return one line if the policy lets the batch shrink."""
    if not plan.skipped:
        return ()
    whole = plan.grid.global_batch_size
    return (f"policy {plan.labels[0]}: the batch shrinks to {plan.rows} of {whole} samples; the others are left out",)


def rows_of(plan: model.Plan) -> dict[int, int]:
    """Return cell → number of rows of the global batch that it computes, ascending."""
    rows: dict[int, set[int]] = {}
    for piece in plan.pieces:
        rows.setdefault(piece.cell, set()).update(piece.rows)
    return {cell: len(rows[cell]) for cell in sorted(rows)}


def _plan(step: int, view: View) -> PlanEvent:
    plan = view.plan
    return PlanEvent(
        step=step,
        plan_hash=view.plan.digest,
        stages=tuple((n, s.cell, s.first, s.end) for n, replica in enumerate(plan.replicas) for s in replica.segments),
        rows={str(cell): rows for cell, rows in rows_of(plan).items()},
        labels=plan.labels,
    )


def write_step(events: EventLog, timeline: Timeline, record: StepRecord, view: View, stepped: Stepped) -> None:
    """Record one committed step: its times on every rank, the rest on the lowest living rank."""
    if not events.enabled:
        return
    events.write(PhasesEvent(record.version, dict(stepped.phases), stepped.state_bytes, stepped.applied))
    if timeline.enabled:
        spans, work = timeline.take()
        events.write(TraceEvent(step=record.version, phases=spans, work=work))
    step = StepEvent(
        step=record.version,
        samples=(stepped.address.first, stepped.address.first + stepped.address.size),
        seconds=stepped.seconds,
        losses={key: total / count for key, (total, count) in record.losses.items() if count},
        grad_norm=record.grad_norm,
        learning_rate=record.rates[0].lr,
        loss_scale=record.loss_scale,
        skipped=record.skipped,
        attempts=max(1, stepped.attempts),
        ledger=record.ledger_hash,
        computed=stepped.computed,
    )
    if view.lowest:
        events.write(step)
    else:
        events.hold(step)


def write_recut(record: StepRecord, view: View, recut: Recut) -> None:
    """Print that layers begin to move, and why."""
    if not view.lowest:
        return
    if recut.target.is_nominal:
        shape = recut.target.shape
        of = "the launch" if shape is None else str(shape.sizes)
        why = f"all ranks are back, so layers return to the ranks of {of}"
    elif recut.now_ns:
        why = f"a step is expected to take {recut.then_ns / recut.now_ns:.0%} of its present time"
    else:
        why = "no rank is left that could compute some of them"
    what = f"{recut.moved_units} layers (embedding and head count) move to other ranks"
    print(f"step {record.version}: {what}; {why}", flush=True)


def write_rehoming(record: StepRecord, view: View, before: float, after: float, replicas: int) -> None:
    """Print that experts begin to move, and why: the load of the busiest rank relative to a mean one.

    ``replicas``: most homes of an expert then.
    """
    if view.lowest:
        most = f"; an expert has up to {replicas} replicas then" if replicas > 1 else ""
        print(
            f"step {record.version}: experts move to other ranks; the busiest one has {before:.2f} times the mean of "
            f"tokens, and will have {after:.2f} times{most}",
            flush=True,
        )


def write_experts(events: EventLog, record: StepRecord, view: View, load: ExpertLoad | None) -> None:
    """Record the load of experts once in :data:`SPAN` steps, where it is measured."""
    if load is None or not events.enabled or not view.lowest or record.version % SPAN:
        return
    tokens = load.tokens(record.expert_load)
    imbalance, found = (
        view.assignment.imbalance(tokens),
        {unit: view.assignment.expert_replicas(unit) for unit in tokens},
    )
    replicas = {str(unit): counts for unit, counts in found.items() if max(counts, default=1) > 1}
    events.write(ExpertsEvent(record.version, {str(unit): of for unit, of in tokens.items()}, imbalance, replicas))


def write_migration(events: EventLog, record: StepRecord, view: View, moved: Moved) -> None:
    """Record a finished migration, and the plan after it."""
    if view.lowest:
        events.write(_plan(record.version, view))
    kinds = Counter(change.kind for change in moved.migration.changes)
    events.write(
        MigrationEvent(
            step=record.version,
            added=kinds["add"],
            promoted=kinds["promote"],
            dropped=kinds["drop"],
            bytes_received=moved.bytes_received,
            background_seconds=moved.background,
            stall_seconds=moved.stall,
            seconds=dict(moved.seconds),
            urgent=moved.migration.urgent,
        )
    )


def write_protection(events: EventLog, record: StepRecord, protected: Protected) -> None:
    """Record that every block has all its mirrors again; one rank prints it."""
    event = ProtectionEvent(record.version, protected.seconds, protected.steps, protected.blocks)
    events.write(event)
    if protected.speaks:
        print(protection_line(event), flush=True)


def write_certificate(events: EventLog, view: View, verdict: CertificateOutcome) -> None:
    """Record the result of a certificate; the lowest living rank prints its findings."""
    passed = verdict.certificate
    events.write(
        CertificateEvent(
            step=verdict.step,
            transition=verdict.transition,
            passed=not verdict.findings,
            blocks=0 if passed is None else passed.blocks,
            mirrors=0 if passed is None else passed.copies - passed.blocks,
            seconds=verdict.seconds,
            contents=0 if passed is None else passed.contents_compared,
            digest="" if passed is None else passed.digest,
            failures=verdict.findings,
        )
    )
    if view.lowest:
        for finding in verdict.findings:
            print(f"step {verdict.step}, certificate ({verdict.transition}): {finding}", flush=True)


def write_speeds(events: EventLog, record: StepRecord, before: View, view: View) -> None:
    """Record that measured speeds changed the plan; the lowest living rank prints the slow ranks and their samples."""
    if not view.lowest:
        return
    step = record.version
    was = {cell.id: cell.speed_ppm for cell in before.plan.cells}
    now = dict(record.speeds)
    rows_before, rows_now = rows_of(before.plan), rows_of(view.plan)
    for cell in view.plan.cells:
        speed = now.get(cell.id, 1_000_000)
        if speed == was[cell.id]:
            continue
        for rank in cell.ranks:
            events.write(SlowRankEvent(step=step, slow_rank=rank, speed_ppm=speed))
        name = f"rank {cell.ranks[0]}" if len(cell.ranks) == 1 else f"tensor-parallel group {ranks_text(cell.ranks)}"
        print(
            f"step {step}: {name} runs at {speed / 10_000:.0f}% of its peers' speed; "
            f"samples a step: {rows_now.get(cell.id, 0)} (before: {rows_before.get(cell.id, 0)})",
            flush=True,
        )
    if view.plan.digest != before.plan.digest:
        events.write(_plan(step + 1, view))


def write_clock(events: EventLog, step: int, applied: Applied, power_mw: int | None) -> None:
    """Record a clock that was set."""
    events.write(ClockEvent(step, applied.asked_khz, applied.set_khz, applied.observed_khz, applied.verified, power_mw))


def _outcome(outcome: RecoveryOutcome, in_step: bool) -> str:
    if outcome.newcomers:  # some may be from an earlier decision, after which steps did not go on
        joined = "joined by " + ", ".join(map(str, outcome.newcomers))
        if not outcome.lost or not in_step:
            return joined
        return f"{joined}, {'finished' if outcome.step_committed else _OUTCOMES[outcome.resolution.kind]}"
    if outcome.decision.reason == "drain":
        return "some ranks left as asked"
    if not in_step:
        return "between steps"
    return "finished" if outcome.step_committed else _OUTCOMES[outcome.resolution.kind]


def _rank_lost(loss: Loss, shape: GridShape, step: int) -> RankLostEvent:
    ranks, replica, stage = shape.place(loss.rank)
    return RankLostEvent(
        lost_rank=loss.rank,
        lost_incarnation=loss.incarnation,
        host=loss.host,
        cause=loss.cause,
        step=step,
        last_lines=loss.last_lines,
        tensor_parallel_group=ranks,
        stage=stage,
        replica=replica,
    )
