"""The events that a rank publishes for users through its agent (``ctl status``, the summary, metrics).

A committed step is a few stores into memory that the agent reads. All else is rare and comes from one rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from megatron.elastic.control.membership import Committed, Membership
from megatron.elastic.control.observations import (
    BusiestExpert,
    DrawnCell,
    DrawnSegment,
    DrawnTopology,
    ExpertLoads,
    Recovered,
    Reprotected,
    Stepping,
)
from megatron.elastic.engine.generation.view import View
from megatron.elastic.engine.transaction.agreement import RecoveryOutcome
from megatron.elastic.engine.transaction.listener import Stepped
from megatron.elastic.engine.transaction.protection import Protected
from megatron.elastic.observe.event_kinds import RecoveryEvent
from megatron.elastic.observe.phases import PhaseTimer
from megatron.elastic.plan.model import Plan
from megatron.elastic.runtime.telemetry import rows_of
from megatron.elastic.state.expert_load import SPAN, ExpertLoad
from megatron.elastic.state.placement import Placement
from megatron.elastic.state.record import StepRecord

__all__ = ["Publisher", "RepeatedWork", "loads_of", "publish_recovery", "topology_of"]


class Publisher:
    """Publishes what one rank commits. ``target``: the last step of the run, if it is known.

    ``node``: the ranks of this rank's node, of which the lowest living one tells the agent what concerns them all.
    ``draws``: a page is to draw the topology. ``load``: the layers whose experts are measured, if there are any.
    """

    def __init__(
        self,
        membership: Membership,
        target: int | None,
        node: Collection[int],
        draws: bool = False,
        load: ExpertLoad | None = None,
    ) -> None:
        self._membership, self._target, self._node = membership, target or 0, frozenset(node)
        self._draws, self._load = draws, load
        self._drawn: tuple[Plan, Placement] | None = None
        self._first = True
        self._moving = False

    def stepped(self, record: StepRecord, view: View, step: Stepped) -> None:
        """Publish a committed step."""
        loss = next((total / count for total, count in record.losses.values() if count), math.nan)
        samples = step.address.first + step.address.size
        self._membership.committed(Committed(record.version, self._target, samples, step.seconds, loss))
        if self._first and view.lowest:
            self._membership.observe(Stepping(record.version))
        if self._load is not None and (self._first or record.version % SPAN == 0) and self._tells(view):
            self._membership.expert_loads(loads_of(record, view, self._load))
        self._first = False
        self.draw(record, view)

    def draw(self, record: StepRecord, view: View) -> None:
        """Publish the topology, if it is to be drawn, has changed, and this rank is to tell it."""
        if not self._draws:
            return
        present = view.plan, view.placement
        if self._drawn is not None and all(one is other for one, other in zip(self._drawn, present, strict=True)):
            return
        self._drawn = present
        if self._tells(view):
            self._membership.draw(topology_of(record.version, view))

    def moves(self, moved_units: int) -> None:
        """Publish that layers begin to move."""
        self._moving = True
        self._membership.moving(f"{moved_units} layers (embedding and head count) move to other ranks")

    def rests(self) -> None:
        """Publish that no layers move any more, if some did."""
        if self._moving:
            self._moving = False
            self._membership.moving("")

    def protected(self, record: StepRecord, protected: Protected) -> None:
        """Publish that every block has all its mirrors again."""
        if protected.speaks:
            self._membership.observe(Reprotected(record.version, protected.seconds, protected.blocks))

    def _tells(self, view: View) -> bool:
        """Return whether this rank is the lowest living one of its node."""
        return view.rank == min((rank for rank in view.living if rank in self._node), default=-1)


def loads_of(record: StepRecord, view: View, load: ExpertLoad) -> ExpertLoads:
    """Return the load of experts that ``record`` carries, by the homes of ``view``."""
    tokens = load.tokens(record.expert_load)
    busiest = ((unit, max(range(load.experts), key=found.__getitem__), found) for unit, found in tokens.items())
    return ExpertLoads(
        step=record.version,
        experts=load.experts,
        imbalance=view.assignment.imbalance(tokens),
        busiest=tuple(
            BusiestExpert(unit, expert, found[expert] * load.experts / sum(found) if any(found) else 1.0)
            for unit, expert, found in busiest
        ),
    )


def topology_of(step: int, view: View) -> DrawnTopology:
    """Return the cells, stages and mirrors of ``view``, in force after ``step``. Takes one pass over the blocks."""
    plan, rows = view.plan, rows_of(view.plan)
    mirrors = Counter((one.owner, mirror) for one in view.placement.copies.values() for mirror in one.mirrors)
    segments = [(number, one) for number, replica in enumerate(plan.replicas) for one in replica.segments]
    return DrawnTopology(
        generation=view.generation,
        step=step,
        units=max((one.end for _, one in segments), default=0),
        cells=tuple(DrawnCell(cell.id, cell.ranks, cell.speed_ppm, rows.get(cell.id, 0)) for cell in plan.cells),
        segments=tuple(DrawnSegment(number, one.cell, one.first, one.end) for number, one in segments),
        mirrors=tuple((owner, mirror, count) for (owner, mirror), count in sorted(mirrors.items())),
    )


class RepeatedWork:
    """Counts the work of a step that losses have computed again, each second once."""

    def __init__(self) -> None:
        self._step = -1
        self._counted_ns = 0

    def seconds(self, timer: PhaseTimer, again: bool) -> float:
        """Seconds that this rank has worked on the present step since the last call for it.

        ``again``: the work is lost; otherwise it counts as done, and 0 is returned.
        """
        step, worked = timer.current.step, timer.worked_ns()
        counted = self._counted_ns if step == self._step else 0
        self._step, self._counted_ns = step, worked
        return (worked - counted) / 1e9 if again else 0.0


def publish_recovery(membership: Membership, outcome: RecoveryOutcome, event: RecoveryEvent, repeated_s: float) -> None:
    """Publish a finished recovery; one rank calls it. ``repeated_s``: seconds of work that are computed again."""
    membership.observe(
        Recovered(
            generation=outcome.decision.generation,
            step=event.step,
            outcome=event.outcome,
            seconds=event.seconds,
            repeated_s=repeated_s,
            lost_steps=event.lost_steps,
            lost=tuple(loss.rank for loss in outcome.lost),
            joined=outcome.newcomers,
        )
    )
