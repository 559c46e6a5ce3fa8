"""The quickstart's picture: two loss curves, step times, and where ranks were lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display
import matplotlib.pyplot as plt

from tools.training_log import Iteration, Loss

__all__ = ["draw"]


def draw(
    path: Path,
    undisturbed: Mapping[int, Iteration],
    killed: Mapping[int, Iteration],
    hit: Mapping[int, Sequence[Loss]],
    title: str,
) -> None:
    """Write a PNG: losses above, seconds a step of the killed run below, a line at each step of ``hit``."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, height_ratios=(3, 1), layout="constrained")
    curves = (("undisturbed", undisturbed, "#9ecae1", 6.0), ("a worker killed", killed, "#08306b", 1.5))
    for label, run, color, width in curves:
        above.plot(list(run), [one.loss for one in run.values()], color=color, linewidth=width, label=label)
    below.bar(list(killed), [one.seconds for one in killed.values()], color="#6baed6")
    # The first step allocates everything: drawn whole it would flatten the others.
    shown = max((one.seconds for step, one in killed.items() if step > min(killed)), default=1.0)
    below.set_ylim(0, 1.1 * shown)
    for step, losses in hit.items():
        for axes in (above, below):
            axes.axvline(step, color="#cb181d", linestyle="--", linewidth=1)
        above.annotate(
            "\n".join(f"rank {loss.rank} lost ({loss.cause})" for loss in losses),
            xy=(step, above.get_ylim()[1]),
            xytext=(4, -4),
            textcoords="offset points",
            va="top",
            color="#cb181d",
        )
    above.set_ylabel("lm loss")
    above.set_title(title)
    above.legend(loc="lower left")
    below.set_ylabel("seconds a step")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)
