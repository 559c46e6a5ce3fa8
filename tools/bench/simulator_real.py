"""The simulator against real training: costs from two pipelines, predictions for other layouts.

    python -m tools.bench.simulator_real [--steps 12]

Two ranks throughout, no more than there are cores: otherwise what is measured is how the machine shares them.
Calibration: two pipelines of two stages, of different depth, whose executors log how long every forward and backward
took (waits are not in it); least squares over their stages gives what embedding, a layer and the head cost forward
and backward. Prediction: other numbers of micro-batches, uneven cuts, another depth, and no pipeline at all, by the
tables of their plans. Compared is the compute phase of committed steps (its slowest rank, waits included), what the
simulator claims to know. Medians on both sides, over steps and pieces. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megatron.elastic.observe.events import Phases, Trace, read_events
from megatron.elastic.plan.model import Profile, UnitCost
from megatron.elastic.plan.planner import nominal_plan
from megatron.elastic.plan.timing import plan_time
from megatron.elastic.plan.topology import regular_topology
from tools.bench._common import print_result
from tools.bench._jobs import QUIET, command, finished

WARM_UP = 3
MODEL = QUIET + shlex.split("""
    --hidden-size 192 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2
    --vocab-size 1023
""")


@dataclass(frozen=True)
class Layout:
    """One job of two ranks."""

    pipeline: int
    layers: int
    microbatches: int
    """A replica's."""
    first_stage: int | None = None
    """Layers of the first stage, where cuts are uneven."""

    def flags(self) -> list[str]:
        """Megatron's."""
        rows = 2 * self.microbatches * (2 // self.pipeline)
        flags = ["--num-layers", self.layers, "--pipeline-model-parallel-size", self.pipeline]
        flags += ["--global-batch-size", rows]
        if self.first_stage is not None:
            flags += ["--decoder-first-pipeline-num-layers", self.first_stage]
        return [str(flag) for flag in flags]

    def __str__(self) -> str:
        cut = "" if self.first_stage is None else f", cut {self.first_stage}:{self.layers - self.first_stage}"
        kind = "DP 2" if self.pipeline == 1 else "PP 2"
        return f"{kind}, {self.layers} layers{cut}, {self.microbatches} micro-batches"


CALIBRATION = (Layout(2, 4, 4), Layout(2, 8, 4))
PREDICTED = (Layout(2, 8, 8), Layout(2, 8, 6, 3), Layout(2, 12, 4), Layout(1, 8, 4))
ROWS = 2
"""Rows of a micro-batch, as ``MODEL`` says."""
Stage = tuple[int, int]


@dataclass(frozen=True)
class Seen:
    """One job, medians over steps: the compute phase of its slowest rank, (op, units) → time of a piece; ns."""

    compute: float
    pieces: dict[tuple[str, Stage], float]


@dataclass(frozen=True)
class UnitTime:
    """ns of a micro-batch: embedding, one layer, head."""

    embedding: float
    layer: float
    head: float


def observed(layout: Layout, steps: int) -> Seen:
    """Train and read the event log. Raises ``RuntimeError`` when the job fails."""
    with tempfile.TemporaryDirectory(prefix="simulator-") as folder:
        elastic = ("--elastic", "--elastic-event-log", folder, "--elastic-trace")
        finished(command(2, *MODEL, *layout.flags(), "--train-iters", str(steps), *elastic))
        slowest: dict[int, int] = {}
        pieces: dict[tuple[str, Stage], list[int]] = {}
        for record in read_events(Path(folder)):
            event = record.event
            if isinstance(event, Phases) and event.step > WARM_UP:
                slowest[event.step] = max(slowest.get(event.step, 0), event.nanoseconds["compute"])
            elif isinstance(event, Trace) and event.step > WARM_UP:
                for op, _, first, end, start, stop in event.work:
                    pieces.setdefault((op, (first, end)), []).append(stop - start)
    return Seen(median(slowest.values()), {key: median(spent) for key, spent in pieces.items()})


def calibrated(jobs: dict[Layout, Seen]) -> dict[str, UnitTime]:
    """Op (F, B) → times of units: least squares over all stages."""
    found = {}
    for op in ("F", "B"):
        rows, times = [], []
        for layout, seen in jobs.items():
            for (of, (first, end)), spent in seen.pieces.items():
                if of == op:
                    last = layout.layers + 2
                    rows.append([first == 0, end - first - (first == 0) - (end == last), end == last])
                    times.append(spent)
        solved = np.linalg.lstsq(np.array(rows, dtype=float), np.array(times), rcond=None)[0]
        found[op] = UnitTime(*(float(max(0.0, value)) for value in solved))
    return found


def predicted_ns(layout: Layout, forward: UnitTime, backward: UnitTime) -> int:
    """The simulator's compute phase of ``layout``: its nominal tables with calibrated costs."""

    def unit(there: float, back: float) -> UnitCost:
        return UnitCost(round(there / ROWS), round(back / ROWS), round(back / ROWS / 2), 0, 0, 1, 0)

    layers = (unit(forward.layer, backward.layer),) * layout.layers
    units = (unit(forward.embedding, backward.embedding), *layers, unit(forward.head, backward.head))
    first = layout.layers // 2 if layout.first_stage is None else layout.first_stage
    cuts = (0, 1 + first, len(units)) if layout.pipeline == 2 else (0, len(units))
    topology = regular_topology(
        2 // layout.pipeline, layout.pipeline, len(units), micro_batch_size=ROWS, waves=layout.microbatches, cuts=cuts
    )
    profile = Profile(units, latency_ns=0)
    return plan_time(nominal_plan(topology, profile), profile)


def main() -> None:
    """Calibrate, predict, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps {options.steps}: the first {WARM_UP} are not counted")
    costs = calibrated({layout: observed(layout, options.steps) for layout in CALIBRATION})
    for op, unit in costs.items():
        print(
            f"{op}: embedding {unit.embedding / 1e6:.2f} ms, a layer {unit.layer / 1e6:.2f}, head {unit.head / 1e6:.2f}"
        )
    rows: list[dict[str, Any]] = []
    for layout in PREDICTED:
        measured, said = observed(layout, options.steps).compute, predicted_ns(layout, costs["F"], costs["B"])
        rows.append({"layout": str(layout), "measured_ms": measured / 1e6, "simulated_ms": said / 1e6,
                     "error": said / measured - 1})  # fmt: skip
        print(f"{layout!s:44} measured {measured / 1e6:8.1f} ms, simulated {said / 1e6:8.1f} ms, "
              f"error {said / measured - 1:+.1%}", flush=True)  # fmt: skip
    errors = [abs(float(row["error"])) for row in rows]
    print_result(
        "simulator_real",
        {
            "calibration": {op: asdict(unit) for op, unit in costs.items()},
            "rows": rows,
            "median_error": median(errors),
            "worst_error": max(errors),
        },
    )


if __name__ == "__main__":
    main()
