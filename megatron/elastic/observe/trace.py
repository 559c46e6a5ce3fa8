"""Pictures of schedules and runs: Chrome trace JSON (Perfetto) and PNG.

Idea: a span is (track, name, start, end, category), whatever it came from: a
plan's table timed by the simulator, or a worker's event log with phases, losses
and recoveries. Perfetto and chrome://tracing read the JSON array format; times
there are microseconds.

Depends on no other room: what to draw is handed in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Span", "chrome_trace", "draw_spans", "write_chrome_trace"]

COLOURS: Mapping[str, str] = {
    "F": "#4c78a8",
    "B": "#72b7b2",
    "BI": "#72b7b2",
    "BW": "#b6d7a8",
    "loss": "#e45756",
    "recovery": "#f58518",
    "recover": "#f58518",
    "slow": "#e45756",
    "compute": "#9ecae9",
    "reduce": "#bab0ac",
    "ship": "#d8b5a5",
    "vote": "#9d755d",
    "update": "#eeca3b",
    "gather": "#b279a2",
    "movement": "#ff9da6",
}


@dataclass(frozen=True)
class Span:
    """Something that took time on a track (ns). ``flow`` links spans of one piece across tracks (-1: none)."""

    track: int
    name: str
    start: int
    end: int
    category: str = ""
    flow: int = -1
    arguments: Mapping[str, int | str] = field(default_factory=dict)


def chrome_trace(spans: Iterable[Span], tracks: Mapping[int, str] | None = None, process: str = "plan") -> str:
    """JSON text in Chrome's trace event format: one thread a track, arrows along flows."""
    events: list[dict[str, object]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": process}}]
    ordered = sorted(spans, key=lambda span: (span.start, span.track, span.end))
    names = tracks or {}
    for track in sorted({span.track for span in ordered}):
        name = names.get(track, f"cell {track}")
        events.append({"ph": "M", "pid": 0, "tid": track, "name": "thread_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": 0, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}})
    started: set[int] = set()
    for span in ordered:
        event: dict[str, object] = {
            "ph": "X",
            "pid": 0,
            "tid": span.track,
            "name": span.name,
            "cat": span.category or "span",
            "ts": span.start / 1000,
            "dur": (span.end - span.start) / 1000,
            "args": dict(span.arguments),
        }
        events.append(event)
        if span.flow >= 0:
            phase = "t" if span.flow in started else "s"
            started.add(span.flow)
            common: dict[str, object] = {"pid": 0, "tid": span.track, "cat": "flow", "name": "rows"}
            events.append({"ph": phase, "id": span.flow, "ts": (span.start + span.end) / 2000, **common})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def write_chrome_trace(path: Path, spans: Iterable[Span], tracks: Mapping[int, str] | None = None) -> None:
    """Write the trace to ``path`` (open it in ui.perfetto.dev)."""
    path.write_text(chrome_trace(spans, tracks))


def draw_spans(
    path: Path, spans: Sequence[Span], tracks: Mapping[int, str] | None = None, title: str = "", label: bool = True
) -> None:
    """PNG or SVG (by ending): one row a track, first track on top, coloured by category."""
    from matplotlib.figure import Figure

    rows = sorted({span.track for span in spans})
    place = {track: len(rows) - 1 - number for number, track in enumerate(rows)}
    end = max((span.end for span in spans), default=1)
    figure = Figure(figsize=(14, max(1.6, 0.32 * len(rows) + 0.9)))
    axes = figure.add_subplot()
    for span in spans:
        colour = COLOURS.get(span.category, "#cccccc")
        if span.start == span.end:
            axes.plot([span.start / 1e6], [place[span.track]], marker="D", color=colour, markersize=5)
        axes.barh(
            place[span.track],
            (span.end - span.start) / 1e6,
            0.9,
            span.start / 1e6,
            color=colour,
            edgecolor="white",
            linewidth=0.4,
        )
        if label and (span.end - span.start) * 90 >= end:
            middle = (span.start + span.end) / 2e6
            axes.text(middle, place[span.track], span.name, ha="center", va="center", fontsize=6)
    names = tracks or {}
    axes.set_yticks([place[track] for track in rows], [names.get(track, f"cell {track}") for track in rows], fontsize=6)
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize=9)
    axes.set_xlim(0, end / 1e6)
    figure.tight_layout()
    figure.savefig(path)
