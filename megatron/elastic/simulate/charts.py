"""Charts of simulator results (matplotlib, PNG or SVG by the file's ending)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.elastic.simulate.goodput import Goodput
from megatron.elastic.simulate.scenarios import ScenarioRow

__all__ = ["draw_goodput", "draw_scenarios", "shares_of_time"]


def draw_scenarios(rows: Sequence[ScenarioRow], path: Path, losses: int = 1) -> None:
    """Relative throughput after ``losses`` spread losses: one group of bars per (DP, PP, layers)."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.scenario.losses == losses and row.scenario.pattern == "spread"]
    series = {
        "elaswave": [row.elaswave for row in shown],
        "elaswave, 1F1B": [row.elaswave_1f1b for row in shown],
        "recycle": [row.peers["recycle"] for row in shown],
        "torchft, batch kept": [row.peers["torchft-batch"] for row in shown],
        "torchft, batch shrinks": [row.peers["torchft"] for row in shown],
    }
    figure = Figure(figsize=(max(8, len(shown) * 0.9), 4.5))
    axes = figure.add_subplot()
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        axes.bar([at + number * width for at in range(len(shown))], values, width, label=name)
    edges = [at - width / 2 for at in range(len(shown))]
    axes.hlines(
        [row.bound for row in shown], edges, [edge + width for edge in edges], "black", linewidth=1.6, label="bound"
    )
    names = [f"{r.scenario.dp}x{r.scenario.pp}\n{r.scenario.layers} layers" for r in shown]
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(shown))], names, fontsize=8)
    axes.set_xlabel("DP x PP")
    axes.axhline(1.0, color="black", linewidth=0.6)
    axes.set_ylabel(f"throughput after {losses} {'loss' if losses == 1 else 'losses'}, before = 1")
    axes.set_ylim(0, 1.12 * max(1.0, *(row.bound for row in shown)))
    axes.legend(fontsize=8, ncols=len(series) + 1, loc="upper center")
    figure.tight_layout()
    figure.savefig(path)


_BELOW = "running below full rate"


def shares_of_time(result: Goodput) -> Mapping[str, float]:
    """Return the shares of wall-clock time, in the order in which they are stacked; they add up to 1."""
    shares = {"effective": max(0.0, result.effective), "redone": result.redone_share, "stalled": result.stall_share}
    return {**shares, _BELOW: max(0.0, 1.0 - sum(shares.values()))}


def draw_goodput(results: Sequence[Goodput], path: Path, title: str = "") -> None:
    """Where the time went, per policy: effective, redone, stalled, running slower than undamaged."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4))
    axes = figure.add_subplot()
    names = [result.policy for result in results]
    base = [0.0] * len(results)
    shares = [shares_of_time(result) for result in results]
    for name in shares[0] if shares else ():
        values = [each[name] for each in shares]
        axes.bar(names, values, bottom=base, label=name, color="lightgrey" if name == _BELOW else None)
        base = [a + b for a, b in zip(base, values, strict=True)]
    axes.set_ylabel("share of wall-clock time")
    axes.set_title(title, fontsize=9)
    axes.tick_params(axis="x", labelsize=7)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
