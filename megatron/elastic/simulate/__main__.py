"""``python -m megatron.elastic.simulate {damage,goodput,ft-hsdp,table}``: tables, charts, one JSON object at the end.

python -m megatron.elastic.simulate damage --devices 96 --chart damage.png
python -m megatron.elastic.simulate goodput --devices 1000000 --days 30 --rate rsc1 --seed 7
python -m megatron.elastic.simulate ft-hsdp
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron.elastic.observe.trace import draw_spans, write_chrome_trace
from megatron.elastic.plan.planner import instant_plan, plan_hash
from megatron.elastic.plan.steady import steady_plan
from megatron.elastic.plan.topology import without_cells
from megatron.elastic.plan.validate import validate_plan
from megatron.elastic.simulate.charts import draw_goodput, draw_scenarios
from megatron.elastic.simulate.engine import simulate_step
from megatron.elastic.simulate.fleet import Fleet
from megatron.elastic.simulate.ft_hsdp import arithmetic, side_by_side
from megatron.elastic.simulate.goodput import Assumptions, Goodput, fleet_policies, run_trace
from megatron.elastic.simulate.pictures import plan_spans, track_names
from megatron.elastic.simulate.rates import RATES
from megatron.elastic.simulate.scenarios import (
    Row,
    Scenario,
    layer_profile,
    run_ablation,
    run_scenario,
    scenario_list,
    scenario_topology,
)
from megatron.elastic.simulate.traces import TraceOptions, failure_trace

__all__ = ["damage_table", "goodput_table", "main"]


def damage_table(rows: Sequence[Row]) -> str:
    """The damage table as text (relative throughput; 0: stopped)."""
    head = (
        "  DP  PP lay. loss pattern       elaswave  bound | 1F1B   best | recycle  ideal torchft  batch minds. | kind"
    )
    lines = [head]
    for row in rows:
        s, p = row.scenario, row.peers
        lines.append(
            f"{s.dp:4}{s.pp:4}{s.layers:5}{s.losses:5} {s.pattern:12}"
            f"{row.elaswave:10.3f}{row.bound:7.3f} |{row.elaswave_1f1b:5.3f}{row.bound_1f1b:7.3f} |"
            f"{p['recycle']:8.3f}{row.ideal_reroute:7.3f}{p['torchft']:8.3f}{p['torchft-batch']:7.3f}"
            f"{p['mindspeed']:7.3f} | {row.kind}"
        )
    return "\n".join(lines)


def goodput_table(results: Sequence[Goodput]) -> str:
    """Goodput per policy as text."""
    lines = [f"{'policy':14}{'effective':>10}{'stalled':>9}{'redone':>8}{'rate':>7}{'losses':>8}{'MJ/step':>10}"]
    for r in results:
        energy = f"{r.joules_per_step / 1e6:10.1f}" if r.effective > 1e-4 else f"{'-':>10}"
        lines.append(
            f"{r.policy:14}{r.effective:10.4f}{r.stall_share:9.4f}{r.redone_share:8.4f}{r.mean_rate:7.3f}"
            f"{r.losses:8}{energy}"
        )
    return "\n".join(lines)


def _damage(args: argparse.Namespace) -> dict[str, object]:
    scenarios = scenario_list(args.devices)
    if args.losses:
        scenarios = [s for s in scenarios if s.losses in args.losses]
    if args.dp:
        scenarios = [s for s in scenarios if s.dp in args.dp]
    rows = [run_scenario(scenario) for scenario in scenarios]
    print(damage_table(rows))
    if args.chart:
        draw_scenarios(rows, args.chart, min(row.scenario.losses for row in rows))
    result: dict[str, object] = {"rows": [row.flat() for row in rows]}
    if args.ablation:
        few = [s for s in scenarios if s.losses <= 2]
        result["ablation"] = run_ablation(few)
        print(json.dumps(result["ablation"], indent=1))
    return result


def _goodput(args: argparse.Namespace) -> dict[str, object]:
    tp, stages = args.tp, args.pp
    replicas = args.devices // (tp * stages)
    fleet = Fleet(replicas, stages, args.layers, layer_profile(args.layers), args.waves, split_backward=True)
    options = TraceOptions(
        replicas * stages,
        tp,
        args.days,
        RATES[args.rate].per_device_day,
        args.repair_hours * 3600,
        args.correlated,
        args.correlated_cells,
        args.seed,
    )
    trace = failure_trace(options)
    assumed = Assumptions(step_s=args.step)
    policies = fleet_policies(assumed, spares=args.spares)
    results = [run_trace(fleet, trace, args.days * 86_400, policy, assumed, tp) for policy in policies]
    print(f"{replicas * stages * tp} devices, {args.days:g} days, {len(trace)} losses; {RATES[args.rate].source}")
    print(goodput_table(results))
    if args.chart:
        draw_goodput(results, args.chart, f"{args.devices} devices, {args.days:g} days, seed {args.seed}")
    return {"options": asdict(options), "assumed": asdict(assumed), "results": [asdict(r) for r in results]}


def _ft_hsdp(args: argparse.Namespace) -> dict[str, object]:
    figures = arithmetic()
    results = side_by_side(args.days, args.seed)
    for name, value in figures.items():
        print(f"{name:26}{value:8.3f}")
    print(goodput_table(results))
    if args.chart:
        draw_goodput(results, args.chart, "100K GPUs, one failure per 18 minutes")
    return {"arithmetic": figures, "results": [asdict(r) for r in results]}


def _table(args: argparse.Namespace) -> dict[str, object]:
    profile = layer_profile(args.layers)
    scenario = Scenario(args.dp, args.pp, args.layers, 0, "spread", args.waves, headroom=args.headroom)
    topology = without_cells(scenario_topology(scenario)[0], args.lost)
    if args.plan == "steady":
        plan = steady_plan(topology, profile, split_backward=args.split)
    else:
        plan = instant_plan(topology, profile, args.plan, split_backward=args.split)
    validate_plan(plan, args.layers)
    spans = plan_spans(plan, profile)
    if args.chart:
        draw_spans(args.chart, spans, track_names(plan), f"{args.plan}: DP {args.dp} x PP {args.pp}, lost {args.lost}")
    if args.trace:
        write_chrome_trace(args.trace, spans, track_names(plan))
    step = simulate_step(plan, profile)
    return {"hash": plan_hash(plan), "makespan_ns": step.pipeline, "idle_share": step.timeline.idle_share()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron.elastic.simulate", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    damage = commands.add_parser("damage", help="policies on fixed losses")
    damage.add_argument("--devices", type=int, default=96)
    damage.add_argument("--losses", type=int, nargs="*", help="only these numbers of losses")
    damage.add_argument("--dp", type=int, nargs="*", help="only these data-parallel sizes")
    damage.add_argument("--ablation", action="store_true", help="each axis off in turn (1 and 2 losses)")
    goodput = commands.add_parser("goodput", help="policies over a failure trace")
    goodput.add_argument("--devices", type=int, default=16_384)
    goodput.add_argument("--days", type=float, default=30.0)
    goodput.add_argument("--rate", choices=sorted(RATES), default="llama3")
    goodput.add_argument("--tp", type=int, default=8)
    goodput.add_argument("--pp", type=int, default=16)
    goodput.add_argument("--layers", type=int, default=128)
    goodput.add_argument("--waves", type=int, default=16, help="micro-batches per replica and step")
    goodput.add_argument("--step", type=float, default=20.0, help="seconds a step")
    goodput.add_argument("--repair-hours", type=float, default=4.0)
    goodput.add_argument("--correlated", type=float, default=0.0, help="share of losses that take a block of cells")
    goodput.add_argument("--correlated-cells", type=int, default=8)
    goodput.add_argument("--spares", type=int, default=16)
    hsdp = commands.add_parser("ft-hsdp", help="FT-HSDP's arithmetic and everyone on the same trace")
    hsdp.add_argument("--days", type=float, default=7.0)
    table = commands.add_parser("table", help="draw a schedule table")
    table.add_argument("--dp", type=int, default=2)
    table.add_argument("--pp", type=int, default=4)
    table.add_argument("--layers", type=int, default=16)
    table.add_argument("--waves", type=int, default=8)
    table.add_argument("--lost", type=int, nargs="*", default=[], help="cells that died")
    table.add_argument("--plan", choices=("reroute", "resize", "steady"), default="reroute")
    table.add_argument("--split", action="store_true", help="split backward into input and weight gradient")
    table.add_argument("--headroom", type=float, default=1.3, help="memory over the neediest nominal stage's")
    table.add_argument("--trace", type=Path, help="write a Chrome trace here (Perfetto)")
    for command in (damage, goodput, hsdp, table):
        command.add_argument("--chart", type=Path, help="write a PNG or SVG here")
    for command in (goodput, hsdp):
        command.add_argument("--seed", type=int, default=0)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the last line printed is one JSON object."""
    args = _parser().parse_args(argv)
    run = {"damage": _damage, "goodput": _goodput, "ft-hsdp": _ft_hsdp, "table": _table}[args.command]
    print(json.dumps(run(args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
