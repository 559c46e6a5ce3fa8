"""Tables of the page of benchmarks: one function a benchmark, from its recorded figures to Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from tools.simulation_docs import table

Figures = Mapping[str, Any]
MIB = 1 << 20


def number(value: float) -> str:
    """``value`` with three significant digits, never in scientific notation."""
    if value == 0:
        return "0"
    digits = f"{value:.3g}"
    return digits if "e" not in digits else f"{value:.0f}" if abs(value) >= 1 else f"{value:.1e}"


def spread(figures: Figures, scale: float = 1.0) -> str:
    """``median (lowest to highest)`` of a measurement, each times ``scale``."""
    middle, low, high = (number(figures[key] * scale) for key in ("median", "low", "high"))
    return middle if low == high else f"{middle} ({low} to {high})"


def ratio_of(mine: float, peer: float) -> str:
    """The figure of the ``peer`` as a multiple of ``mine``."""
    return f"{number(peer / mine)}×"


def recovery(figures: Figures) -> str:
    """Overhead, detection and phases, by signal and communicator."""
    rows = []
    for signal, title in (("kill", "SIGKILL"), ("stop", "SIGSTOP")):
        peer = figures[signal]["gloo"]["overhead_s"]["median"]
        for comm, run in figures[signal].items():
            phases = ", ".join(number(run["phases_s"][name] * 1e3) for name in ("decide", "edit", "plan", "settle"))
            rows.append(
                (
                    title,
                    comm,
                    spread(run["overhead_s"]),
                    number(run["normal_step_s"]),
                    spread(run["detect_s"]),
                    phases,
                    f"{run['state_bytes_beside_the_step']}",
                    f"{run['lost_steps']}",
                    ratio_of(run["overhead_s"]["median"], peer),
                )
            )
    head = (
        "signal",
        "communicator",
        "overhead (s)",
        "normal step (s)",
        "detected after (s)",
        "decide, edit, plan, settle (ms)",
        "bytes of new copies received beside the step",
        "steps lost",
        "gloo / this",
    )
    return table(head, rows)


def experts(figures: Figures) -> str:
    """Times of the dense model and of the mixture, rates after a loss, and the share of the time that trains."""
    named = (
        ("normal step (s)", "normal_step_s"),
        ("signal until survivors go on (s)", "recovering_s"),
        ("overhead of a loss (s)", "overhead_s"),
        ("signal until the next committed step (s)", "recover_s"),
        ("signal until the rank takes part again (s)", "absent_s"),
        ("longer step in which it is back (s)", "returning_s"),
    )
    dense, mixture = figures["dense"], figures["experts"]
    rows = [
        (title, *(number(run[name]) if name == "normal_step_s" else spread(run[name]) for run in (dense, mixture)))
        for title, name in named
    ]
    ratios = f"Mixture over dense: until survivors go on {number(figures['recovering_ratio'])}, overhead "
    ratios += f"{number(figures['overhead_ratio'])}, until the next committed step {number(figures['recover_ratio'])}. "
    ratios += f"Share of the time that trains: {figures['ettr']:.4f}."
    rates = [(crews, number(rate["kept"]), number(rate["crew_dropped"])) for crews, rate in figures["rates"].items()]
    head = ("after one loss of 8", "rate kept", "rate where the crew's replicas are dropped")
    return "\n\n".join((table(("", "dense", "mixture of experts"), rows), ratios, table(head, rates)))


def rejoin(figures: Figures) -> str:
    """Admission, waits and background copies of a rank that comes back."""
    named = (
        ("normal step (s)", "step", 1.0),
        ("ready until it takes part (s)", "admission", 1.0),
        ("of that, the rest of the step under way (s)", "boundary", 1.0),
        ("wait of the slowest member for the admission (% of a step)", "stall_of_step", 100.0),
        ("the same, mean over members (% of a step)", "stall_mean_of_step", 100.0),
        ("wait where the copies begin to count (% of a step)", "switch_of_step", 100.0),
        ("step that begins with the admission, longer by (% of a step)", "longer_of_step", 100.0),
        ("copies of state made in the background (s)", "background", 1.0),
        ("links opened in the admission", "links_opened", 1.0),
        ("links opened ahead of it", "links_ahead", 1.0),
    )
    return table(("figure", "median (lowest to highest)"), ((t, spread(figures[k], s)) for t, k, s in named))


def migrate(figures: Figures) -> str:
    """Time exposed by layers that move, by ownership and way."""
    rows = []
    for ownership in ("interleaved", "contiguous"):
        blocking = figures[f"{ownership}_blocking"]["exposed"]["median"]
        for way in ("background", "blocking"):
            run = figures[f"{ownership}_{way}"]
            rows.append(
                (
                    ownership,
                    way,
                    number(run["busiest_bytes"]["median"] / 1e6),
                    spread(run["share"]),
                    spread(run["stall"]),
                    spread(run["step"]),
                    ratio_of(run["exposed"]["median"], blocking) if run["exposed"]["median"] > 0 else "-",
                )
            )
    head = (
        "ownership",
        "migration",
        "MB to the busiest rank",
        "exposed (share of the bytes' time on an idle link)",
        "wait of the slowest rank (s)",
        "quiet step (s)",
        "blocking / this",
    )
    return table(head, rows)


def reshape(figures: Figures) -> str:
    """Cost of each change of sizes, its bytes, and the time of a restart."""
    head = (
        "change",
        "MB to all ranks",
        "exposed (s)",
        "exposed (share of the bytes' time on an idle link)",
        "wait of the slowest rank (s)",
        "quiet step before (s)",
        "restart (s)",
        "restart / exposed",
    )
    rows = [
        (
            change,
            number(run["bytes"]["median"] / 1e6),
            spread(run["exposed"]),
            spread(run["share"]),
            spread(run["stall"]),
            spread(run["step"]),
            spread(run["restart"]),
            ratio_of(run["exposed"]["median"], run["restart"]["median"]) if run["exposed"]["median"] > 0 else "-",
        )
        for change, run in figures["changes"].items()
    ]
    return table(head, rows)


def checkpoint(figures: Figures) -> str:
    """Waits for a save, beside plain Megatron-LM."""
    peer = figures["stall_megatron_s"]["median"]
    rows = [
        (
            title,
            spread(figures[f"stall_{way}_s"]),
            spread(figures[f"drag_{way}_s"]),
            spread(figures[f"step_{step}_s"]),
            ratio_of(figures[f"stall_{way}_s"]["median"], peer),
        )
        for title, way, step in (
            ("written in the background (default)", "background", "elastic"),
            ("finished before the next step", "blocking", "elastic"),
            ("plain Megatron-LM", "megatron", "megatron"),
        )
    ]
    head = ("save", "next step waits (s)", "later steps longer by (s)", "step (s)", "Megatron-LM / this")
    return f"{figures['state_mib']:.0f} MiB of state on {figures['ranks']} ranks.\n\n{table(head, rows)}"


def exact(figures: Figures) -> str:
    """Time of a step in both modes, and what exact mode multiplies it by, by model."""
    rows = [
        (
            case["case"],
            f"{case['ranks']}",
            *(spread(case["step_seconds"][mode], 1e3) for mode in ("default", "exact")),
            spread(case["ratio"]["step"]),
            spread(case["ratio"]["cpu"]),
        )
        for case in figures["cases"]
    ]
    head = ("model", "ranks", "default (ms)", "exact (ms)", "exact / default", "processor time, exact / default")
    return table(head, rows)


def consistency(figures: Figures) -> str:
    """Relative deviation of the loss after a loss of a rank, by mode."""
    titles = {
        "default": "--elastic",
        "exact": "--elastic-exact",
        "restarted": f"plain Megatron-LM restarted with {figures['naive_ranks']} ranks, same global batch",
        "smaller": "--elastic-policy torchft (the batch shrinks)",
    }
    rows = [
        (t, number(figures["deviation"][k]["largest"]), number(figures["deviation"][k]["mean"]))
        for k, t in titles.items()
    ]
    return (
        f"{figures['ranks']} data-parallel ranks, one rank killed in step {figures['at']} of {figures['steps']}. "
        f"Tensors of the last checkpoint that differ in exact mode: {figures['exact_tensors_that_differ']}.\n\n"
        f"{table(('run', 'largest deviation', 'mean deviation'), rows)}"
    )


def dropout(figures: Figures) -> str:
    """Time an element and ratios to torch, by tensor and type."""
    rows = [
        (
            case["site"],
            case["dtype"],
            f"{case['dropout']['ours_ns']:.2f}, {case['dropout']['torch_ns']:.2f}",
            f"{case['dropout']['ratio']:.2f}",
            f"{case['dropout_add']['ratio']:.2f}",
            f"{case['backward']['ratio']:.2f}",
        )
        for case in figures["cases"]
    ]
    head = (
        "tensor",
        "type",
        "ns an element (this, torch)",
        "torch / this: dropout",
        "dropout and add",
        "kept mask / this: backward",
    )
    return f"p = {figures['p']}, {figures['threads']} thread, {figures['instructions']}.\n\n{table(head, rows)}"


def comm(figures: Figures) -> str:
    """Ratios to gloo, by collective, kind of link and number of ranks."""
    found: dict[tuple[str, str, int], dict[int, float]] = {}
    for case in figures["cases"]:
        if case["kind"] != "gloo":
            key = case["operation"], case["kind"], case["ranks"]
            found.setdefault(key, {})[case["size"]] = case["times_gloo"]
    sizes = [1024, 16 * MIB, 64 * MIB, 256 * MIB]
    ranks = sorted({key[2] for key in found})
    rows = [
        (
            operation.replace("_", "-"),
            kind,
            *(", ".join(number(found[operation, kind, n][size]) for size in sizes) for n in ranks),
        )
        for operation, kind in sorted({key[:2] for key in found})
    ]
    least = min(value for cases in found.values() for value in cases.values())
    return (
        "Time of gloo over time of this, at 1 KiB, 16 MiB, 64 MiB and 256 MiB. Lowest ratio of all recorded sizes: "
        f"{number(least)}. Copy bandwidth of the machine: {figures['copy_gb_s']:.1f} GB/s.\n\n"
        f"{table(('collective', 'links', *(f'{n} ranks' for n in ranks)), rows)}"
    )


def edit(figures: Figures) -> str:
    """Phases of an edit and ratios to the rebuilds, by number of processes."""
    rows = []
    for processes, ways in figures["by_processes"].items():
        mine, faster = ways["native"], ways["native_is_faster"]
        rows.append(
            (
                processes,
                f"{ways['groups']['made']}",
                spread(mine["edit"], 1e3),
                f"{number(mine['edit_slowest']['median'] * 1e3)}, {number(mine['edit_middle']['median'] * 1e3)}",
                number(mine["edit_cpu"]["median"] * 1e3),
                ", ".join(number(mine[phase]["median"] * 1e3) for phase in ("agree", "abort", "first")),
                number(ways["full"]["edit"]["median"]),
                ", ".join(f"{number(faster[way])}×" if way in faster else "-" for way in ("full", "partial", "gloo")),
            )
        )
    head = (
        "processes",
        "groups",
        "edit, first rank's begin to last rank's end (ms)",
        "slowest, middle rank (ms)",
        "CPU of one rank (ms)",
        "agree, abort, first collective (ms)",
        "full rebuild with torch and gloo (s)",
        "full rebuild, partial rebuild, --elastic-comm gloo / this",
    )
    return table(head, rows)


def movement(figures: Figures) -> str:
    """Blocks moved by random changes, and by one layer."""
    changes = (
        ("blocks moved before the next step", figures["blocks_before_next_step"]),
        ("blocks moved in the background / lower bound", number(figures["ratio_to_bound"])),
        (
            "blocks moved / contiguous ranges (Megatron's)",
            number(figures["blocks_moved"] / figures["blocks_moved_contiguous"]),
        ),
        ("most owners of a unit less fewest (blocks)", figures["max_minus_min_in_a_unit"]),
        ("held over the mean, fullest rank (%)", number(figures["held_over_mean"] * 100)),
        ("owned over the mean, fullest rank (%)", number(figures["owned_over_mean"] * 100)),
        ("mirrored over the mean, fullest rank (%)", number(figures["mirrored_over_mean"] * 100)),
    )
    layers = [
        (
            f"{row['data']}",
            f"{row['mirrors']}",
            busiest(row["interleaved"]),
            busiest(row["contiguous"]),
            f"{row['saved']:.0%}",
        )
        for row in figures["layer_moves"]
    ]
    return (
        f"{figures['changes']:,} random losses and returns among {figures['ranks']} ranks, {figures['units']} units of "
        f"{figures['blocks']} blocks, {figures['mirrors']} mirror.\n\n"
        + table(("figure", "value"), ((title, f"{value}") for title, value in changes))
        + "\n\nOne layer that moves to another stage: blocks that the busiest rank sends or receives.\n\n"
        + table(("ranks of a stage", "mirrors", "interleaved", "contiguous", "saved"), layers)
    )


def busiest(blocks: Figures) -> str:
    """The blocks of the busiest rank, sent or received, whichever is more."""
    return f"{max(blocks['busiest_sends'], blocks['busiest_receives'])}"


def planner(figures: Figures) -> str:
    """CPU time of decisions and tables, by number of cells."""
    rows = [
        (
            f"{row['cells']:,}",
            f"{row['lost']}",
            number(row["decision_s"] * 1e3),
            number(row["decision_split_s"] * 1e3),
            number(row["local_tables_s"] * 1e3),
            number(row["instant_plan_s"] * 1e3) if "instant_plan_s" in row else "-",
        )
        for row in figures["rows"]
    ]
    damage = figures["damage_table"]
    head = (
        "cells",
        "lost",
        "decision (ms)",
        "with split backward (ms)",
        "a pipeline's tables (ms)",
        "instant plan (ms)",
    )
    return (
        f"{table(head, rows)}\n\nDecisions for the {damage['scenarios']} damages of the simulator's table: "
        f"{damage['median_s'] * 1e3:.0f} ms (median), {damage['worst_s'] * 1e3:.0f} ms (worst)."
    )


def agreement(figures: Figures) -> str:
    """CPU time of a survivor's work at a loss, by job."""
    parts = ("reports_s", "promotion_s", "plan_s", "certificate_s")
    rows = [
        (
            f"{row['model']}, {row['layout'].replace(' x ', ' × ')}",
            f"{row['ranks']:,}",
            f"{row['blocks']:,}",
            *(number(row[part] * 1e3) for part in parts),
            number(sum(row[part] for part in parts) * 1e3),
            number(row["balance_s"] * 1e3),
            number(row["vote_s"] * 1e3),
        )
        for row in figures["rows"]
    ]
    head = ("job", "ranks", "blocks", "reports (ms)", "promotion (ms)", "plan (ms)", "certificate (ms)", "in all (ms)")
    return table((*head, "balanced placement (ms)", "vote (ms)"), rows)


