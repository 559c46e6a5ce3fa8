"""A plan's timed tables as spans for ``observe.trace``.

python -m megatron.elastic.simulate table --dp 2 --pp 4 --layers 16 --lost 2 --png table.png --trace table.json
"""

from __future__ import annotations

from megatron.elastic.observe.trace import Span
from megatron.elastic.plan.model import Plan, Profile
from megatron.elastic.simulate.engine import simulate_step

__all__ = ["plan_spans", "track_names"]


def plan_spans(plan: Plan, profile: Profile) -> list[Span]:
    """One span an action of the pipeline phase, named by the first nominal micro-batch of its rows."""
    step = simulate_step(plan, profile, record=True)
    spans = []
    for interval in step.timeline.intervals:
        piece = plan.pieces[interval.piece]
        microbatch = plan.grid.nominal_microbatch(piece.rows[0])
        details: dict[str, int | str] = {
            "piece": piece.id,
            "units": f"[{piece.first}, {piece.end})",
            "rows": ",".join(map(str, piece.rows)),
        }
        name = f"{interval.op.value}{microbatch}"
        spans.append(Span(interval.cell, name, interval.start, interval.end, interval.op.value, microbatch, details))
    return spans


def track_names(plan: Plan) -> dict[int, str]:
    """``cell 3 [12, 16)`` for every cell of the plan."""
    held: dict[int, list[str]] = {}
    for replica in plan.replicas:
        for segment in replica.segments:
            held.setdefault(segment.cell, []).append(f"[{segment.first}, {segment.end})")
    return {cell: f"cell {cell} {' '.join(spans)}" for cell, spans in held.items()}
