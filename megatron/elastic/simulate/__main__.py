"""The simulator: policies on fixed losses, over failure traces, and single tables. The last line is one JSON object.

    python -m megatron.elastic.simulate damage --dp 2 --losses 1 --chart damage.png
    python -m megatron.elastic.simulate goodput --devices 1000000 --days 30 --rate rsc1 --seed 7
    python -m megatron.elastic.simulate ft-hsdp
    python -m megatron.elastic.simulate table --dp 2 --pp 4 --layers 16 --lost 2 --plan steady --chart table.png

What the columns mean and where the rates come from: docs/simulation.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from megatron.elastic.observe.trace import draw_spans, write_chrome_trace
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.planner import instant_plan
from megatron.elastic.plan.schedule.validate import InvalidPlan, validate_plan
from megatron.elastic.plan.search.steady import DecisionOptions, steady_plan
from megatron.elastic.plan.topology import without_cells
from megatron.elastic.simulate.charts import draw_goodput, draw_scenarios
from megatron.elastic.simulate.engine import simulate_step
from megatron.elastic.simulate.fleet import Fleet
from megatron.elastic.simulate.ft_hsdp import arithmetic, side_by_side
from megatron.elastic.simulate.goodput import Assumptions, Goodput, fleet_policies, run_trace
from megatron.elastic.simulate.pictures import plan_spans, track_names
from megatron.elastic.simulate.rates import FT_HSDP, RATES
from megatron.elastic.simulate.scenarios import (
    Scenario,
    ScenarioRow,
    layer_profile,
    run_ablation,
    run_scenario,
    scenario_list,
    scenario_topology,
)
from megatron.elastic.simulate.traces import TraceOptions, failure_trace

__all__ = ["damage_table", "goodput_table", "main"]

MOST_LOSSES = 1_000_000
"""Losses of a trace: a minute for all policies."""
MOST_STAGES = 4096
MOST_LAYERS = 100_000
MOST_PIECES = 100_000
"""Micro-batches of a table times its stages: half a minute."""


def damage_table(rows: Sequence[ScenarioRow]) -> str:
    """The damage table as text (relative throughput; 0: stopped)."""
    head = (
        "  DP  PP lay. loss pattern       elaswave  bound | 1F1B   best | recycle barrier  ideal "
        "torchft  batch minds. | kind"
    )
    lines = [head]
    for row in rows:
        s, p = row.scenario, row.peers
        lines.append(
            f"{s.dp:4}{s.pp:4}{s.layers:5}{s.losses:5} {s.pattern:12}"
            f"{row.elaswave:10.3f}{row.bound:7.3f} |{row.elaswave_1f1b:5.3f}{row.bound_1f1b:7.3f} |"
            f"{p['recycle']:8.3f}{p['recycle-barrier']:8.3f}{row.ideal_reroute:7.3f}{p['torchft']:8.3f}{p['torchft-batch']:7.3f}"
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
    if args.devices < 24:
        raise ValueError(f"--devices {args.devices}: the scenarios need at least 24 (DP 12 x PP 2)")
    scenarios = scenario_list(args.devices)
    if args.losses:
        scenarios = [s for s in scenarios if s.losses in args.losses]
    if args.dp:
        scenarios = [s for s in scenarios if s.dp in args.dp]
    if not scenarios:
        raise ValueError("no scenario has these --dp and --losses: DP is one of 2, 3, 4, 8, 12, losses of 1, 2, 4, 8")
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


def _check_losses(days: float, per_day: float) -> None:
    """Raise ``ValueError`` for a trace of more losses than a few minutes allow."""
    if days * per_day > MOST_LOSSES:
        raise ValueError(
            f"--days {days:g}: at {per_day:.3g} losses a day the trace has more than {MOST_LOSSES:,} losses: use "
            f"at most {MOST_LOSSES / per_day:.3g} days"
        )


def _goodput(args: argparse.Namespace) -> dict[str, object]:
    tp, stages = args.tp, args.pp
    replicas = args.devices // (tp * stages)
    if replicas < 1:
        raise ValueError(f"--devices {args.devices} are fewer than one replica of --tp {tp} x --pp {stages}")
    if args.layers < stages:
        raise ValueError(f"--layers {args.layers} are fewer than the stages of --pp {stages}")
    _check_losses(args.days, RATES[args.rate].per_device_day * replicas * stages * tp)
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
    _check_losses(args.days, 86_400 / FT_HSDP.interval_s)
    figures = arithmetic()
    results = side_by_side(args.days, args.seed)
    for name, value in figures.items():
        print(f"{name:26}{value:8.3f}")
    print(goodput_table(results))
    if args.chart:
        draw_goodput(results, args.chart, "100K GPUs, one failure per 18 minutes")
    return {"arithmetic": figures, "results": [asdict(r) for r in results]}


def _table(args: argparse.Namespace) -> dict[str, object]:
    pieces = args.dp * args.pp * args.waves
    if pieces > MOST_PIECES:
        raise ValueError(f"--dp x --pp x --waves is {pieces:,} pieces of work: use at most {MOST_PIECES:,}")
    strangers = [cell for cell in args.lost if not 0 <= cell < args.dp * args.pp]
    if strangers:
        raise ValueError(f"--lost {strangers[0]}: cells are 0 to {args.dp * args.pp - 1}")
    if len(set(args.lost)) == args.dp * args.pp:
        raise ValueError("--lost names every cell: leave at least one")
    if args.layers < args.pp:
        raise ValueError(f"--layers {args.layers} are fewer than the stages of --pp {args.pp}")
    profile = layer_profile(args.layers)
    scenario = Scenario(args.dp, args.pp, args.layers, 0, "spread", args.waves, headroom=args.headroom)
    topology = without_cells(scenario_topology(scenario)[0], args.lost)
    if args.plan == "steady":
        plan = steady_plan(topology, profile, DecisionOptions(split_backward=args.split))
    else:
        plan = instant_plan(topology, profile, args.plan, split_backward=args.split)
    validate_plan(plan, args.layers)
    try:
        validate_plan(plan, args.layers, profile)
    except InvalidPlan as error:
        raise ValueError(f"--headroom {args.headroom:g}: {error}; raise it") from None
    spans = plan_spans(plan, profile)
    if args.chart:
        draw_spans(args.chart, spans, track_names(plan), f"{args.plan}: DP {args.dp} x PP {args.pp}, lost {args.lost}")
    if args.trace:
        write_chrome_trace(args.trace, spans, track_names(plan))
    step = simulate_step(plan, profile)
    return {"hash": plan.digest, "makespan_ns": step.pipeline, "idle_share": step.timeline.idle_share()}


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults behind flags that have one, examples as they stand."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _at_most(limit: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = _positive(text)
        if value > limit:
            raise argparse.ArgumentTypeError(f"{text!r} is above {limit}")
        return value

    return number


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return value


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} ends in neither .png nor .svg")
    return _file(text)


def _file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {str(path.parent)!r}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a directory, not a file to write")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} may not be written")
    return path


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def _headroom(text: str) -> float:
    value = _above_zero(text)
    if value > 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is above 1000")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron.elastic.simulate", description=__doc__, formatter_class=_Formatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, what: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=what, description=what, formatter_class=_Formatter)

    damage = command("damage", "throughput of every policy after fixed losses, relative to before, and the bound")
    damage.add_argument("--devices", type=_positive, default=96, metavar="N", help="devices before the loss")
    damage.add_argument(
        "--losses", type=_positive, nargs="*", metavar="N", help="only rows with these numbers of losses; default: all"
    )
    damage.add_argument(
        "--dp", type=_positive, nargs="*", metavar="N", help="only rows with these data-parallel sizes; default: all"
    )
    damage.add_argument(
        "--ablation", action="store_true", help="turn off one axis of the policy at a time (1 and 2 losses)"
    )
    goodput = command("goodput", "every policy over a trace of failures and repairs: goodput, stalls, energy")
    goodput.add_argument("--devices", type=_positive, default=16_384, metavar="N", help="devices of the job")
    goodput.add_argument("--days", type=_above_zero, default=30.0, metavar="DAYS", help="simulated time")
    goodput.add_argument("--rate", choices=sorted(RATES), default="llama3", help="published rate of failures")
    goodput.add_argument("--tp", type=_positive, default=8, metavar="N", help="tensor-parallel size")
    goodput.add_argument("--pp", type=_at_most(MOST_STAGES), default=16, metavar="N", help="stages of a replica")
    goodput.add_argument("--layers", type=_at_most(MOST_LAYERS), default=128, metavar="N", help="layers of the model")
    goodput.add_argument("--waves", type=_positive, default=16, metavar="N", help="micro-batches per replica and step")
    goodput.add_argument(
        "--step", type=_above_zero, default=20.0, metavar="S", help="seconds that an undamaged step takes"
    )
    goodput.add_argument("--repair-hours", type=_above_zero, default=4.0, metavar="H", help="mean time to repair")
    goodput.add_argument(
        "--correlated", type=_share, default=0.0, metavar="SHARE", help="share of losses that take a block of cells"
    )
    goodput.add_argument(
        "--correlated-cells", type=_positive, default=8, metavar="N", help="cells that one correlated loss takes"
    )
    goodput.add_argument(
        "--spares", type=_positive, default=16, metavar="N", help="cells kept as spares by policy 'spares'"
    )
    hsdp = command("ft-hsdp", "FT-HSDP's arithmetic, and all policies on one trace of its rate")
    hsdp.add_argument("--days", type=_above_zero, default=7.0, metavar="DAYS", help="simulated time")
    table = command("table", "one schedule table: its time, its picture")
    table.add_argument("--dp", type=_positive, default=2, metavar="N", help="replicas")
    table.add_argument("--pp", type=_at_most(MOST_STAGES), default=4, metavar="N", help="stages of a replica")
    table.add_argument("--layers", type=_at_most(MOST_LAYERS), default=16, metavar="N", help="layers of the model")
    table.add_argument("--waves", type=_positive, default=8, metavar="N", help="micro-batches per replica")
    table.add_argument(
        "--lost", type=int, nargs="*", default=[], metavar="CELL", help="cells that died (replica x PP + stage)"
    )
    table.add_argument(
        "--plan",
        choices=("reroute", "resize", "steady"),
        default="reroute",
        help="reroute: peers take whole micro-batches; resize: rows are cut anew; steady: units move too",
    )
    table.add_argument("--split", action="store_true", help="split backward into input and weight gradient")
    table.add_argument(
        "--headroom",
        type=_headroom,
        default=1.3,
        metavar="X",
        help="memory of a cell, as a multiple of the memory that the largest stage needs",
    )
    table.add_argument("--trace", type=_file, metavar="PATH", help="write a Chrome trace here (ui.perfetto.dev)")
    for one in (damage, goodput, hsdp, table):
        one.add_argument("--chart", type=_picture, metavar="PATH", help="write a picture here (.png or .svg)")
    for one in (goodput, hsdp):
        one.add_argument("--seed", type=_seed, default=0, metavar="N", help="seed of the trace of losses")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the last line printed is one JSON object. Exit code 1 with one line on stderr for bad input."""
    args = _parser().parse_args(argv)
    run = {"damage": _damage, "goodput": _goodput, "ft-hsdp": _ft_hsdp, "table": _table}[args.command]
    try:
        result = run(args)
    except (PlanError, ValueError, OSError) as error:
        print(f"{args.command}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
