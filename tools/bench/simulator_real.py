"""The simulator against real training: each job predicted from the costs of pieces in the others.

    python -m tools.bench.simulator_real [--rounds 3] [--steps 12]

Two ranks throughout, each on a core of its own: otherwise the sharing of cores would be measured. The
executors of six short jobs log when every forward and backward began and ended (waits are not in it). For each job,
the traces of the *others* give the cost model (``simulate/calibrate.py``): what a piece, an embedding, a layer and the
head cost, what passes between actions and between ranks, how all that varies. The tables of the job's plan with these
costs say how long its compute phase lasts: other numbers of micro-batches, an uneven cut, other depths, no pipeline
at all, and what is left of that when one of the two ranks is killed. Measured is the compute phase of committed
steps on its slowest rank, waits included. Beside it stands the *replay*: each step's tables with what each piece of
that very step took, the part of the error that is not the costs' and that a busy machine hardly changes.

All jobs run in every round, and a prediction uses costs of its own round, so that a machine whose speed drifts takes
both sides along. Medians over steps and pieces, then over rounds; the error of a layout is the median of its rounds'.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from megatron.elastic.observe.event_kinds import PhasesEvent, TraceEvent
from megatron.elastic.observe.events import read_events
from megatron.elastic.plan.model import Piece, Plan
from megatron.elastic.plan.planner import instant_plan, nominal_plan, uniform_profile
from megatron.elastic.plan.topology import regular_topology, without_cells
from megatron.elastic.simulate.calibrate import Between, StepTrace, TracedAction, TracedJob, calibrated
from tools.bench._common import Spread, median_of, print_result
from tools.bench._jobs import QUIET, ROOT, command, faults, finished

WARM_UP = 3
"""Steps not counted, at the start and after a loss."""
ROWS = 2
"""Rows of a micro-batch."""
MODEL = QUIET + shlex.split(f"""
    --hidden-size 192 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size {ROWS}
    --vocab-size 1023
""")
AS_PLANNED = ("--elastic-fail-slow", "off", "--elastic-migrate-after", "-1")
"""A machine's noise must not be taken for a slow rank: samples would move, and another plan would run."""


