"""Throughput after losses and goodput over traces: every policy on the same damage.

    python -m tools.bench.simulate_table [--quick] [--charts DIR]

Prints the damage table (DP 2, 3, 4, 8, 12, 32 and 40 layers, 1 to 8 losses,
spread and concentrated), the ablation, FT-HSDP's arithmetic, and goodput at
16,384 GPUs, 100K GPUs and 10^6 devices. The last line is one JSON object with
the summary and every row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from megatron.elastic.simulate.__main__ import damage_table, goodput_table
from megatron.elastic.simulate.charts import draw_goodput, draw_scenarios
from megatron.elastic.simulate.clocks import clock_ablation
from megatron.elastic.simulate.fleet import Fleet
from megatron.elastic.simulate.ft_hsdp import arithmetic, side_by_side
from megatron.elastic.simulate.goodput import Assumptions, Goodput, fleet_policies, run_trace
from megatron.elastic.simulate.rates import RATES
from megatron.elastic.simulate.scenarios import (
    ScenarioRow,
    layer_profile,
    run_ablation,
    run_scenario,
    scenario_list,
)
from megatron.elastic.simulate.traces import TraceOptions, failure_trace
from tools.bench._common import print_result

PAPER = {"recycle": 1.35, "torchft": 1.60}
"""ElasWave's gains on 96 NPUs (arXiv 2510.00606, abstract)."""


def fleet_goodput(replicas: int, days: float, rate: str, seed: int) -> tuple[list[Goodput], float]:
    """Goodput of all policies on PP 16 x TP 8 pipelines of 128 layers, and CPU seconds used."""
    start = time.process_time()
    fleet = Fleet(replicas, 16, 128, layer_profile(128), split_backward=True)
    trace = failure_trace(TraceOptions(fleet.cells, 8, days, RATES[rate].per_device_day, 4 * 3600.0, seed=seed))
    assumed = Assumptions()
    policies = fleet_policies(assumed, spares=max(1, fleet.cells // 100))
    results = [run_trace(fleet, trace, days * 86_400, policy, assumed, 8) for policy in policies]
    return results, time.process_time() - start


def summary(rows: Sequence[ScenarioRow]) -> dict[str, object]:
    """The table in a few numbers; ratios only where the peer still runs."""
    result: dict[str, object] = {
        "scenarios": len(rows),
        "share_of_bound_at_least_0.95": sum(row.elaswave / row.bound >= 0.95 for row in rows),
        "below": [
            {**asdict(row.scenario), "share": row.elaswave / row.bound}
            for row in rows
            if row.elaswave / row.bound < 0.95
        ],
        "least_share_of_bound": min(row.elaswave / row.bound for row in rows),
        "least_share_of_bound_1f1b": min(row.elaswave_1f1b / row.bound_1f1b for row in rows),
        "best_share_of_work_bound": max(row.elaswave / row.work_bound for row in rows),
        "recycle_ahead": [
            {**asdict(row.scenario), "ratio": row.peers["recycle"] / row.elaswave}
            for row in rows
            if row.peers["recycle"] > row.elaswave
        ],
    }
    for name in ("recycle", "recycle-barrier", "torchft", "torchft-batch", "mindspeed"):
        ratios = [row.elaswave / row.peers[name] for row in rows if row.peers[name] > 0]
        result[name] = {
            "least": min(ratios),
            "median": median(ratios),
            "most": max(ratios),
            "stopped": sum(1 for row in rows if not row.peers[name]),
            "paper": PAPER.get(name),
            "reached_in": sum(1 for ratio in ratios if ratio >= PAPER.get(name, float("inf"))),
            "out_of_reach_in": sum(
                row.bound / row.peers[name] < PAPER.get(name, 0.0) for row in rows if row.peers[name] > 0
            ),
        }
    return result


def main() -> None:
    """Run everything and print tables, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1 and 2 losses only")
    parser.add_argument("--charts", type=Path, help="write PNGs into this directory")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = [run_scenario(s) for s in scenario_list() if not args.quick or s.losses <= 2]
    print(damage_table(rows))
    some = [s for s in scenario_list() if s.pp == 8 and s.losses <= 2]
    ablation = run_ablation(some)
    print("\n".join(f"{name:24}{value:8.3f}" for name, value in ablation.items()))
    clocks = clock_ablation([s for s in some if s.dp <= 4])
    for name, gain in clocks.items():
        print(f"clocks {name:17}{gain.throughput:8.3f} of the throughput, {gain.energy:.3f} of the energy of a step")
    fleets = {}
    for name, replicas, days, rate in (("16K", 128, 54.0, "llama3"), ("1M", 7_812, 30.0, "rsc1")):
        results, seconds = fleet_goodput(replicas, days, rate, args.seed)
        print(f"{name} devices, {days:g} days, {rate}; {seconds:.1f} s of CPU\n{goodput_table(results)}")
        fleets[name] = {"cpu_s": seconds, "results": results}
        if args.charts:
            draw_goodput(results, args.charts / f"goodput_{name}.png", f"{name} devices, {days:g} days, {rate}")
    hsdp = side_by_side(seed=args.seed)
    print(f"100K GPUs, one failure per 18 minutes\n{goodput_table(hsdp)}")
    if args.charts:
        draw_scenarios(rows, args.charts / "damage.png")
    print_result(
        "simulate_table",
        {
            "damage": summary(rows),
            "ablation": ablation,
            "clocks": clocks,
            "fleets": fleets,
            "ft_hsdp": {"arithmetic": arithmetic(), "results": hsdp},
            "rows": [row.flat() for row in rows],
        },
    )


if __name__ == "__main__":
    main()
