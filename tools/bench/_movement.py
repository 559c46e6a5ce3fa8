"""Common parts of the benches of state that moves while steps go on: the link, the options, and what steps paid.

A movement is compared with the quiet steps of its own job, before it and after it.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.elastic.observe.events import EventRecord
from tools.bench._common import Here, Ranks
from tools.bench._jobs import QUIET
from tools.bench._slow_link import behind_a_slow_link
from tools.bench.comm import connect

__all__ = [
    "Paid",
    "add_options",
    "begin",
    "link_bandwidth",
    "model_of",
    "paid",
    "settings_of",
]

LINK_BYTES = 64 << 20


@dataclass(frozen=True)
class Paid:
    """What the steps around one movement paid for it; seconds and bytes."""

    bytes: float
    """State that came to ranks in added copies, all ranks together."""
    busiest_bytes: float
    background: float
    steps: float
    """Whose commits the background spans."""
    stall: float
    """Wait of the slowest rank."""
    longer: float
    """What the steps of the background, that of the vote with them, took longer than the quiet ones before."""
    first: float
    """What the first step after it took longer than the quiet ones after that."""
    exposed: float
    """The sum of the two."""
    share: float
    """``exposed``, as a share of moving the bytes over an idle link."""
    step: float
    """The quiet step before, median."""
    scatter: float
    """How far a quiet step is from that, median."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all of these benches have."""
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--link", choices=("shm", "tcp"), default="tcp")
    parser.add_argument("--gbit", type=float, default=0.0, help="Gbit/s of all links together; 0: as fast as they go.")
    for name, default in (("hidden", 512), ("seq", 32), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--waiting", type=float, default=0.0, help="Seconds that every forward and backward waits.")


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options, for the result."""
    return {name: getattr(options, name) for name in ("link", "gbit", "hidden", "seq", "batch", "waiting")}


def begin(options: argparse.Namespace, bench: str) -> None:
    """With ``--gbit``, begin ``bench`` again behind a link of that rate. Raises ``SystemExit`` where that cannot be."""
    if options.gbit and options.link != "tcp":
        raise SystemExit("--gbit wants --link tcp")
    behind_a_slow_link(options.gbit, bench)


def model_of(options: argparse.Namespace) -> list[str]:
    """Megatron-LM's flags for the model of ``options``."""
    return [
        *QUIET,
        *shlex.split("--num-layers 4 --num-attention-heads 4 --micro-batch-size 1 --vocab-size 1023"),
        *("--hidden-size", str(options.hidden), "--seq-length", str(options.seq)),
        *("--max-position-embeddings", str(options.seq), "--global-batch-size", str(options.batch)),
    ]


def commits(records: list[EventRecord]) -> dict[int, float]:
    """Step → seconds (monotonic) at which it was committed."""
    return {r.fields["step"]: r.monotonic_ns / 1e9 for r in records if r.kind == "step"}


def migrations(records: list[EventRecord]) -> dict[int, list[EventRecord]]:
    """Step → the events of each rank about the movement that its vote ended."""
    found: dict[int, list[EventRecord]] = {}
    for record in records:
        if record.kind == "migration":
            found.setdefault(record.fields["step"], []).append(record)
    return found


def paid(records: list[EventRecord], end: int, bandwidth: float, shared: bool, settled: int = 2) -> Paid:
    """What the movement cost whose vote is that of step ``end``.

    ``bandwidth``: bytes a second of an idle link; ``shared``: there is one link for all ranks; ``settled``: the last
    step before the job's first quiet ones. Raises ``RuntimeError`` if there are too few quiet steps around it.
    """
    at, by_end = commits(records), migrations(records)
    taken = {step: when - at[step - 1] for step, when in at.items() if step - 1 in at}
    first, later = (_first_step(at, by_end[one]) for one in (end, min((s for s in by_end if s > end), default=end)))
    until = later if later > end else max(taken) + 1
    settled = max((step for step in by_end if step < end), default=settled)
    before = [taken[step] for step in range(settled + 2, first)]
    after = [taken[step] for step in range(end + 2, until)]
    if len(before) < 2 or len(after) < 2:
        raise RuntimeError(f"too few quiet steps around the movement: {len(before)} before, {len(after)} after")
    usual, moved = statistics.median(before), by_end[end]
    longer = sum(taken[step] - usual for step in range(first, end + 1))
    late = taken[end + 1] - statistics.median(after)
    received = [r.fields["bytes_received"] for r in moved]
    return Paid(
        bytes=sum(received),
        busiest_bytes=max(received),
        background=max(r.fields["background_seconds"] for r in moved),
        steps=end + 1 - first,
        stall=max(r.fields["stall_seconds"] for r in moved),
        longer=longer,
        first=late,
        exposed=longer + late,
        share=(longer + late) * bandwidth / (sum(received) if shared else max(received)),
        step=usual,
        scatter=statistics.median(abs(one - usual) for one in before),
    )


def _first_step(at: dict[int, float], moved: Sequence[EventRecord]) -> int:
    """The first step that was committed after the movement began."""
    names = ("background_seconds", "stall_seconds")
    began = min(r.monotonic_ns / 1e9 - sum(float(r.fields[name]) for name in names) for r in moved)
    return min(step for step, when in at.items() if when > began)


def link_bandwidth(link: str) -> float:
    """Bytes a second from one process to another over a native link (``shm`` or ``tcp``), nothing else going on."""

    def body(here: Here) -> float:
        made, fabric = connect(here, link)
        group: Any = made
        payload, together, seconds = torch.zeros(LINK_BYTES // 4), torch.zeros(1), []
        for _ in range(6):
            group.allreduce([together]).wait()
            began = time.perf_counter()
            (group.recv if here.rank else group.send)([payload], 1 - here.rank, 0).wait()
            seconds.append(time.perf_counter() - began)
        group.allreduce([together]).wait()
        assert fabric is not None
        fabric.close()
        return LINK_BYTES / statistics.median(seconds[1:])

    with Ranks(2, body, seconds=120.0) as ranks:
        return float(min(ranks.results((0, 1)).values()))
