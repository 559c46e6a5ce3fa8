"""Pictures of schedules and runs: Chrome trace JSON (Perfetto) and PNG.

Idea: a span is (track, name, start, end, category), whatever it came from: a
plan's table timed by the simulator, or a worker's event log with phases, losses
and recoveries. Perfetto and chrome://tracing read the JSON array format; times
there are microseconds.

Depends on no other folder: callers pass the spans to draw.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    "migration": "#ff9da6",
}
_WIDTH_PT, _LETTER_PT = 850, 3.9
"""Width of the drawing and of a letter in a label, points: what does not fit is not written."""
NAMES: Mapping[str, str] = {
    "F": "forward",
    "B": "backward",
    "BI": "input gradient",
    "BW": "weight gradient",
    "slow": "slow rank",
    "recover": "recovery",
}
"""Names of categories in legends, where they differ from their own."""


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
    """PNG or SVG (by ending): one row a track, first track on top, coloured by category.

    Moments (spans of no length) are marked and named; losses and the recoveries from them stand out over all rows.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = sorted({span.track for span in spans})
    place = {track: len(rows) - 1 - number for number, track in enumerate(rows)}
    end = max((span.end for span in spans), default=1)
    figure = Figure(figsize=(14, max(2.2, 0.34 * len(rows) + 1.4)), dpi=110)
    axes = figure.add_subplot()
    for span in spans:
        colour = COLOURS.get(span.category, "#cccccc")
        start, length = span.start / 1e6, (span.end - span.start) / 1e6
        if span.start == span.end:
            axes.plot([start], [place[span.track]], marker="D", color=colour, markersize=6, zorder=4)
            continue
        axes.barh(place[span.track], length, 0.9, start, color=colour, edgecolor="white", linewidth=0.4, zorder=2)
        if label and length * 1e6 * _WIDTH_PT > end * _LETTER_PT * (len(span.name) + 0.4):
            axes.text(
                start + length / 2,
                place[span.track],
                span.name,
                ha="center",
                va="center",
                fontsize=6.5,
                zorder=3,
                clip_on=True,
            )
    _mark_losses(axes, spans, place)
    names = tracks or {}
    axes.set_yticks([place[track] for track in rows], [names.get(track, f"cell {track}") for track in rows], fontsize=8)
    axes.set_ylim(-0.6, len(rows) - (0.0 if any(span.category == "recovery" for span in spans) else 0.4))
    axes.set_xlabel("ms", fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.set_xlim(0, end / 1e6)
    used = {span.category for span in spans}
    shown = {NAMES.get(category, category): COLOURS[category] for category in COLOURS if category in used}
    handles = [Patch(facecolor=colour, label=name) for name, colour in shown.items()]
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.8 / figure.get_figheight()),
        ncols=len(handles) or 1,
        fontsize=8,
        frameon=False,
        handlelength=1.2,
        columnspacing=1.2,
    )
    figure.savefig(path, bbox_inches="tight")


def _mark_losses(axes: Any, spans: Sequence[Span], place: Mapping[int, int]) -> None:
    """A line through all rows where a loss was first seen, a band until the last recovery from it is over."""
    recoveries = [span for span in spans if span.category == "recovery"]
    moments: dict[tuple[int, str], list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        if span.category in ("loss", "slow"):
            moments.setdefault((span.track, span.name), []).append(span)
    for (track, name), seen in moments.items():
        axes.annotate(
            name,
            (seen[-1].start / 1e6, place[track]),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=COLOURS["loss"],
            zorder=5,
        )
        if seen[0].category == "loss":
            axes.axvline(seen[0].start / 1e6, color=COLOURS["loss"], linewidth=1, linestyle="--", zorder=1)
    begin, over = 0, -1
    for span in sorted(recoveries, key=lambda span: span.start):
        if span.start > over:
            if over > begin:
                _band(axes, begin, over)
            begin, over = span.start, span.end
        over = max(over, span.end)
    if over > begin:
        _band(axes, begin, over)


def _band(axes: Any, begin: int, over: int) -> None:
    axes.axvspan(begin / 1e6, over / 1e6, color=COLOURS["recovery"], alpha=0.15, zorder=0, linewidth=0)
    text = f"recovery {(over - begin) / 1e6:.0f} ms"
    axes.annotate(
        text,
        ((begin + over) / 2e6, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, -3),
        textcoords="offset points",
        ha="center",
        va="top",
        fontsize=8,
        color="#b85c00",
        zorder=5,
    )
