"""What a training run said: Megatron's log lines, and the events of the elastic runtime.

Idea: judge a run by what any user can see. Losses come from Megatron's own
``iteration N/ M | … lm loss: …`` lines; times of commits and losses of ranks
from the event log (one JSON line an event).

Definition of the time to recover: the gap between the commits before and after
a loss, less the median gap of steps in which nothing was lost. It holds
detection, agreement, repair and any compute done again.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.elastic.observe.events import RankLost, Record, Recovery, Step, read_events

__all__ = [
    "Iteration",
    "Loss",
    "commits",
    "deviation",
    "losses_by_step",
    "losses_of_ranks",
    "lost_steps",
    "parse_iteration",
    "read_run",
    "time_to_recover",
]

_ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+)\s*\|(.*)")
_FIELD = re.compile(r"\s*([^:|]+):\s*([^|]+?)\s*(?:\||$)")


@dataclass(frozen=True)
class Iteration:
    """One of Megatron's log lines. ``seconds``: its "elapsed time per iteration"."""

    step: int
    total: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class Loss:
    """One lost incarnation of a rank; ``wall``: when the first survivor logged it (seconds since 1970)."""

    rank: int
    incarnation: int
    cause: str
    step: int
    wall: float


def parse_iteration(line: str) -> Iteration | None:
    """An iteration line, whatever prefix the launcher gave it; None for any other line."""
    match = _ITERATION.search(line)
    if match is None:
        return None
    fields = {name.strip(): value for name, value in _FIELD.findall(match[3])}
    if "lm loss" not in fields:
        return None
    milliseconds = float(fields.get("elapsed time per iteration (ms)", "nan"))
    return Iteration(int(match[1]), int(match[2]), float(fields["lm loss"]), milliseconds / 1000)


def losses_by_step(lines: Iterable[str]) -> dict[int, float]:
    """Step → loss. Raises ValueError if a step was logged twice with different losses."""
    found: dict[int, float] = {}
    for iteration in filter(None, map(parse_iteration, lines)):
        earlier = found.setdefault(iteration.step, iteration.loss)
        if earlier != iteration.loss:
            raise ValueError(f"step {iteration.step} was logged twice, with losses {earlier} and {iteration.loss}")
    return found


def losses_of_ranks(records: Sequence[Record]) -> list[Loss]:
    """Lost incarnations in order of time, each once however many survivors logged it."""
    found: dict[tuple[int, int], Loss] = {}
    for record in sorted(records, key=lambda one: one.wall):
        event = record.event
        if isinstance(event, RankLost):
            key = (event.lost_rank, event.lost_incarnation)
            found.setdefault(key, Loss(*key, event.cause, event.step, record.wall))
    return list(found.values())


def commits(records: Sequence[Record]) -> dict[int, float]:
    """Step → when the last rank that logged it had committed it (wall seconds)."""
    found: dict[int, float] = {}
    for record in records:
        if isinstance(record.event, Step):
            step = record.event.step
            found[step] = max(found.get(step, record.wall), record.wall)
    return found


def lost_steps(records: Sequence[Record]) -> int:
    """Committed steps that recoveries had to give up, as the recoveries themselves report."""
    by_generation: dict[int, int] = {}
    for record in records:
        if isinstance(record.event, Recovery):
            earlier = by_generation.get(record.generation, 0)
            by_generation[record.generation] = max(earlier, record.event.lost_steps)
    return sum(by_generation.values())


def time_to_recover(records: Sequence[Record]) -> list[float]:
    """Seconds per loss, in order; losses between the same two commits count once.

    Raises ValueError if no step without a loss is there to compare with, or none was committed after a loss.
    """
    times = sorted(commits(records).items())
    walls = sorted(loss.wall for loss in losses_of_ranks(records))
    hit: list[float] = []
    quiet: list[float] = []
    for (_, before), (_, after) in itertools.pairwise(times):
        (hit if any(before <= wall <= after for wall in walls) else quiet).append(after - before)
    if not quiet:
        raise ValueError("no step without a loss in the event log: nothing to compare with")
    if walls and not hit:
        raise ValueError("no step was committed after the loss")
    normal = statistics.median(quiet)
    return [gap - normal for gap in hit]


def deviation(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Largest relative difference of two loss curves. Raises ValueError if they have not the same steps."""
    if one.keys() != other.keys():
        missing = sorted(one.keys() ^ other.keys())
        raise ValueError(f"the runs have not logged the same steps: {missing[:10]}")
    return max((abs(one[step] - other[step]) / abs(other[step]) for step in one), default=0.0)


def read_run(folder: Path) -> tuple[dict[int, float], list[Record]]:
    """(losses by step, events) of a run that wrote ``log.txt`` and ``events/`` into ``folder``."""
    with open(folder / "log.txt", encoding="utf-8", errors="replace") as lines:
        losses = losses_by_step(lines)
    return losses, read_events(folder / "events")
