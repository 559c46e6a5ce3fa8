"""Tables and picture of the benchmark beside peers, from its recorded figures.

A time that a contender did not reach is written as "no", with its own words in a table of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.benchmark_tables import number, spread
from tools.simulation_docs import table

__all__ = ["peers", "picture", "readme"]

Figures = Mapping[str, Any]
FAULTS = {
    "kill": "one rank killed",
    "stay": "one rank killed, not started again",
    "rank0": "rank 0 killed",
    "two": "two ranks killed at once",
    "stop": "one rank stopped (SIGSTOP)",
    "coordinator": "coordinator killed",
}


def measured(figures: Figures | None) -> str:
    """The median with its extremes; a dash for what was not measured."""
    return "-" if figures is None else spread(figures)


def share(value: float | None) -> str:
    """A share as a percentage; a dash for what was not measured."""
    return "-" if value is None else f"{value:.0%}"


def recovery_of(row: Figures, fault: str) -> str:
    """Seconds to recover from ``fault``; "no" where it did not recover in any trial, a dash where it was not run."""
    figures = row["faults"].get(fault)
    if figures is None:
        return "-"
    if not figures["recovered"]:
        return "no"
    reached = "" if figures["recovered"] == figures["trials"] else f" ({figures['recovered']} of {figures['trials']})"
    return spread(figures["mttr_s"]) + reached


def peers(figures: Figures) -> str:
    """Times to recover by fault, figures of one rank killed, words of those that do not recover."""
    rows = list(figures["contenders"].values())
    times = table(
        ("contender", *FAULTS.values()),
        ((row["title"], *(recovery_of(row, fault) for fault in FAULTS)) for row in rows),
    )
    parts = [
        "Seconds from the signal until each survivor has committed a step, less a normal step:",
        times,
        "One rank killed (for contenders without its return: not started again):",
        table(KILL_HEAD, (kill_row(row) for row in rows if first_fault(row))),
        "What contenders print or do where they do not recover (last line that tells of it):",
        table(("contender", "fault", "last line"), words(rows)),
        notes(figures),
        *(layout_part(layout) for layout in figures.get("layouts", {}).values()),
        *([later_runs(figures["later"])] if figures.get("later") else []),
    ]
    return "\n\n".join(parts)


LAYOUT_HEAD = (
    "contender",
    "one rank killed (s)",
    "not started again (s)",
    "batch kept",
    "samples lost",
    "steps undone",
    "whole after (s)",
    "largest deviation of the loss",
    "what it says of a lost rank here",
)


def layout_part(layout: Figures) -> str:
    """The table of one layout, the words of those that do not recover, and the ratio to the quickest peer."""
    rows = [row for row in layout["contenders"].values() if row["faults"]]
    measured_at = [fault["at"] for row in rows for fault in row["faults"].values() if fault["at"]]
    loads = [fault["load"] for row in rows for fault in row["faults"].values()]
    head = f"**{layout['title'].capitalize()}**, the last rank killed"
    if measured_at:
        head += f" (measured from {min(measured_at)} to {max(measured_at)}, load {min(loads)} to {max(loads)})"
    said = list(words(rows))
    return "\n\n".join(
        [
            f"{head}. Ranks that a contender gives up with the lost one count as lost:",
            table(LAYOUT_HEAD, (layout_row(row) for row in rows)),
            *([table(("contender", "fault", "last line"), said)] if said else []),
            "\n".join(ratios(layout)),
        ]
    )


def layout_row(row: Figures) -> tuple[str, ...]:
    """Figures of a killed rank under one layout: of counts and deviations the worst of both faults."""
    first, faults = first_fault(row), list(row["faults"].values())
    assert first is not None
    kept = [fault["batch_kept"] for fault in faults if fault["batch_kept"] is not None]
    deviations = [fault["loss_deviation"] for fault in faults if fault["loss_deviation"] is not None]
    return (
        row["title"],
        recovery_of(row, "kill"),
        recovery_of(row, "stay"),
        share(min(kept, default=None)),
        f"{max(fault['rows_lost'] for fault in faults)}",
        f"{max(fault['steps_undone'] for fault in faults)}",
        measured(first["whole_after_s"]),
        number(max(deviations)) if deviations else "-",
        row["of_layouts"] or "-",
    )


def later_runs(runs: list[Figures]) -> str:
    """The runs whose figures took the place of earlier ones, or were added."""
    lines = (
        f"- `{run['command']}`: {run['trials_done']} of {run['trials_asked']} jobs, {run['trial_s'] / 60:.0f} minutes, "
        f"load {run['machine']['load']} at its end"
        for run in runs
    )
    return "Parts measured later than the rest:\n\n" + "\n".join(lines)


KILL_HEAD = (
    "contender",
    "steady overhead",
    "batch kept",
    "samples lost",
    "steps undone",
    "attempts discarded",
    "whole after (s)",
    "members wait for the return (s)",
    "throughput with a rank missing",
    "largest deviation of the loss",
)


def first_fault(row: Figures) -> Figures | None:
    """The figures of the row under 'kill', else under 'stay'."""
    found: Figures | None = row["faults"].get("kill", row["faults"].get("stay"))
    return found


def kill_row(row: Figures) -> tuple[str, ...]:
    """Figures of one rank killed."""
    kill = first_fault(row)
    assert kill is not None
    missing = row["faults"].get("stay", {}).get("throughput_without")
    overhead = row["overhead"]
    deviation = kill["loss_deviation"]
    return (
        row["title"],
        "-" if overhead is None else spread(overhead, 100) + "%",
        share(kill["batch_kept"]),
        f"{kill['rows_lost']}",
        f"{kill['steps_undone']}",
        f"{kill['steps_discarded']}",
        measured(kill["whole_after_s"]),
        measured(kill["rejoin_stall_s"]),
        "-" if missing is None else share(missing["median"]),
        "-" if deviation is None else number(deviation),
    )


def words(rows: list[Figures]) -> Iterator[tuple[str, str, str]]:
    """The words of contenders that did not recover; what happens to those that are ended without a word."""
    for row in rows:
        for fault, figures in row["faults"].items():
            if figures["recovered"] < figures["trials"]:
                what = FAULTS[fault] + (f": {row['coordinator']}" if fault == "coordinator" else "")
                said = figures["words"].replace("|", "\\|").replace("`", "'")
                told = row.get("without_coordinator", "") if fault == "coordinator" else ""
                yield row["title"], what, told or (f"`{said}`" if said else "(nothing)")


def notes(figures: Figures) -> str:
    """What is alike and what is not, versions, the ratio to the quickest peer."""
    lines = [f"- {row['title']}: {row['caveats']}." for row in figures["contenders"].values() if row["caveats"]]
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    lines += ratios(figures)
    minutes = figures["trial_s"] / 60
    done = f"{figures['trials_done']} of {figures['trials_asked']} jobs were run, in {minutes:.0f} minutes"
    return f"{versions}. {done}; a dash stands for what was not. {ALIKE}\n\n" + "\n".join(lines)


def ratios(figures: Figures) -> Iterator[str]:
    """A line for each fault: this runtime and the quickest peer."""
    for fault, best in figures["best_mttr_s"].items():
        which = figures["contenders"][best["which"]]["title"]
        line = (
            f"- {FAULTS[fault]}: {number(best['ours'])} s here, {number(best['peer'])} s for the quickest peer, {which}"
        )
        if best["ours"] > 0:
            line += f": {number(best['times'])} times"
        if best.get("tuned", 0) > 0:
            line += f" (tuned: {number(best['tuned'])} s, {number(best['times_tuned'])} times)"
        yield f"{line}."


ALIKE = (
    "All train a GPT of the same shape on the same samples in the same order, fp32, on four data-parallel processes of "
    "one machine. They are not alike in this: megatron-elastic runs Megatron-LM's model in micro-batches of 2 and with "
    "other initial weights; peers run a plain torch model with all samples of a rank at once, and have a shorter step. "
    "Checkpoints of torchrun, ft_launcher and the in-process restart lie in memory. Processes share the cores, so a "
    "missing rank frees a part of a core for the others: throughput with a rank missing is no figure for accelerators. "
    "Under tensor parallelism peers cut each layer as Megatron-LM does, but each rank has the whole embedding; under "
    "pipeline parallelism they compute four micro-batches. "
    "Signals come from outside."
)


def readme(figures: Figures) -> str:
    """The first table of the project: seconds until all survivors have committed a step, and what is left."""
    rows = []
    for row in figures["contenders"].values():
        kill = first_fault(row)
        if kill is None:
            continue
        kept = "same batch" if kill["batch_kept"] == 1 else f"the batch shrinks to {share(kill['batch_kept'])}"
        rows.append(
            (
                row["title"],
                recovery_of(row, "kill" if "kill" in row["faults"] else "stay"),
                recovery_of(row, "rank0"),
                f"{kept}, {kill['rows_lost']} samples lost, {kill['steps_undone']} steps undone"
                + (f"; {row['caveats']}" if row["caveats"] else ""),
            )
        )
    return table(("runtime", "one rank killed (s)", "rank 0 killed (s)", "after one rank is killed"), rows)


def picture(figures: Figures, path: Path) -> None:
    """Draw times to recover after one rank is killed, on a logarithmic axis, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "peers"  # the same ids, so the same file, each time
    from matplotlib import pyplot

    found = {}
    for row in figures["contenders"].values():
        kill = first_fault(row)
        if kill is not None and kill["mttr_s"] is not None:
            found[row["title"]] = kill["mttr_s"]
    drawing, axes = pyplot.subplots(figsize=(7.5, 0.4 * len(found) + 1), layout="constrained")
    names, middle = list(found), [one["median"] for one in found.values()]
    below = [one["median"] - one["low"] for one in found.values()]
    above = [one["high"] - one["median"] for one in found.values()]
    colors = ["#2a7de1" if name.startswith("megatron-elastic") else "#999999" for name in names]
    axes.barh(names, middle, xerr=[below, above], color=colors, capsize=2)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("seconds to recover from the kill of one rank, beyond a normal step (logarithmic)")
    drawing.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(drawing)
