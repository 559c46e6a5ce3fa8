"""The simulator against real training: each job predicted from what pieces cost in the others.

    python -m tools.bench.simulator_real [--rounds 3] [--steps 10]

Two ranks throughout, no more than there are cores: otherwise what is measured is how the machine shares them. The
executors of five short jobs log when every forward and backward began and ended (waits are not in it). For each job,
least squares over the stages of the *other four* give what embedding, a layer and the head cost; what passes between
two actions of a rank, and between a stage's end and the start of one that waited for it, comes from the same traces.
The tables of the job's plan with these costs say how long its compute phase lasts: other numbers of micro-batches, an
uneven cut, other depths, no pipeline at all, and what is left of that when one of the two ranks is killed. Measured is
the compute phase of committed steps on its slowest rank, waits included. Beside it stands the *replay*: each step's
tables with what each piece of that very step took, the part of the error that is not the costs' and that a busy
machine hardly changes.

All jobs run in every round, and a prediction uses costs of its own round, so that a machine whose speed drifts takes
both sides along. Medians over steps and pieces, then over rounds; the error of a layout is the median of its rounds'.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from megatron.elastic.observe.events import Phases, Trace, read_events
from megatron.elastic.plan.cost import Costs, PieceCost
from megatron.elastic.plan.model import Plan, Profile, UnitCost
from megatron.elastic.plan.planner import instant_plan, nominal_plan, uniform_profile
from megatron.elastic.plan.timing import execute, plan_time
from megatron.elastic.plan.topology import regular_topology, without_cells
from tools.bench._common import Spread, median_of, print_result
from tools.bench._jobs import QUIET, command, faults, finished

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
OPS = ("F", "B")


class Work(NamedTuple):
    """An action as traced."""

    op: str
    piece: int
    first: int
    end: int
    start: int
    stop: int


Span = tuple[int, int]
Pieces = Mapping[tuple[str, Span], float]
"""(op, units) → ns of a piece."""


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
    """The second rank is killed halfway, and nobody returns."""

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

    def plan(self, profile: Profile, lost: bool) -> Plan:
        """What the job runs: Megatron's plan, or what the first rank does alone."""
        replicas = 2 // self.pipeline
        topology = regular_topology(
            replicas, self.pipeline, self.units, micro_batch_size=ROWS, waves=self.microbatches, cuts=self.cuts()
        )
        return instant_plan(without_cells(topology, [1]), profile) if lost else nominal_plan(topology, profile)

    def __str__(self) -> str:
        cut = "" if self.first_stage is None else f", cut {self.first_stage}:{self.layers - self.first_stage}"
        kind = "DP 2" if self.pipeline == 1 else "PP 2"
        return f"{kind}, {self.layers} layers{cut}, {self.microbatches} micro-batches"


LAYOUTS = (Layout(2, 4, 4), Layout(2, 8, 8), Layout(2, 8, 6, 3), Layout(2, 12, 4), Layout(1, 6, 4, loses=True))


@dataclass(frozen=True)
class Seen:
    """One job, medians over steps, ns; ``True`` stands for after the loss."""

    compute: dict[bool, float]
    """The compute phase of the slowest rank."""
    replayed: dict[bool, float]
    """What the simulator makes of it, step by step, given how long each piece of that very step took: over measured."""
    pieces: Pieces
    """Before the loss."""
    between: float
    """From the end of an action to the start of the next of its rank, where that waited for nothing."""
    across: float | None
    """From the end of an action to the start of another stage's that waited for it; None without a pipeline."""


def observed(layout: Layout, steps: int) -> Seen:
    """Train and read the event log. Raises ``RuntimeError`` when the job fails or a step is missing."""
    slowest: dict[int, int] = {}
    traces: dict[int, dict[int, list[Work]]] = {}
    with tempfile.TemporaryDirectory(prefix="simulator-") as folder:
        elastic = ("--elastic", "--elastic-event-log", folder, "--elastic-trace", *AS_PLANNED)
        finished(command(2, *MODEL, *layout.flags(steps), *elastic))
        for record in read_events(Path(folder)):
            event = record.event
            if isinstance(event, Phases):
                slowest[event.step] = max(slowest.get(event.step, 0), event.nanoseconds["compute"])
            elif isinstance(event, Trace):
                done = sorted((Work(*line) for line in event.work), key=lambda work: work.start)
                traces.setdefault(event.step, {})[record.rank] = done
    last = 2 * steps if layout.loses else steps
    if set(slowest) != set(range(1, last + 1)):
        raise RuntimeError(f"{layout}: steps {sorted(slowest)} were committed, {last} were asked for")
    counted = {
        lost: range(first + WARM_UP + 1, first + steps + 1)
        for lost, first in ((False, 0), (True, steps))[: 1 + layout.loses]
    }
    return summed_up(layout, counted, slowest, traces)


