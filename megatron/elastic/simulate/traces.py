"""Failure traces by seed.

Idea: losses arrive as a Poisson process with a published rate per device-day
and strike uniformly; a share of them is correlated and takes a whole block of
neighbouring cells (a rack, a switch). Each loss carries its own repair time
(exponential). Same seed, same trace, for every reader: policies are compared on
the same events.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["TraceLoss", "TraceOptions", "failure_trace"]


@dataclass(frozen=True)
class TraceLoss:
    """Cells ``[first, first + count)`` stop at ``at_s`` and are back ``repair_s`` later."""

    at_s: float
    first: int
    count: int
    repair_s: float


@dataclass(frozen=True)
class TraceOptions:
    """Parameters of the drawn trace. ``correlated_share`` of the losses takes ``correlated_cells`` cells at once."""

    cells: int
    devices_per_cell: int
    days: float
    per_device_day: float
    repair_mean_s: float = 3600.0
    correlated_share: float = 0.0
    correlated_cells: int = 1
    seed: int = 0


def failure_trace(options: TraceOptions) -> list[TraceLoss]:
    """Losses in order of time. The expected number is rate x devices x days."""
    draw = np.random.default_rng(options.seed)
    horizon = options.days * 86_400
    mean = options.per_device_day * options.cells * options.devices_per_cell * options.days
    count = int(draw.poisson(mean))
    times = np.sort(draw.uniform(0.0, horizon, count))
    where = draw.integers(0, options.cells, count)
    wide = draw.random(count) < options.correlated_share
    repairs = draw.exponential(options.repair_mean_s, count)
    block = max(1, options.correlated_cells)
    trace = []
    for time, cell, correlated, repair in zip(times, where, wide, repairs, strict=True):
        first = int(cell) // block * block if correlated else int(cell)
        size = min(block, options.cells - first) if correlated else 1
        trace.append(TraceLoss(float(time), first, size, float(repair)))
    return trace
