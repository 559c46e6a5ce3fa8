"""What a recovery looks like from outside: readable lines, and events.

Every rank writes its own events; the lowest living rank prints the summary, in
the field's words.
"""

from __future__ import annotations

from megatron.elastic.control.membership import Loss
from megatron.elastic.engine.nominal import Nominal
from megatron.elastic.engine.recovery import Outcome
from megatron.elastic.engine.standing import Standing
from megatron.elastic.observe.events import EventLog, Generation, RankLost, Recovery
from megatron.elastic.observe.summary import loss_lines, recovery_line

__all__ = ["narrate"]


def narrate(
    events: EventLog, nominal: Nominal, outcome: Outcome, standing: Standing, step: int, seconds: float, speaks: bool
) -> None:
    """Record one finished recovery that took ``seconds``; ``step`` is the newest committed one."""
    decision = outcome.decision
    events.generation = decision.generation
    losses = [_rank_lost(loss, nominal, step) for loss in decision.lost]
    parked = standing.plan.parked
    events.write(
        Generation(
            number=decision.generation,
            reason=decision.reason,
            members=standing.living,
            lost=tuple(loss.rank for loss in decision.lost),
            joined=decision.joined,
            parked=parked,
        )
    )
    for loss in losses:
        events.write(loss)
    spent = {**outcome.seconds, "settle": max(0.0, seconds - sum(outcome.seconds.values()))}
    recovery = Recovery(step=step, outcome=outcome.resolution.kind, seconds=spent, lost_steps=0)
    events.write(recovery)
    if speaks:
        for line in (*loss_lines(losses, parked), recovery_line(recovery, decision.generation)):
            print(line, flush=True)


def _rank_lost(loss: Loss, nominal: Nominal, step: int) -> RankLost:
    _, replica, stage = nominal.place(loss.rank)
    return RankLost(
        lost_rank=loss.rank,
        lost_incarnation=loss.incarnation,
        host=loss.host,
        cause=loss.cause,
        step=step,
        last_lines=loss.last_lines,
        tensor_parallel_group=nominal.cell_of(loss.rank).ranks,
        stage=stage,
        replica=replica,
    )
