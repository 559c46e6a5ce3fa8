"""An agent's answers to ``megatron.elastic.ctl``: the state of the job, and requests to it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatron.elastic.control.answers import (
    Acceptance,
    Answer,
    GenerationStatus,
    HistoryStatus,
    JobStatus,
    NodeStatus,
    ProgressStatus,
    RankStatus,
    Refusal,
    ReshapeStatus,
    ToleranceStatus,
    WorkerStatus,
)
from megatron.elastic.control.clock import JobClock
from megatron.elastic.control.events import Event, Readmitted, Wanted
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.history import JobHistory
from megatron.elastic.control.membership import RunFigures
from megatron.elastic.control.observations import CAUSES, DrawnTopology, ExpertLoads
from megatron.elastic.control.quarantine import NodeRecord
from megatron.elastic.control.requests import Admit, Command, Drain, ParallelSizes, Reshape, Status
from megatron.elastic.launch.agent.node_leases import Table
from megatron.elastic.launch.agent.step_meter import StepMeter

__all__ = ["Admin", "Sources"]


@dataclass(frozen=True)
class Sources:
    """An agent's knowledge of its job. None of it waits for a worker, or for the store."""

    run_id: str
    state: Generations
    history: JobHistory
    clock: JobClock
    meter: StepMeter = field(default_factory=StepMeter)
    table: Callable[[], Table] = dict
    """The activities of the workers here."""
    pids: Callable[[], dict[int, int]] = dict
    moving: Mapping[int, str] = field(default_factory=dict)
    """Rank of this node → the layers that move now."""
    topology: Callable[[], DrawnTopology | None] = lambda: None
    """The cells, stages and mirrors, if a page shows them."""
    expert_loads: Callable[[], ExpertLoads | None] = lambda: None
    """The load of experts, if ranks share some."""
    since: float = field(default_factory=time.monotonic)

    def status(self) -> JobStatus:
        """The state of the job now."""
        state, pids = self.state, self.pids()
        progress = self.progress()
        reshapes = state.reshapes
        return JobStatus(
            run_id=self.run_id,
            up_s=round(time.monotonic() - self.since, 1),
            job_s=round(self.clock.now(), 3),
            state=self._state(),
            progress=progress,
            generation=GenerationStatus(state.decided, state.frozen, tuple(state.missing())),
            members=tuple(state.members),
            pending=tuple(state.pending().words()),
            tolerance=ToleranceStatus(*state.announced),
            reshape=ReshapeStatus(
                reshapes.number,
                str(reshapes.asked.sizes) if reshapes.asked else "",
                reshapes.state,
                reshapes.text,
            ),
            moving=next((text for rank, text in sorted(self.moving.items()) if text and rank in state.members), ""),
            history=self._history(progress),
            ranks={
                rank: RankStatus(each.standing, each.incarnation, state.returns(rank))
                for rank, each in state.ranks.items()
            },
            nodes={number: self._node(number) for number in state.nodes},
            workers_here={
                rank: WorkerStatus(
                    pids.get(rank, 0), idle.step, idle.phase, tuple(idle.waiting_for), round(idle.seconds, 3)
                )
                for rank, (_, idle) in sorted(self.table().items())
            },
            expert_loads=self.expert_loads(),
        )

    def figures(self) -> RunFigures:
        """The figures of the run now, for logs of the workers."""
        past, newest, protection = self.history, self.meter.newest, self.history.protection
        goodput = None if newest is None else past.goodput(self.clock.now(), newest.step)
        return RunFigures(
            losses=past.losses,
            recoveries=past.recoveries,
            repeated_steps=past.lost_steps,
            tolerated_ranks=protection.ranks,
            tolerated_nodes=protection.nodes,
            short_blocks=protection.short,
            recovery_s=past.recovery_s,
            lost_s=sum(past.lost_s.values()),
            unprotected_s=past.unprotected_s,
            goodput=math.nan if goodput is None else goodput,
            lost_by_cause_s=tuple(past.lost_s.get(cause, 0.0) for cause in CAUSES),
        )

    def progress(self) -> ProgressStatus | None:
        """The newest committed step; None where this node has seen none."""
        step = self.meter.newest
        if step is None:
            return None
        rate, target = self.meter.rate(), step.target if step.target > 0 else None
        return ProgressStatus(
            step=step.step,
            target=target,
            samples=step.samples,
            step_s=step.seconds if math.isfinite(step.seconds) else 0.0,
            steps_per_s=rate,
            left_s=None if target is None or not rate else max(0, target - step.step) / rate,
            loss=step.loss if math.isfinite(step.loss) else None,
            ago_s=round(max(0.0, time.monotonic() - self.meter.samples[-1].at), 3),
            mean_step_s=self.meter.duration(),
        )

    def _history(self, progress: ProgressStatus | None) -> HistoryStatus:
        past, now = self.history, self.clock.now()
        began = past.first_step >= 0
        return HistoryStatus(
            losses=past.losses,
            recoveries=past.recoveries,
            changes=past.changes,
            lost_steps=past.lost_steps,
            mttr_s=past.recovery_mean_s(),
            lost_s=dict(past.lost_s),
            unprotected_s=past.unprotected_s,
            first_step=past.first_step,
            stepping_s=max(0.0, now - past.began_at) if began else 0.0,
            goodput=None if progress is None else past.goodput(now, progress.step),
            protection=past.protection,
            last_losses=tuple(past.last_losses),
            last_recoveries=tuple(past.last_recoveries),
        )

    def _state(self) -> str:
        if self.history.first_step < 0 or self.state.fresh:
            return "starting"
        if not self.state.quiet:
            return "recovering"
        return "draining" if self.state.drain == () else "training"

    def _node(self, number: int) -> NodeStatus:
        node, now = self.state.nodes[number], self.clock.now()
        record = self.state.quarantine.nodes.get(number, NodeRecord())
        out = round(max(0.0, record.until - now), 1) if record.out else 0.0
        return NodeStatus(node.host, node.alive, len(record.recent(now)), out, record.finding)


class Admin:
    """Serves one agent's console. ``append``: puts an event into the journal."""

    def __init__(self, sources: Sources, append: Callable[[Event], None]) -> None:
        self._sources, self._append = sources, append

    def handle(self, command: Command) -> Answer:
        """The answer to one command."""
        known = self._sources.state.ranks
        ranks = command.ranks if isinstance(command, Drain | Admit) else ()
        unknown = [rank for rank in ranks if rank not in known]
        if unknown:
            return Refusal(f"no such ranks: {unknown}; there are 0 … {len(known) - 1}")
        match command:
            case Status():
                return self._sources.status()
            case Reshape() if reason := self._impossible(command.sizes):
                return Refusal(reason)
            case Admit():
                self._append(Readmitted(ranks))
            case _:
                self._append(Wanted(command))
        return Acceptance(str(type(command).__struct_config__.tag), self._sources.run_id, ranks)

    def _impossible(self, sizes: ParallelSizes) -> str:
        """Return why the sizes cannot be reached, as far as an agent can know; empty if it knows no reason."""
        state = self._sources.state
        reshapes, here = state.reshapes, len(state.coming)
        if reshapes.is_open:
            return f"the job is on its way to {reshapes.wanted[-1]}: ask again when these sizes are in force or refused"
        if sizes.ranks > here:
            return f"{sizes} takes {sizes.ranks} ranks, and {here} are here or starting: start agents on more nodes"
        return ""
