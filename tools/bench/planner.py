"""Duration of planning, from 16 to 100,000 cells.

    python -m tools.bench.planner [--repeat 5]

For each size a regular topology (PP 8, 32 layers, 16 micro-batches a replica)
loses cells, and three things are timed: the decision (instant answer, best
shape, moves, its hash; also with the backward in two parts), the expansion of one pipeline into
tables, and up to 1,000 cells the instant plan of the engine, with all tables and its digest. CPU seconds of the best
repetition, building the topology excluded. As in the engine, Python searches for no garbage meanwhile.
Then every damage of the simulator's table (16 to 96 cells, memory for little more
than 1F1B, backward in two parts): there tables decide between shapes, so that
these decisions, not those of more cells, are the longest below 10,000.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

from megatron.elastic.plan.model import Profile, Topology
from megatron.elastic.plan.planner import instant_plan
from megatron.elastic.plan.search.graph import Shape, candidate_shapes
from megatron.elastic.plan.search.steady import DecisionOptions, decide, shape_hash, shape_plan
from megatron.elastic.plan.topology import regular_topology, without_cells
from megatron.elastic.platform.garbage import garbage_later
from megatron.elastic.simulate.scenarios import layer_profile, scenario_list, scenario_topology
from tools.bench._common import print_result

LIMITS = {1_000: 0.050, 100_000: 2.0}
"""Cells → seconds the decision may take."""


def best(repeat: int, work: Callable[[], object]) -> float:
    """CPU seconds of the fastest of ``repeat`` runs."""
    times = []
    for _ in range(repeat):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def decision(topology: Topology, profile: Profile, split: bool = False) -> None:
    """The computation of every process at DECIDE."""
    found = decide(topology, profile, DecisionOptions(split_backward=split))
    shape = found.steady if found.steady is not None else found.instant
    if isinstance(shape, Shape):
        shape_hash(shape)


@garbage_later()
def measure(cells: int, repeat: int) -> dict[str, float | int]:
    """Times for one size; one loss per thousand cells, at least one."""
    profile = layer_profile(32)
    topology = regular_topology(cells // 8, 8, 32, waves=16)
    damaged = without_cells(topology, range(3, cells, max(1_001, cells // 100 + 1) if cells > 1_001 else cells))
    result: dict[str, float | int] = {"cells": cells, "lost": cells - len(damaged.cells)}
    result["decision_s"] = best(repeat, lambda: decision(damaged, profile))
    shape = candidate_shapes(damaged, profile)[0]
    result["decision_split_s"] = best(repeat, lambda: decision(damaged, profile, split=True))
    result["local_tables_s"] = best(repeat, lambda: shape_plan(damaged, shape, profile, only=[0]))
    if cells <= 1_000:
        result["instant_plan_s"] = best(repeat, lambda: instant_plan(damaged, profile).digest)
    return result


def damages(repeat: int) -> dict[str, float | int]:
    """Decisions of the damage table; those that are slow at first are repeated."""
    limit = LIMITS[1_000]
    times = []
    for scenario in scenario_list():
        _, damaged = scenario_topology(scenario)
        work = partial(decision, damaged, layer_profile(scenario.layers), split=True)
        time = best(1, work)
        times.append(time if time <= limit else min(time, best(repeat, work)))
    return {
        "scenarios": len(times),
        "median_s": median(times),
        "worst_s": max(times),
        "within_limit": sum(time <= limit for time in times),
    }


def main() -> None:
    """Measure all sizes and print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    rows = []
    for cells in (16, 96, 1_000, 10_000, 100_000):
        row = measure(cells, args.repeat if cells < 100_000 else min(args.repeat, 3))
        rows.append(row)
        print(
            "  ".join(
                f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    within = {
        f"{row['cells']} {kind}": row[kind] <= LIMITS[int(row["cells"])]
        for row in rows
        if row["cells"] in LIMITS
        for kind in ("decision_s", "decision_split_s")
    }
    table = damages(args.repeat)
    print("damage table  " + "  ".join(f"{key} {value:.4g}" for key, value in table.items()))
    print_result("planner", {"rows": rows, "within_limits": within, "damage_table": table})


if __name__ == "__main__":
    main()
