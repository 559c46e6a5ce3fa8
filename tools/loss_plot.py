"""The quickstart's picture: two loss curves, step times, and where ranks were lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display
import matplotlib.pyplot as plt

from tools.training_log import Loss

__all__ = ["draw"]


def draw(
    path: Path,
    undisturbed: Mapping[int, float],
    killed: Mapping[int, float],
    step_seconds: Mapping[int, float],
    losses: Sequence[Loss],
    title: str,
) -> None:
    """Write a PNG: losses above, seconds a step of the killed run below, a line at each lost rank.

    ``undisturbed``, ``killed``: step → loss. ``step_seconds``: step → seconds.
    """
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, height_ratios=(3, 1), layout="constrained")
    above.plot(list(undisturbed), list(undisturbed.values()), color="#9ecae1", linewidth=6, label="undisturbed")
    above.plot(list(killed), list(killed.values()), color="#08306b", linewidth=1.5, label="a worker killed")
    below.bar(list(step_seconds), list(step_seconds.values()), color="#6baed6")
    for loss in losses:
        for axes in (above, below):
            axes.axvline(loss.step, color="#cb181d", linestyle="--", linewidth=1)
        above.annotate(
            f"rank {loss.rank} lost\n({loss.cause})",
            xy=(loss.step, above.get_ylim()[1]),
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
