"""Policies over failure traces: how much of the time trains.

Idea: between events the rate is constant, so a month at a million devices is a
walk over its losses, repairs and finished migrations. A loss costs a stall and
the compute that is done again; what follows runs at the rate the fleet model
gives that policy. A loss during a stall begins the stall anew.

Reported: *effective* (work done over what an undamaged fleet would have done),
*stall share*, *redone share*, *mean rate while running*, energy per unit of
work. Everything assumed stands in :class:`Assumptions`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.elastic.simulate.fleet import Fleet
from megatron.elastic.simulate.traces import TraceLoss

__all__ = ["Assumptions", "FleetPolicy", "Goodput", "fleet_policies", "run_trace"]

Rule = Literal["elaswave", "recycle", "shrink", "batch", "mindspeed", "restart", "spares"]


@dataclass(frozen=True)
class Assumptions:
    """Assumptions that published figures do not fix. Seconds, watts."""

    step_s: float = 20.0
    recover_s: float = 2.0
    """Detection and recovery of an in-step system, without the redone compute."""
    rejoin_s: float = 1.0
    """Stall when repaired cells come back at a step boundary."""
    migration_s: float = 60.0
    """Background time until units have moved; meanwhile damaged replicas rest."""
    replica_stall_s: float = 180.0
    """FT-HSDP's stall per failure (arXiv 2602.00277)."""
    restart_s: float = 600.0
    """Stall of a synchronous restart (arXiv 2602.00277: 10 minutes)."""
    checkpoint_s: float = 600.0
    """Time between checkpoints; a restart redoes what came after the last."""
    busy_watts: float = 700.0
    idle_watts: float = 100.0


@dataclass(frozen=True)
class FleetPolicy:
    """A rule with its costs: ``stall_s`` a loss, whether work since the last checkpoint is lost."""

    name: str
    rule: Rule
    stall_s: float
    to_checkpoint: bool = False
    spares: int = 0


def fleet_policies(assumed: Assumptions, spares: int = 0) -> tuple[FleetPolicy, ...]:
    """All policies under one set of assumptions; every in-memory system gets the same fast recovery."""
    return (
        FleetPolicy("elaswave", "elaswave", assumed.recover_s),
        FleetPolicy("recycle", "recycle", assumed.recover_s),
        FleetPolicy("torchft", "shrink", assumed.recover_s),
        FleetPolicy("torchft-batch", "batch", assumed.recover_s),
        FleetPolicy("ft-hsdp", "shrink", assumed.replica_stall_s),
        FleetPolicy("mindspeed", "mindspeed", assumed.recover_s),
        FleetPolicy("restart", "restart", assumed.restart_s, to_checkpoint=True),
        FleetPolicy("spares", "spares", assumed.restart_s, to_checkpoint=True, spares=spares),
    )


@dataclass(frozen=True)
class Goodput:
    """Result of one policy on one trace; shares of wall-clock time."""

    policy: str
    effective: float
    stall_share: float
    redone_share: float
    mean_rate: float
    losses: int
    joules_per_step: float