def summed_up(
    layout: Layout,
    counted: Mapping[bool, Sequence[int]],
    slowest: Mapping[int, int],
    traces: Mapping[int, Mapping[int, Sequence[Work]]],
) -> Seen:
    """Medians over the ``counted`` steps of compute phases ``slowest`` and of ``traces`` by step and rank."""
    before = [traces[step] for step in counted[False]]
    pieces: dict[tuple[str, Span], list[int]] = {}
    for ranks in before:
        for work in (work for done in ranks.values() for work in done):
            pieces.setdefault((work.op, (work.first, work.end)), []).append(work.stop - work.start)
    between = median(gap for ranks in before for done in ranks.values() for gap in gaps(done, layout.units))
    across = median(h for ranks in before for h in hops(ranks[0], ranks[1])) if layout.pipeline == 2 else None
    return Seen(
        {lost: median(slowest[step] for step in steps) for lost, steps in counted.items()},
        {
            lost: median(replay(layout, lost, traces[step].values(), between, across) / slowest[step] for step in steps)
            for lost, steps in counted.items()
        },
        {key: median(spent) for key, spent in pieces.items()},
        between,
        across,
    )


def replay(layout: Layout, lost: bool, traces: Iterable[Sequence[Work]], between: float, across: float | None) -> int:
    """The compute phase (ns) of the step's tables when each piece takes what it took."""
    took = {(work.op, work.piece): work.stop - work.start for done in traces for work in done}
    plan = layout.plan(uniform_profile(layout.units), lost)
    gap, hop = round(between), round(max(0.0, (across or between) - between))
    costs = tuple(PieceCost(took["F", p.id] + gap, took["B", p.id] + gap, 0, 0) for p in plan.pieces)
    return execute(plan, Costs(costs, (hop,) * len(plan.edges))).makespan


def gaps(done: Sequence[Work], units: int) -> list[int]:
    """Between the forward and the backward of a piece that ends with the loss: nothing is waited for there."""
    return [
        after.start - before.stop
        for before, after in pairwise(done)
        if before.end == units and before.piece == after.piece and before.op == "F"
    ]


def hops(first: Sequence[Work], last: Sequence[Work]) -> list[int]:
    """The second stage's first forward and the first stage's last backward have nothing to do but wait."""
    return [last[0].start - first[0].stop, first[-1].start - last[-1].stop]


def fitted(jobs: Mapping[Layout, Seen]) -> dict[str, tuple[float, float, float]]:
    """Op → ns of embedding, a layer, head for a micro-batch: least squares over all stages."""
    found = {}
    for op in OPS:
        rows, times = [], []
        for layout, seen in jobs.items():
            for (of, (first, end)), spent in seen.pieces.items():
                if of == op:
                    last = end == layout.units
                    rows.append([first == 0, end - first - (first == 0) - last, last])
                    times.append(spent)
        solved = np.linalg.lstsq(np.array(rows, dtype=float), np.array(times), rcond=None)[0]
        embedding, layer, head = (float(max(0.0, value)) for value in solved)
        found[op] = embedding, layer, head
    return found


def profile_of(layout: Layout, times: Sequence[tuple[float, float]], seen: Iterable[Seen]) -> Profile:
    """Units that take so many ns (forward, backward) for a micro-batch; what lies between actions as ``seen``.

    What an action costs besides its units is put on the first unit of its stage.
    """
    jobs = list(seen)
    gap = median(job.between for job in jobs)
    hop = median([job.across for job in jobs if job.across is not None] or [gap])
    begins = layout.cuts()[:-1]
    units = []
    for unit, (there, back) in enumerate(times):
        extra = gap if unit in begins else 0.0
        forward, backward = round((there + extra) / ROWS), round((back + extra) / ROWS)
        units.append(UnitCost(forward, backward, backward // 2, 0, 0, 1, 0))
    return Profile(tuple(units), latency_ns=round(max(0.0, hop - gap)))


def profile_elsewhere(layout: Layout, others: Mapping[Layout, Seen]) -> Profile:
    """Units of ``layout`` at what they cost in other jobs."""
    there, back = (fitted(others)[op] for op in OPS)
    layers = [(there[1], back[1])] * layout.layers
    return profile_of(layout, [(there[0], back[0]), *layers, (there[2], back[2])], others.values())


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
        elsewhere = profile_elsewhere(layout, {other: what for other, what in jobs.items() if other != layout})
        said = {}
        for lost, measured in seen.compute.items():
            said[lost] = plan_time(layout.plan(elsewhere, lost), elsewhere)
            name = f"{layout}, one rank lost" if lost else str(layout)
            rows.setdefault(name, Row()).add(measured, said[lost], seen.replayed[lost])
        if layout.loses:
            ratios.append((seen.compute[True] / seen.compute[False], said[True] / said[False]))


def report(rows: Mapping[str, Row], ratios: list[tuple[float, float]]) -> dict[str, Any]:
    """Figures for the JSON line, printed as a table, too."""
    found: list[dict[str, Any]] = []
    for name, row in rows.items():
        error, replayed = row.error(), row.replay_error()
        measured, said = median(row.measured) / 1e6, median(row.simulated) / 1e6
        found.append({"layout": name, "measured_ms": measured, "simulated_ms": said, "error": error.median,
                      "errors": error, "replay_error": replayed.median})  # fmt: skip
        print(f"{name:48} measured {measured:8.1f} ms, simulated {said:8.1f} ms, error {error.median:+.1%} "
              f"({error.low:+.1%} to {error.high:+.1%}), replayed {replayed.median:+.1%}", flush=True)  # fmt: skip
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
    parser.add_argument("--steps", type=int, default=10, help="of each job, before the loss and again after it")
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
