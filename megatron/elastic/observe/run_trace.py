"""A run's event log as a picture: what every rank computed, waited for and recovered from.

    python -m megatron.elastic.observe.run_trace DIR --out trace.json [--png run.png] [--steps 3-6]

``DIR`` is what ``--elastic-event-log`` named; with ``--elastic-trace`` it holds
every computation and phase, without it phases are drawn one after the other
(their order within a step is that of first entry). Each rank has a track for
phases, one for computations, and one for losses and recoveries. Open the JSON in ui.perfetto.dev or chrome://tracing.

Ranks of other hosts are placed by their wall clocks: each incarnation's
monotonic times are moved by the median of (wall - monotonic) over its lines.
A folder may hold several launches, as a job that is queued again leaves them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from megatron.elastic.observe.event_kinds import (
    BeginEvent,
    PhasesEvent,
    RankLostEvent,
    RecoveryEvent,
    SlowRankEvent,
    TraceEvent,
)
from megatron.elastic.observe.events import EventRecord, read_events
from megatron.elastic.observe.trace import Span, draw_spans, write_chrome_trace

__all__ = ["main", "run_spans", "track_names"]

_PHASES, _WORK, _TRACKS = 1, 2, 3
"""Offsets of a rank's tracks (its events come first), and how many it has."""
_Life = tuple[int, int]
"""Rank, and number of its processes that began before: each launch counts incarnations from 0 again."""


def run_spans(records: Sequence[EventRecord], steps: range | None = None) -> list[Span]:
    """Spans of a run, ns from its first event; ``steps`` limits what belongs to a step.

    Track ``3 · rank`` holds losses and recoveries, ``3 · rank + 1`` phases, ``3 · rank + 2`` computations.
    """
    lived = _by_life(records)
    shifts = _shifts(lived)
    traced = {(life, r.event.step) for life, r in lived if isinstance(r.event, TraceEvent)}
    known = _noticed(lived)
    spans = [
        span
        for life, record in lived
        for span in _of(record, life, shifts[life], traced, known)
        if steps is None or int(span.arguments.get("step", steps.start)) in steps
    ]
    begin = min((span.start for span in spans), default=0)
    return sorted((_moved(span, -begin) for span in spans), key=lambda span: (span.start, span.track, span.end))


def track_names(spans: Iterable[Span]) -> dict[int, str]:
    """``rank 3 events``, ``rank 3 phases``, ``rank 3 computes`` for every track in use."""
    kinds = ("events", "phases", "computes")
    tracks = {span.track for span in spans}
    return {track: f"rank {track // _TRACKS} {kinds[track % _TRACKS]}" for track in sorted(tracks)}


def _moved(span: Span, by: int) -> Span:
    return Span(span.track, span.name, span.start + by, span.end + by, span.category, span.flow, span.arguments)


def _by_life(records: Iterable[EventRecord]) -> list[tuple[_Life, EventRecord]]:
    """Each record with the process that wrote it."""
    begun: dict[int, int] = {}
    found = []
    for record in records:
        if isinstance(record.event, BeginEvent):
            begun[record.rank] = begun.get(record.rank, 0) + 1
        found.append(((record.rank, begun.get(record.rank, 0)), record))
    return found


def _shifts(lived: Iterable[tuple[_Life, EventRecord]]) -> dict[_Life, int]:
    """Process → ns to add to its monotonic times; 0 within one host."""
    found: dict[_Life, list[float]] = {}
    for life, record in lived:
        found.setdefault(life, []).append(record.wall * 1e9 - record.monotonic_ns)
    offsets = {key: median(values) for key, values in found.items()}
    base = min(offsets.values(), default=0.0)
    near = 5e7  # clocks of one host differ by the time between two clock reads, not by 50 ms
    return {key: 0 if offset - base < near else round(offset - base) for key, offset in offsets.items()}


def _noticed(lived: Iterable[tuple[_Life, EventRecord]]) -> dict[tuple[_Life, int], int]:
    """(process, generation) → when it began to recover, by its own clock: losses are logged at the end."""
    return {
        (life, record.generation): record.monotonic_ns - round(1e9 * sum(record.event.seconds.values()))
        for life, record in lived
        if isinstance(record.event, RecoveryEvent)
    }


def _of(
    record: EventRecord,
    life: _Life,
    shift: int,
    traced: set[tuple[_Life, int]],
    known: Mapping[tuple[_Life, int], int],
) -> Iterator[Span]:
    """Yield the spans of one event record."""
    event, track, now = record.event, _TRACKS * record.rank, record.monotonic_ns + shift
    if isinstance(event, TraceEvent):
        for name, start, end in event.phases:
            yield Span(track + _PHASES, name, start + shift, end + shift, name, arguments={"step": event.step})
        for op, piece, first, stop, start, end in event.work:
            details: dict[str, int | str] = {"step": event.step, "piece": piece, "units": f"[{first}, {stop})"}
            yield Span(track + _WORK, f"{op}{piece}", start + shift, end + shift, op, arguments=details)
    elif isinstance(event, PhasesEvent) and (life, event.step) not in traced:
        start = now - sum(event.nanoseconds.values())
        for name, spent in event.nanoseconds.items():
            yield Span(track + _PHASES, name, start, start + spent, name, arguments={"step": event.step})
            start += spent
    elif isinstance(event, RecoveryEvent):
        start = now - round(1e9 * sum(event.seconds.values()))
        for name, seconds in event.seconds.items():
            end = start + round(1e9 * seconds)
            yield Span(track, name, start, end, "recovery", arguments={"step": event.step, "outcome": event.outcome})
            start = end
    elif isinstance(event, RankLostEvent):
        details = {"step": event.step, "cause": event.cause, "seen by": record.rank}
        now = known.get((life, record.generation), record.monotonic_ns) + shift
        yield Span(_TRACKS * event.lost_rank, f"lost: {event.cause}", now, now, "loss", arguments=details)
    elif isinstance(event, SlowRankEvent):
        details = {"step": event.step, "speed": f"{event.speed_ppm / 10_000:.0f}%"}
        yield Span(_TRACKS * event.slow_rank, f"speed {details['speed']}", now, now, "slow", arguments=details)


def _steps(text: str) -> range:
    first, dash, last = text.partition("-")
    try:
        return range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor FIRST-LAST") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the trace of a run. Exit code 1 with one line if there is nothing to draw or no place for it."""
    parser = argparse.ArgumentParser(prog="python -m megatron.elastic.observe.run_trace", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("directory", type=Path, help="directory given to --elastic-event-log in that run")
    parser.add_argument("--out", type=Path, required=True, metavar="PATH", help="Chrome trace JSON")
    parser.add_argument("--png", type=Path, metavar="PATH", help="the same as a picture (PNG or SVG by ending)")
    parser.add_argument("--title", default="", help="title of the picture")
    parser.add_argument("--steps", type=_steps, metavar="FIRST-LAST", help="draw these steps only; default: all")
    options = parser.parse_args(arguments)
    try:
        spans = run_spans(read_events(options.directory), options.steps)
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if not spans:
        print(f"{options.directory} holds no event of these steps", file=sys.stderr)
        return 1
    names = track_names(spans)
    try:
        write_chrome_trace(options.out, spans, names)
        if options.png is not None:
            draw_spans(options.png, spans, names, options.title or str(options.directory))
    except (OSError, ValueError) as error:  # no such folder; no format for this ending
        print(f"--out or --png: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
