"""Tables of the page of benchmarks about steps in which nothing fails: what elasticity, watching and messages cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tools.benchmark_tables import Figures, number, spread
from tools.simulation_docs import table

__all__ = ["overhead", "overlap", "step_time", "watching"]

Row = tuple[str, str]
"""A figure's title, and the figure."""
_OF = "(% of a step's CPU time)"


def overhead(figures: Figures) -> str:
    """Shares of a step's CPU time, memory, and the ratio of step times."""
    titles = {
        "ship": "sending reduced gradients to mirrors",
        "checksums": "block checksums",
        "retain": "keeping gradients",
        "replay_mirrored": "updating mirrored blocks",
        "vote": "vote",
        "publish": "publishing activity",
        "total": "all of these",
    }
    rows = _shares(figures, titles)
    if "replaced" in figures:
        rows += [
            (f"plain Megatron's norms and checks of gradients {_OF}", spread(figures["replaced"]["total"], 100)),
            (f"all of these, less that {_OF}", spread(figures["beyond_replaced"], 100)),
        ]
    rows += [
        ("host memory (bytes a parameter)", number(figures["host_bytes_a_parameter"])),
        ("step time with / without", spread(figures["step_ratio"])),
    ]
    tokens = f", {figures['tokens']:,} tokens a step" if "tokens" in figures else ""
    hidden = f", hidden size {figures['hidden']}" if "hidden" in figures else ""
    return f"{figures['ranks']} ranks, one mirror{tokens}{hidden}.\n\n{_table(rows)}"


def watching(figures: Figures) -> str:
    """Shares of a step's CPU time, ratios of whole steps, and times of scrapes."""
    titles = {
        "events": "events of all ranks",
        "scalars": "this project's scalars",
        "scalar_writer": "TensorBoard's thread, for them",
        "published": "the committed step for the launcher (always on)",
        "launcher": "launcher: page, its client, and metrics",
        "total": "all of these",
        "megatron_scalars": "Megatron's own scalars (not counted: plain Megatron writes them too)",
    }
    rows = _shares(figures, titles)
    scrapes = figures["scrape_ms"]
    rows += [
        ("launcher (ms of CPU time a second)", spread(figures["launcher_seconds_a_second"]["with"], 1e3)),
        ("the same, all off", spread(figures["launcher_seconds_a_second"]["without"], 1e3)),
        ("CPU time of a step, on / off", spread(figures["cpu_ratio"])),
        ("step time, on / off", spread(figures["step_ratio"])),
        ("answer to a scrape while the job trains (ms)", spread(scrapes["training"])),
        ("answer to a scrape while a rank is stopped (ms)", spread(scrapes["stopped"])),
    ]
    step = figures["step_seconds"]["without"]["median"]
    of = f"{figures['ranks']} ranks, a step of {number(step)} s"
    return f"{of}.\n\n{_table(rows)}"


def overlap(figures: Figures) -> str:
    """Exposed time of reduce, ship and gather, and the cost of mirrors and votes."""
    titles = {
        "moved_share": "reduce, ship and gather in turn (% of a step)",
        "exposed": "left of their time when they go on behind (%)",
        "elasticity": "step longer than without mirrors and votes (% of a step)",
    }
    rows = [(title, spread(figures[key], 100)) for key, title in titles.items()]
    rows.append(("step time, behind over in turn", spread(figures["step_ratio"])))
    if "kernels" in figures:
        rows.append(("the same where kernels need the processors", number(figures["kernels"]["step_ratio"])))
    parameters = figures["units"] * figures["elements"] / 1e6
    said = f"{figures['ranks']} data-parallel ranks, {parameters:.1f} million parameters, a forward of "
    said += f"{figures['piece_ms']:.0f} ms a piece, {figures['pieces']} pieces a rank and step."
    return f"{said}\n\n{_table(rows)}"


def step_time(figures: Figures) -> str:
    """Step times and their ratios to plain Megatron-LM."""
    ratios = {
        "elastic": "elastic/megatron",
        "elastic_gloo": "elastic_gloo/megatron",
        "elastic_no_mirrors": "elastic_no_mirrors/megatron",
    }
    titles = {
        "megatron": "plain Megatron-LM",
        "elastic": "--elastic",
        "elastic_gloo": "--elastic, gloo",
        "elastic_no_mirrors": "--elastic, no mirrors",
    }
    rows = [
        (
            titles[key],
            spread(times),
            spread(figures["ratio"][ratios[key]]) if key in ratios else "1",
        )
        for key, times in figures["step_ms"].items()
    ]
    return table(("run", "step (ms)", "this / Megatron-LM"), rows)


def _shares(figures: Figures, titles: Mapping[str, str]) -> list[Row]:
    """Shares of a step's CPU time, with these titles."""
    return [(f"{title} {_OF}", spread(figures["share"][key], 100)) for key, title in titles.items()]


def _table(rows: Iterable[Row]) -> str:
    return table(("figure", "median (lowest to highest)"), rows)
