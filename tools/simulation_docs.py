"""Figures of docs/simulation.md from the recorded ones, so that none is typed by hand.

    python tools/simulation_docs.py [--measured DIR] [--page PAGE]

``DIR`` is ``docs/measured``, where ``tools.bench.record`` put what ``simulate_table``, ``throughput`` and
``simulator_real`` printed. Between ``<!-- begin NAME -->`` and ``<!-- end -->`` a section is replaced as a whole;
sections of a bench that has not been recorded stay.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megatron.elastic.simulate.__main__ import damage_table
from megatron.elastic.simulate.scenarios import ScenarioRow


def sections_of_table(figures: Mapping[str, Any]) -> dict[str, str]:
    """Sections that ``simulate_table.py`` fills."""
    rows = [ScenarioRow.from_flat(row) for row in figures["rows"]]
    ablation = [(name, f"{value:.3f}") for name, value in figures["ablation"].items()]
    gains = [
        (f"clocks {name}", f"{gain['throughput']:.3f} of all axes, {gain['energy']:.3f} of the energy of a step")
        for name, gain in figures["clocks"].items()
    ]
    found = {
        "summary": summary(rows),
        "damage": f"```\n{damage_table(rows)}\n```",
        "ablation": table(("axes", "throughput"), [*ablation, *gains]),
        "ft-hsdp": goodput(figures["ft_hsdp"]["results"]),
    }
    for name, fleet in figures["fleets"].items():
        text = goodput(fleet["results"])
        found[f"goodput-{name}"] = f"{text}\n\nOne core, {fleet['cpu_s']:.2f} s of CPU for the whole trace."
    return found


def summary(rows: Sequence[ScenarioRow]) -> str:
    """Summary of the damage table, in sentences."""
    shares = {row.scenario: row.elaswave / row.bound for row in rows}
    below = sorted(((share, s) for s, share in shares.items() if share < 0.95), key=lambda found: found[0])
    lines = [
        f"- {len(rows)} scenarios. Share of the bound, all axes: at least 0.95 in {len(rows) - len(below)}, "
        f"{min(shares.values()):.3f} at worst, {median(shares.values()):.3f} in the middle."
    ]
    if below:
        names = ", ".join(
            f"DP {s.dp} x PP {s.pp}, {s.layers} layers, {s.losses} lost {s.pattern} ({share:.3f})" for share, s in below
        )
        lines.append(f"- Below 0.95: {names}.")
    for name, title, paper in (
        ("recycle", "ReCycle", 1.35),
        ("torchft", "TorchFT (batch shrinks)", 1.60),
        ("torchft-batch", "TorchFT (batch kept)", 1.60),
    ):
        ratios = [(row.elaswave / row.peers[name], row.bound / row.peers[name]) for row in rows if row.peers[name]]
        ours = [ratio for ratio, _ in ratios]
        stopped = len(rows) - len(ratios)
        lines.append(
            f"- Against {title}: {min(ours):.2f} to {max(ours):.2f}, median {median(ours):.2f}"
            + (f"; {stopped} scenarios in which it stops" if stopped else "")
            + f". The paper's {paper:.2f} is reached in {sum(r >= paper for r in ours)} of {len(ours)} "
            f"(by DP x PP: {where(rows, name, paper)}); in {sum(limit < paper for _, limit in ratios)} no plan could "
            "(bound / peer is below it)."
        )
    return "\n".join([*lines, barrier(rows), parting(rows)])


def where(rows: Sequence[ScenarioRow], peer: str, paper: float) -> str:
    """Layouts in which elaswave reaches ``paper`` times ``peer``, and how many of their scenarios it survives."""
    reached: dict[tuple[int, int], list[bool]] = {}
    for row in rows:
        if row.peers[peer]:
            layout = row.scenario.dp, row.scenario.pp
            reached.setdefault(layout, []).append(row.elaswave / row.peers[peer] >= paper)
    return ", ".join(
        f"{dp} x {pp}: {sum(hits)} of {len(hits)}" for (dp, pp), hits in sorted(reached.items()) if any(hits)
    )


def barrier(rows: Sequence[ScenarioRow]) -> str:
    """Cost of a barrier between steps for ReCycle's tables and elaswave's, and where the first pass the second."""
    gains = [row.peers["recycle"] / row.peers["recycle-barrier"] for row in rows if row.peers["recycle"]]
    costs = [row.elaswave_staggered / row.elaswave for row in rows if row.elaswave]
    ahead = [row for row in rows if row.peers["recycle"] > row.elaswave]
    found = (
        f"- ReCycle's staggered optimizer is worth {max(gains) - 1:.1%} to it at most, {median(gains) - 1:.1%} in the "
        f"middle; to elaswave's tables it would be {max(costs) - 1:.1%} and {median(costs) - 1:.1%}. "
        f"ReCycle is ahead of elaswave in {len(ahead)} scenarios"
    )
    if not ahead:
        return f"{found}."
    fewest = min(row.scenario.losses / (row.scenario.dp * row.scenario.pp) for row in ahead)
    most = max(row.peers["recycle"] / row.elaswave for row in ahead)
    return f"{found}, by {most - 1:.1%} at most, each with {fewest:.0%} or more of the cells lost."


def parting(rows: Sequence[ScenarioRow]) -> str:
    """Ratio of the policies by number of replicas."""
    ratios = {
        row.scenario.dp: row.elaswave / row.peers["recycle"]
        for row in rows
        if (row.scenario.pp, row.scenario.losses, row.scenario.layers) == (8, 1, 32)
    }
    told = ", ".join(f"{ratio:.2f} (DP {dp})" for dp, ratio in sorted(ratios.items()))
    return f"- Few replicas are where policies part: at PP 8, 32 layers and one loss, elaswave / recycle is {told}."


def goodput(results: Iterable[Mapping[str, Any]]) -> str:
    """Goodput by policy."""
    return table(
        ("policy", "effective", "stalled", "redone", "rate while running", "MJ a step"),
        [
            (
                r["policy"],
                f"{r['effective']:.4f}",
                f"{r['stall_share']:.4f}",
                f"{r['redone_share']:.4f}",
                f"{r['mean_rate']:.3f}",
                f"{r['joules_per_step'] / 1e6:.1f}" if r["effective"] > 1e-4 else "-",
            )
            for r in results
        ],
    )


def emulation(rows: Sequence[Mapping[str, Any]]) -> str:
    """Emulated beside simulated."""
    measured = [row for row in rows if "refused" not in row]
    lines = [
        (
            " ".join(str(row["case"]).split()),
            f"{row['devices']}",
            f"{row['relative']:.3f}",
            f"{row['simulated_relative']:.3f}",
            f"{row['before_s']:.2f} → {row['after_s']:.2f}",
            f"{row['simulated_before_s']:.2f} → {row['simulated_after_s']:.2f}",
            f"{row['dilation']:.2%}",
        )
        for row in measured
    ]
    steps = [abs(error) for row in measured for error in row["errors"][:2]]
    ratios = [abs(row["errors"][2]) for row in measured]
    head = ("case", "processes", "emulated", "simulated", "step (s)", "simulated (s)", "waits longer by")
    return (
        f"{table(head, lines)}\n\n{len(measured)} cases. Simulator against emulation: step time {median(steps):.1%} in "
        f"the middle, {max(steps):.1%} at worst; relative throughput {median(ratios):.1%} and {max(ratios):.1%}."
    )


def real(figures: Mapping[str, Any]) -> str:
    """The simulator beside real training."""
    rows = [
        (
            row["layout"],
            f"{row['measured_ms']:.0f}",
            f"{row['simulated_ms']:.0f}",
            f"{row['error']:+.1%}",
            f"{row['replay_error']:+.1%}",
        )
        for row in figures["rows"]
    ]
    ratio = figures["after_over_before"]
    head = ("layout", "measured (ms)", "simulated (ms)", "error", "replayed")
    return (
        f"{table(head, rows)}\n\nMedian error {figures['median_error']:.1%}, {figures['worst_error']:.1%} at worst; "
        f"replayed {figures['median_replay_error']:.1%}. "
        f"A step after the loss over one before: {ratio['measured']['median']:.2f}, simulated "
        f"{ratio['simulated']['median']:.2f}. {figures['rounds']} rounds."
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def rewritten(page: str, sections: Mapping[str, str]) -> str:
    """``page`` with its marked sections replaced. Raises ``KeyError`` for a section the page has no place for."""
    for name, text in sections.items():
        pattern = re.compile(rf"(<!-- begin {re.escape(name)} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        if not pattern.search(page):
            raise KeyError(f"no section {name!r} in the page")
        page = pattern.sub(lambda found, text=text: found[1] + text + found[2], page)  # type: ignore[misc]
    return page


def sections(measured: Path) -> dict[str, str]:
    """All that the files of the folder ``measured`` tell."""
    known = {path.stem: json.loads(path.read_text()) for path in measured.glob("*.json")}
    found = sections_of_table(known["simulate_table"]) if "simulate_table" in known else {}
    if emulated := [row for name in ("throughput", "throughput_96") for row in known.get(name, {}).get("rows", ())]:
        found["emulation"] = emulation(emulated)
    if "simulator_real" in known:
        found["real"] = real(known["simulator_real"])
    return found


def main() -> None:
    """Read, replace, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measured", type=Path, default=Path("docs/measured"))
    parser.add_argument("--page", type=Path, default=Path("docs/simulation.md"))
    options = parser.parse_args()
    options.page.write_text(rewritten(options.page.read_text(), sections(options.measured)))


if __name__ == "__main__":
    main()
