"""Output of a training run: Megatron's log lines, and the events of the elastic runtime.

Idea: judge a run by output that any user can see. Losses and step times come from
Megatron's own ``iteration N/ M | … lm loss: …`` lines, lost ranks from the event
log (one JSON line an event).

Definition of the time to recover: Megatron's "elapsed time" of the iteration in
which a rank was lost, less the median of the iterations in which none was. It
holds detection, agreement, repair and any compute done again.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from megatron.elastic.observe.event_kinds import RankLostEvent, RecoveryEvent
from megatron.elastic.observe.events import EventRecord, read_events

__all__ = [
    "Iteration",
    "Loss",
    "deviation",
    "excerpt",
    "iterations_of",
    "losses_of_ranks",
    "lost_steps",
    "parse_iteration",
    "read_run",
    "steps_hit",
    "time_to_recover",
]

_ITERATION = re.compile(r"(?:\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)\] )?\s*iteration\s+(\d+)/\s*(\d+)\s*\|(.*)")
_COLUMNS = ("consumed samples", "elapsed time per iteration (ms)", "lm loss", "grad norm")
_FIELD = re.compile(r"\s*([^:|]+):\s*([^|]+?)\s*(?:\||$)")
_TOLD = ("recovered ", "mirrors complete ", "injected ", "[launch] lost ")


@dataclass(frozen=True)
class Iteration:
    """One of Megatron's log lines, with log interval 1.

    ``seconds``: its "elapsed time per iteration"; ``wall``: when it was logged (seconds since 1970); NaN if not given.
    """

    step: int
    total: int
    loss: float
    seconds: float = math.nan
    wall: float = math.nan


@dataclass(frozen=True)
class Loss:
    """One lost incarnation of a rank; ``wall``: when the first survivor logged it (seconds since 1970)."""

    rank: int
    incarnation: int
    cause: str
    wall: float


def parse_iteration(line: str) -> Iteration | None:
    """An iteration line, whatever prefix the launcher gave it; None for any other line."""
    match = _ITERATION.search(line)
    if match is None:
        return None
    fields = {name.strip(): value for name, value in _FIELD.findall(match[4])}
    if "lm loss" not in fields:
        return None
    seconds = float(fields.get("elapsed time per iteration (ms)", "nan")) / 1000
    wall = datetime.fromisoformat(match[1]).timestamp() if match[1] else math.nan
    return Iteration(int(match[2]), int(match[3]), float(fields["lm loss"]), seconds, wall)


def _shortened(line: str) -> str | None:
    """An iteration line with four of its columns, a line on a loss as it is, None for all others."""
    match = _ITERATION.search(line)
    if match is not None:
        fields = {name.strip(): value for name, value in _FIELD.findall(match[4])}
        kept = [f"{name}: {fields[name]:>6}" for name in _COLUMNS if name in fields]
        return " | ".join([f"iteration {match[2]:>4}/{match[3]:>4}", *kept]) if kept else None
    text = line.strip()
    return text if text.startswith(_TOLD) else None


def excerpt(lines: Iterable[str], count: int = 12) -> list[str]:
    """The ``count`` lines around the first loss, two iterations before it; columns of iteration lines are left out."""
    short = [text for text in map(_shortened, lines) if text is not None]
    loss = next((index for index, text in enumerate(short) if not text.startswith("iteration")), 0)
    return short[max(0, loss - 2) :][:count]


def iterations_of(lines: Iterable[str]) -> dict[int, Iteration]:
    """Step → its line. Raises ValueError if a step was logged twice with different losses."""
    found: dict[int, Iteration] = {}
    for iteration in filter(None, map(parse_iteration, lines)):
        earlier = found.setdefault(iteration.step, iteration)
        if earlier.loss != iteration.loss:
            raise ValueError(f"step {iteration.step} was logged twice, with losses {earlier.loss} and {iteration.loss}")
    return found


def losses_of_ranks(records: Sequence[EventRecord]) -> list[Loss]:
    """Lost incarnations in order of time, each once however many survivors logged it."""
    found: dict[tuple[int, int], Loss] = {}
    for record in sorted(records, key=lambda one: one.wall):
        event = record.event
        if isinstance(event, RankLostEvent):
            key = (event.lost_rank, event.lost_incarnation)
            found.setdefault(key, Loss(*key, event.cause, record.wall))
    return list(found.values())


def lost_steps(records: Sequence[EventRecord]) -> int:
    """Committed steps that recoveries had to give up, as the recoveries themselves report."""
    by_generation: dict[int, int] = {}
    for record in records:
        if isinstance(record.event, RecoveryEvent):
            earlier = by_generation.get(record.generation, 0)
            by_generation[record.generation] = max(earlier, record.event.lost_steps)
    return sum(by_generation.values())


def steps_hit(iterations: Mapping[int, Iteration], losses: Sequence[Loss]) -> dict[int, list[Loss]]:
    """Step → the losses that came while it ran. Raises ValueError for a loss after the last logged step."""
    hit: dict[int, list[Loss]] = {}
    for loss in losses:
        later = [step for step, iteration in iterations.items() if iteration.wall >= loss.wall]
        if not later:
            raise ValueError(f"no step was committed after rank {loss.rank} was lost")
        hit.setdefault(min(later), []).append(loss)
    return hit


def time_to_recover(iterations: Mapping[int, Iteration], losses: Sequence[Loss]) -> list[float]:
    """Seconds for each step that was hit, in order; losses within one step count once.

    Raises ValueError if every step was hit: there is nothing to compare with.
    """
    hit = steps_hit(iterations, losses)
    quiet = [iteration.seconds for step, iteration in iterations.items() if step not in hit]
    if not quiet:
        raise ValueError("no step without a loss in the log: nothing to compare with")
    normal = statistics.median(quiet)
    return [iterations[step].seconds - normal for step in sorted(hit)]


def deviation(one: Mapping[int, Iteration], other: Mapping[int, Iteration]) -> float:
    """Largest relative difference of two loss curves. Raises ValueError if they have not the same steps."""
    if one.keys() != other.keys():
        missing = sorted(one.keys() ^ other.keys())
        raise ValueError(f"the runs have not logged the same steps: {missing[:10]}")
    return max((abs(one[step].loss - other[step].loss) / abs(other[step].loss) for step in one), default=0.0)


def read_run(folder: Path) -> tuple[dict[int, Iteration], list[EventRecord]]:
    """(iterations by step, events) of a run that wrote ``log.txt`` and ``events/`` into ``folder``."""
    with open(folder / "log.txt", encoding="utf-8", errors="replace") as lines:
        iterations = iterations_of(lines)
    return iterations, read_events(folder / "events")