@dataclass(frozen=True)
class Layout:
    """One job of two ranks."""

    pipeline: int
    layers: int
    microbatches: int
    """A replica's."""
    first_stage: int | None = None
    """Layers of the first stage, where cuts are uneven."""
    loses: bool = False
    """The second rank is killed halfway, and no rank returns."""

    @property
    def units(self) -> int:
        """Embedding, layers, head."""
        return self.layers + 2

    def cuts(self) -> tuple[int, ...]:
        """Where stages begin, in units, and where the last one ends."""
        first = self.layers // 2 if self.first_stage is None else self.first_stage
        return (0, 1 + first, self.units) if self.pipeline == 2 else (0, self.units)

    def flags(self, steps: int) -> list[str]:
        """Megatron's, and the fault."""
        rows = ROWS * self.microbatches * (2 // self.pipeline)
        flags = ["--num-layers", self.layers, "--pipeline-model-parallel-size", self.pipeline]
        flags += ["--global-batch-size", rows, "--train-iters", steps + (steps if self.loses else 0)]
        if self.first_stage is not None:
            flags += ["--decoder-first-pipeline-num-layers", self.first_stage]
        if self.loses:
            flags += ["--no-elastic-respawn", *faults(f"kill:rank=1,step={steps + 1},point=before_step")]
        return [str(flag) for flag in flags]

    def plan(self, lost: bool) -> Plan:
        """The plan of the job: Megatron's, or that of the first rank alone."""
        replicas, profile = 2 // self.pipeline, uniform_profile(self.units)
        topology = regular_topology(
            replicas, self.pipeline, self.units, micro_batch_size=ROWS, waves=self.microbatches, cuts=self.cuts()
        )
        return instant_plan(without_cells(topology, [1]), profile) if lost else nominal_plan(topology, profile)

    def __str__(self) -> str:
        cut = "" if self.first_stage is None else f", cut {self.first_stage}:{self.layers - self.first_stage}"
        kind = "DP 2" if self.pipeline == 1 else "PP 2"
        return f"{kind}, {self.layers} layers{cut}, {self.microbatches} micro-batches"


LAYOUTS = (
    Layout(2, 4, 4),
    Layout(1, 3, 4),
    Layout(2, 8, 8),
    Layout(2, 8, 6, 3),
    Layout(1, 6, 4, loses=True),
    Layout(2, 12, 4),
)
"""Two without a pipeline, since only such a one tells what a piece costs from what its ends do."""


@dataclass(frozen=True)
class Seen:
    """One job; ``True`` stands for after the loss."""

    jobs: Mapping[bool, TracedJob]
    """Traces of the counted steps."""

    def measured(self, lost: bool) -> float:
        """ns of the compute phase of the slowest rank, median over steps."""
        return median(max(trace.compute_ns for trace in step.values()) for step in self.jobs[lost].steps)

    def replayed(self, layout: Layout, lost: bool, lies: Between) -> float:
        """Simulated over measured steps, each piece with its measured time: median over steps."""
        plan = layout.plan(lost)
        return median(replay(plan, layout.units, step, lies) for step in self.jobs[lost].steps)


def replay(plan: Plan, units: int, step: Mapping[int, StepTrace], lies: Between) -> float:
    """Simulated over measured compute phase of one traced ``step``."""
    spent = {(work.op, work.piece): work.stop - work.start for trace in step.values() for work in trace.work}

    def took(op: str, piece: Piece) -> float:
        return spent[op, piece.id]

    return lies.makespan(plan, units, took) / max(trace.compute_ns for trace in step.values())


def observed(layout: Layout, steps: int) -> Seen:
    """Train and read the event log. Raises ``RuntimeError`` when the job fails or a step is missing."""
    phases: dict[int, dict[int, int]] = {}
    work: dict[int, dict[int, tuple[TracedAction, ...]]] = {}
    with tempfile.TemporaryDirectory(prefix="simulator-") as folder:
        elastic = ("--elastic", "--elastic-event-log", folder, "--elastic-trace", *AS_PLANNED)
        finished(command(2, *MODEL, *layout.flags(steps), *elastic, script=str(ROOT / "tools/bench/_own_core.py")))
        for record in read_events(Path(folder)):
            event = record.event
            if isinstance(event, PhasesEvent):
                phases.setdefault(event.step, {})[record.rank] = event.nanoseconds["compute"]
            elif isinstance(event, TraceEvent):
                done = tuple(sorted((TracedAction(*line) for line in event.work), key=lambda action: action.start))
                work.setdefault(event.step, {})[record.rank] = done
    last = 2 * steps if layout.loses else steps
    if set(phases) != set(range(1, last + 1)):
        raise RuntimeError(f"{layout}: steps {sorted(phases)} were committed, {last} were asked for")
    counted = {
        lost: range(first + WARM_UP + 1, first + steps + 1)
        for lost, first in ((False, 0), (True, steps))[: 1 + layout.loses]
    }
    return Seen(
        {
            lost: TracedJob(
                layout.units,
                tuple({r: StepTrace(work[step][r], ns) for r, ns in phases[step].items()} for step in numbers),
            )
            for lost, numbers in counted.items()
        }
    )


@dataclass
class Row:
    """A layout over all rounds; ns, and errors of the simulator."""

    measured: list[float] = field(default_factory=list)
    simulated: list[float] = field(default_factory=list)
    replayed: list[float] = field(default_factory=list)
    """With what each piece took, over measured."""

    def add(self, measured: float, simulated: float, replayed: float) -> None:
        """One round."""
        self.measured.append(measured)
        self.simulated.append(simulated)
        self.replayed.append(replayed)

    def error(self) -> Spread:
        """Simulated over measured, less one."""
        return median_of([said / was - 1 for said, was in zip(self.simulated, self.measured, strict=True)])

    def replay_error(self) -> Spread:
        """The same when each piece takes what it took."""
        return median_of([ratio - 1 for ratio in self.replayed])


def compare(jobs: Mapping[Layout, Seen], rows: dict[str, Row], ratios: list[tuple[float, float]]) -> None:
    """Add one round: every layout, and (measured, simulated) time after a loss over before."""
    for layout, seen in jobs.items():
        model = calibrated([other.jobs[False] for of, other in jobs.items() if of != layout])
        said = {}
        for lost in seen.jobs:
            said[lost] = model.compute_ns(layout.plan(lost), layout.units)
            name = f"{layout}, one rank lost" if lost else str(layout)
            replayed = seen.replayed(layout, lost, model.between)
            rows.setdefault(name, Row()).add(seen.measured(lost), said[lost], replayed)
        if layout.loses:
            ratios.append((seen.measured(True) / seen.measured(False), said[True] / said[False]))


def report(rows: Mapping[str, Row], ratios: list[tuple[float, float]]) -> dict[str, Any]:
    """Figures for the JSON line, printed as a table, too."""
    found: list[dict[str, Any]] = []
    for name, row in rows.items():
        error, replayed = row.error(), row.replay_error()
        measured, said = median(row.measured) / 1e6, median(row.simulated) / 1e6
        found.append(
            {
                "layout": name,
                "measured_ms": measured,
                "simulated_ms": said,
                "error": error.median,
                "errors": error,
                "replay_error": replayed.median,
            }
        )
        print(
            f"{name:48} measured {measured:8.1f} ms, simulated {said:8.1f} ms, error {error.median:+.1%} "
            f"({error.low:+.1%} to {error.high:+.1%}), replayed {replayed.median:+.1%}",
            flush=True,
        )
    errors = [abs(row["error"]) for row in found]
    return {
        "rows": found,
        "median_error": median(errors),
        "worst_error": max(errors),
        "median_replay_error": median(abs(row["replay_error"]) for row in found),
        "after_over_before": {
            "measured": median_of([measured for measured, _ in ratios]),
            "simulated": median_of([said for _, said in ratios]),
        },
    }


def main() -> None:
    """Run the rounds, predict, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of each job, before the loss and again after it")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps {options.steps}: the first {WARM_UP} are not counted")
    rows: dict[str, Row] = {}
    ratios: list[tuple[float, float]] = []
    for number in range(options.rounds):
        compare({layout: observed(layout, options.steps) for layout in LAYOUTS}, rows, ratios)
        print(f"round {number + 1} of {options.rounds}", flush=True)
    print_result("simulator_real", {"rounds": options.rounds, "steps": options.steps, **report(rows, ratios)})


if __name__ == "__main__":
    main()