class _Run:
    """One policy walking one trace."""

    def __init__(self, fleet: Fleet, policy: FleetPolicy, assumed: Assumptions, devices_per_cell: int) -> None:
        self.fleet, self.policy, self.assumed = fleet, policy, assumed
        self.devices = (fleet.cells + policy.spares) * devices_per_cell
        self.dead: dict[int, int] = {}
        self.missing: dict[int, int] = {}
        self.histogram: dict[int, int] = {}
        self.by_stage = [0] * fleet.stages
        self.settled: dict[int, float] = {}
        self.now = self.stalled_until = self.anchor = 0.0
        self.work = self.stall = self.redone = self.running = 0.0
        self.losses = 0
        self.shrunk = False
        self.known: dict[tuple[object, ...], float] = {}
        self.speed = 1.0

    def advance(self, time: float) -> None:
        """Account for the time until ``time`` at the present rate."""
        waited = max(0.0, min(time, self.stalled_until) - self.now)
        ran = max(0.0, time - self.now - waited)
        self.stall += waited
        self.running += ran
        self.work += ran * self.speed
        self.now = time

    def lose(self, loss: TraceLoss) -> list[int]:
        """Cells that were alive and now are not; charges the stall and the redone work."""
        fresh = [cell for cell in range(loss.first, loss.first + loss.count) if cell not in self.dead]
        if not fresh:
            return []
        self.losses += 1
        for cell in fresh:
            self.dead[cell] = 1
            replica, stage = divmod(cell, self.fleet.stages)
            self._count(replica, 1)
            self.by_stage[stage] += 1
            self.settled[replica] = self.now + self.assumed.migration_s
        self._interrupt()
        return fresh

    def repair(self, cells: Sequence[int]) -> None:
        """Cells are back."""
        for cell in cells:
            del self.dead[cell]
            replica, stage = divmod(cell, self.fleet.stages)
            self._count(replica, -1)
            self.by_stage[stage] -= 1
        if self.policy.rule in ("restart", "spares"):
            return
        self.stalled_until = max(self.stalled_until, self.now + self.assumed.rejoin_s)

    def _count(self, replica: int, change: int) -> None:
        before = self.missing.get(replica, 0)
        after = before + change
        if before:
            self.histogram[before] -= 1
            if not self.histogram[before]:
                del self.histogram[before]
        if after:
            self.missing[replica] = after
            self.histogram[after] = self.histogram.get(after, 0) + 1
        else:
            del self.missing[replica]
            self.settled.pop(replica, None)

    def _interrupt(self) -> None:
        """Stall from now; what was in flight, or came after the last checkpoint, is done again."""
        if self.now >= self.stalled_until:
            ran = self.now - self.anchor
            since = ran % self.assumed.checkpoint_s if self.policy.to_checkpoint else min(ran, self.assumed.step_s / 2)
            lost = since * self.speed
            self.work -= lost
            self.redone += since
        stall = self.policy.stall_s
        if self.policy.rule == "mindspeed" and len(self.missing) > 1 and self.shrunk:
            stall = self.assumed.restart_s
        self.shrunk = bool(self.missing)
        self.stalled_until = self.now + stall
        self.anchor = self.stalled_until

    def refresh(self) -> None:
        """The rate from here on."""
        rule = self.policy.rule
        resting = 0
        if rule == "elaswave":
            resting = sum(1 for time in self.settled.values() if time > self.now)
        key: tuple[object, ...] = (tuple(sorted(self.histogram.items())), resting)
        if rule == "recycle":
            key = (max(self.by_stage),)
        if rule == "elaswave" and resting:
            recent = [self.missing[replica] for replica, time in self.settled.items() if time > self.now]
            left = dict(self.histogram)
            for lack in recent:
                left[lack] -= 1
            key = (tuple(sorted(item for item in left.items() if item[1])), resting)
        if key not in self.known:
            self.known[key] = self._rate(key, resting)
        self.speed = self.known[key]

    def _rate(self, key: tuple[object, ...], resting: int) -> float:
        """Rate relative to undamaged 1F1B, 0 when stopped. Split tables may hide a loss, never count as a gain."""
        fleet, rule = self.fleet, self.policy.rule
        damaged = len(self.missing)
        if rule == "shrink":
            return (fleet.replicas - damaged) / fleet.replicas
        if rule == "elaswave":
            table = dict(key[0]) if damaged else {}  # type: ignore[call-overload]
            time = fleet.recut_ns(table, resting)
        elif rule == "recycle":
            time = fleet.rerouted_ns(max(self.by_stage))
        elif rule == "spares":
            time = fleet.dropped_ns(max(0, damaged - self.policy.spares))
        else:
            time = fleet.dropped_ns(damaged)
        return min(1.0, fleet.undamaged_ns() / time) if time else 0.0

    def result(self, horizon: float) -> Goodput:
        watts = self.assumed.busy_watts * self.running + self.assumed.idle_watts * self.stall
        steps = max(self.work, 1e-9) / self.assumed.step_s
        return Goodput(
            self.policy.name,
            self.work / horizon,
            self.stall / horizon,
            self.redone / horizon,
            (self.work + self.redone) / self.running if self.running else 0.0,
            self.losses,
            watts * self.devices / steps,
        )


def run_trace(
    fleet: Fleet,
    trace: Sequence[TraceLoss],
    horizon_s: float,
    policy: FleetPolicy,
    assumed: Assumptions | None = None,
    devices_per_cell: int = 1,
) -> Goodput:
    """Walk ``trace`` for ``horizon_s`` seconds under ``policy``."""
    assumed = assumed or Assumptions()
    run = _Run(fleet, policy, assumed, devices_per_cell)
    later: list[tuple[float, int, list[int]]] = []
    order = 0
    for loss in [*trace, None]:
        limit = horizon_s if loss is None else min(loss.at_s, horizon_s)
        while later and later[0][0] <= limit:
            time, _, cells = heapq.heappop(later)
            run.advance(time)
            if cells:
                run.repair(cells)
            run.refresh()
        run.advance(limit)
        if loss is None or loss.at_s > horizon_s:
            break
        fresh = run.lose(loss)
        run.refresh()
        if fresh:
            order += 1
            heapq.heappush(later, (loss.at_s + loss.repair_s, order, fresh))
            if policy.rule == "elaswave":
                order += 1
                heapq.heappush(later, (loss.at_s + assumed.migration_s, order, []))
    return run.result(horizon_s)
