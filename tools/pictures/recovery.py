"""The recovery of one loss: what each rank and the journal do, in order, taken from a run of the real engine.

Four ranks train in one process (``tests/cluster``), and one is killed when it has reduced its gradients. From a run
in which the others are met in given phases come the entries of the journal, the phases that follow and the number of
samples that each rank computes. Phases stand in columns; the widths are no times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from megatron.elastic.control.events import Decided, Lost, Reported
from megatron.elastic.plan.model import Plan
from megatron.elastic.runtime.telemetry import rows_of
from tests.cluster.cluster import Cluster, run
from tests.cluster.cluster import rows_of as batch_rows
from tests.scenario.scenario import parse
from tools.pictures.svg import BLUE, GREEN, GREY, INK, RED, Box, Drawing, Point

__all__ = ["SCENARIO", "draw_recovery"]

STEP, KILLED = 2, 3
SCENARIO = parse(f"pp2dp2 steps={STEP} back=never kill:rank={KILLED},step={STEP},point=after_reduce")
BROKEN_OFF = {0: "ship", 1: "vote", 2: "ship"}
"""Rank → the phase in which the loss meets it. Others are possible; the picture is of one of the runs with these."""
SEEDS = range(3, 80)
"""Orders of events that are tried."""


class Phase(NamedTuple):
    """A phase of one rank, which ends at a named point."""

    name: str
    end: str
    width: int
    fill: str


STEP_PHASES = (
    Phase("compute", "before_reduce", 66, "#dbeafe"),
    Phase("reduce", "after_reduce", 50, "#bfdbfe"),
    Phase("ship", "after_ship", 46, "#93c5fd"),
    Phase("vote", "after_vote", 46, "#bbf7d0"),
)
RECOVERY_PHASES = (
    Phase("report", "in_recovery_decide", 176, "#fee2e2"),
    Phase("edit", "in_recovery_edit", 38, "#fecaca"),
    Phase("plan", "in_recovery_promote", 38, "#fecaca"),
    Phase("settle", "in_recovery_resume", 46, "#fecaca"),
)
COMMITTED_PHASES = (
    Phase("update", "after_update", 52, "#dcfce7"),
    Phase("gather", "after_gather", 52, "#dcfce7"),
)
COLUMNS = (*STEP_PHASES, *RECOVERY_PHASES, *STEP_PHASES, *COMMITTED_PHASES)
RECOVERY = len(STEP_PHASES)
AGAIN = RECOVERY + len(RECOVERY_PHASES)
"""First columns of the recovery, and of the step that is computed again."""
LEFT, TOP, ROW, BAR = 84, 94, 52, 36
STARTS = tuple(LEFT + sum(phase.width for phase in COLUMNS[:number]) for number in range(len(COLUMNS) + 1))
"""Left edge of each column, and the right edge of the last."""
ENTRIES: Mapping[str, tuple[str, str]] = {
    "Lost": ("#fee2e2", RED),
    "Reported": ("#eff6ff", BLUE),
    "Decided": ("#dcfce7", GREEN),
}
"""Kind of an entry of the journal → its colors."""


def draw_recovery() -> str:
    """The journal above, a row for each rank below."""
    cluster = chosen_run()
    plan = cluster.finished[0].plans[0]
    drawing = Drawing(STARTS[-1] + 14, TOP + ROW * SCENARIO.layout.ranks + 30, "Recovery of one loss")
    _heads(drawing)
    _journal(drawing, cluster)
    for rank in range(SCENARIO.layout.ranks):
        _row(drawing, cluster, plan, rank)
    _marks(drawing)
    return drawing.finished()


def chosen_run() -> Cluster:
    """The first run in which the others are broken off as in ``BROKEN_OFF``. Raises ``ValueError`` without one."""
    for seed in SEEDS:
        cluster = run(replace(SCENARIO, seed=seed))
        ends = {
            rank: [COLUMNS[at].name for at, whole in passed_columns(cluster, rank) if not whole] for rank in BROKEN_OFF
        }
        if ends == {rank: [name] for rank, name in BROKEN_OFF.items()}:
            return cluster
    raise ValueError(f"in no run of the seeds {SEEDS} the ranks are broken off as in {BROKEN_OFF}")


def passed_columns(cluster: Cluster, rank: int) -> list[tuple[int, bool]]:
    """Columns of the phases of ``rank`` in the step, in order; False: the phase was broken off."""
    points = [(passed.point, passed.step) for passed in cluster.passed if passed.rank == rank]
    found, column = list[tuple[int, bool]](), 0
    for point, _ in points[points.index(("after_prepare", STEP)) :]:
        if point == "in_recovery_freeze":
            found.append((column, False))
            column = RECOVERY
        elif column < len(COLUMNS) and point == COLUMNS[column].end:
            found.append((column, True))
            column += 1
    return found


def appended(cluster: Cluster) -> list[tuple[str, tuple[int, ...]]]:
    """Entries of the journal from the loss to the decision: kind, and the ranks that it comes from.

    Each agent appends the report of its rank; they come in any order and are one here.
    """
    entries = cluster.journal.entries
    first = next(place for place, entry in enumerate(entries) if isinstance(entry, Lost))
    last = next(place for place, entry in enumerate(entries) if place > first and isinstance(entry, Decided))
    lost = tuple(loss.rank for entry in entries[first : first + 1] if isinstance(entry, Lost) for loss in entry.losses)
    reports = sorted(entry.entries[0].rank for entry in entries[first:last] if isinstance(entry, Reported))
    return [("Lost", lost), ("Reported", tuple(reports)), ("Decided", ())]


def samples(plan: Plan, rank: int) -> int:
    """Samples that ``rank`` computes by ``plan``."""
    cell = next(cell.id for cell in plan.cells if rank in cell.ranks)
    return rows_of(plan)[cell]


def _middle(rank: int) -> float:
    return TOP + ROW * (rank + 0.5)


def _heads(drawing: Drawing) -> None:
    for words, first, last in (
        (f"step {STEP}", 0, RECOVERY),
        ("recovery", RECOVERY, AGAIN),
        (f"step {STEP}, computed again", AGAIN, len(COLUMNS)),
    ):
        drawing.text(Point((STARTS[first] + STARTS[last]) / 2, 14), words, 13, bold=True)
        drawing.line([Point(STARTS[first] + 3, 26), Point(STARTS[last] - 3, 26)], INK)


def _row(drawing: Drawing, cluster: Cluster, plan: Plan, rank: int) -> None:
    y = _middle(rank)
    drawing.text(Point(8, y - 8), f"rank {rank}", 13, anchor="start", bold=True)
    drawing.text(Point(8, y + 9), f"stage {rank // SCENARIO.layout.data}", 11, GREY, "start")
    for column, whole in passed_columns(cluster, rank):
        name, _, _, fill = COLUMNS[column]
        begin, end = STARTS[column], STARTS[column + 1 if whole else RECOVERY]
        box = Box((begin + end) / 2, y, end - begin - 2, BAR)
        drawing.box(box, fill if whole else "#ffffff", GREY if whole else RED, radius=3, dashed=not whole)
        words = [name if whole else f"{name}: broken off" if end - begin > 90 else name]
        if name == "compute":
            rows = samples(plan, rank) if column >= AGAIN else batch_rows(SCENARIO) // SCENARIO.layout.data
            words.append(f"{rows} samples")
        for number, text in enumerate(words):
            drawing.text(Point(box.x, y + 14 * number - 7 * (len(words) - 1)), text, 11)


def _marks(drawing: Drawing) -> None:
    """Lines through all rows, and the loss."""
    low = TOP + ROW * SCENARIO.layout.ranks
    for column, words, color in (
        (RECOVERY, "FREEZE", RED),
        (RECOVERY + 1, "DECIDE", GREEN),
        (AGAIN + len(STEP_PHASES), "commit", GREEN),
    ):
        x = STARTS[column]
        drawing.line([Point(x, TOP - 8), Point(x, low + 6)], color, 1.6)
        drawing.text(Point(x, low + 18), words, 12, color, bold=True)
    end = Point(STARTS[2] + 8, _middle(KILLED))
    drawing.cross(end)
    drawing.text(Point(end.x + 14, end.y), "killed", 12, RED, "start", bold=True)


def _journal(drawing: Drawing, cluster: Cluster) -> None:
    """The entries of the journal; arrows to them from the rows, which are drawn later and cover them."""
    y = TOP - 44
    drawing.text(Point(8, y), "journal", 13, anchor="start", bold=True)
    for kind, ranks in appended(cluster):
        fill, color = ENTRIES[kind]
        x = {"Lost": STARTS[2] + 8, "Reported": STARTS[RECOVERY] + 70, "Decided": STARTS[RECOVERY + 1]}[kind]
        for rank in ranks:
            own = x - 34 + 34 * ranks.index(rank) if kind == "Reported" else x
            begin = Point(own, _middle(rank) - (9 if kind == "Lost" else BAR / 2))
            drawing.arrow([begin, Point(own, y + 12)], color, dashed=kind == "Lost")
        words = f"{kind} {', '.join(map(str, ranks))}".strip()
        drawing.box(Box(x, y, 118 if kind == "Reported" else 72, 21), fill, color, radius=3)
        drawing.text(Point(x, y), words, 12, color)