def journal(figures: Figures) -> str:
    """The first agent's work at a loss, by number of nodes and the way to the journal."""
    ways = ("alone", "joint")
    names = ("processor time of the first agent (s)", "all have read (s)", "entries")
    heads = ("nodes", *(f"{name}, {way}" for name in names for way in ways))
    rows = [
        (f"{row['nodes']}", *(number(row[way][key]) for key in ("server_s", "all_s", "entries") for way in ways))
        for row in figures["rows"]
    ]
    return table(heads, rows)


def protection(figures: Figures) -> str:
    """Seconds and steps with fewer mirrors than asked for."""
    named = (("seconds until the vote that names the last missing copy", "s"), ("steps committed until then", "steps"))
    rows = [(title, number(figures[f"median_{unit}"]), number(figures[f"worst_{unit}"])) for title, unit in named]
    return table(("figure", "median", "worst"), rows)


def simulator_error(figures: Figures) -> str:
    """Error of the simulator against timed waits, by plan."""
    rows = [(row["case"], f"{row['error']:.1%}", f"{row['dilation']:.1%}") for row in figures["rows"]]
    return (
        f"{table(('plan', 'error', 'waits longer by'), rows)}\n\nError: {figures['median_error']:.1%} (median), "
        f"{figures['worst_error']:.1%} (worst)."
    )


def simulator_real(figures: Figures) -> str:
    """Error of the simulator against training."""
    return (
        f"Error: {figures['median_error']:.1%} (median), {figures['worst_error']:.1%} (worst), over "
        f"{len(figures['rows'])} layouts: [simulation.md](simulation.md)."
    )


def simulate_table(figures: Figures) -> str:
    """Ratios of simulated throughput, by policy."""
    rows = [
        (policy, *(number(ratios[key]) for key in ("least", "median", "most")), f"{ratios['stopped']}")
        for policy, ratios in figures["damage"].items()
        if isinstance(ratios, dict) and "median" in ratios and "stopped" in ratios
    ]
    head = ("policy", "elaswave / it: least", "median", "most", "scenarios in which it stops")
    return f"{len(figures['rows'])} scenarios: [simulation.md](simulation.md).\n\n{table(head, rows)}"


def nonuniform(figures: Figures) -> str:
    """Loss of each way, by the share of devices that have failed."""
    shares = sorted({row["failed"] for row in figures["rows"]})
    lost = {(row["way"], row["failed"]): row["mean_lost"] for row in figures["rows"]}
    limit = {row["way"]: row["published"] for row in figures["rows"]}
    rows = [
        (way, *(f"{lost[way, share]:.2%}" for share in shares), "-" if published is None else f"{published:.0%}")
        for way, published in limit.items()
    ]
    return table(("way", *(f"{share:.1%} failed" for share in shares), "limit"), rows)


def throughput(figures: Figures) -> str:
    """Emulated and simulated throughput after a loss, by case."""
    measured = [row for row in figures["rows"] if "refused" not in row]
    rows = [
        (
            " ".join(row["case"].split()),
            f"{row['devices']}",
            f"{row['relative']:.3f}",
            f"{row['simulated_relative']:.3f}",
        )
        for row in measured
    ]
    errors = [abs(row["errors"][2]) for row in measured]
    return (
        f"{table(('case', 'processes', 'emulated', 'simulated'), rows)}\n\n"
        f"Error of the simulated ratio: {median(errors):.1%} (median), {max(errors):.1%} (worst)."
    )


def readability(figures: Figures) -> str:
    """Figures of the code, a column a checkout."""
    checkouts = figures["checkouts"]
    names = list(next(iter(checkouts.values())))
    shares = {"annotated_arguments", "documented_public_functions", "sentences_against_the_style"}
    rows = [
        (
            name.replace("_", " "),
            *(f"{one[name]:.1%}" if name in shares else f"{one[name]:,g}" for one in checkouts.values()),
        )
        for name in names
    ]
    heads = [f"{name} ({commit})" if commit else name for name, commit in figures["commits"].items()]
    return table(("figure", *heads), rows)
