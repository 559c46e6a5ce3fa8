"""Cost of ``--elastic-exact``: a step in exact mode beside a step in the default mode, by size of the model.

    python -m tools.bench.exact [--trials 3] [--steps 24] [--hidden 128,256,512] [--micro-batches 1,4]

Each case trains the quickstart's model with synthetic data in both modes, in turn, so that noise of the machine
affects each alike. ``quickstart`` is the quickstart's layout (PP 2 × DP 4); the others run at PP 2 × DP 2, one for
each hidden size and micro-batch size. Two ratios a case, of exact over default, pair by pair:

step   wall time of a step, median over steps and ranks
cpu    processor time of a step, all ranks together; other processes of the machine count less in it

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench._common import Spread, median_of, print_result
from tools.bench._jobs import QUIET, ROOT, command, finished
from tools.quickstart import MODEL, TRAINING, VOCABULARY

WORKER = str(ROOT / "tools" / "bench" / "_overhead_worker.py")
MODES: dict[str, tuple[str, ...]] = {"default": (), "exact": ("--elastic-exact",)}


@dataclass(frozen=True)
class Case:
    """A layout of two stages and the flags by which its model differs from the quickstart's."""

    name: str
    replicas: int
    hidden: int | None = None
    micro_batch: int | None = None

    def flags(self) -> Iterator[str]:
        """Flags of the job, without the mode."""
        yield from (*QUIET, *MODEL, *TRAINING, "--vocab-size", str(VOCABULARY - 1))
        yield from ("--elastic", "--pipeline-model-parallel-size", "2")
        if self.hidden is not None:
            yield from ("--hidden-size", str(self.hidden), "--num-attention-heads", str(self.hidden // 32))
        if self.micro_batch is not None:
            yield from ("--micro-batch-size", str(self.micro_batch))


@dataclass(frozen=True)
class Step:
    """One run: seconds of a step, and processor seconds of all ranks together."""

    wall: float
    cpu: float


def cases(hidden: str, micro_batches: str) -> list[Case]:
    """The quickstart, then each hidden size with each micro-batch size. Raises ``ValueError`` for no numbers."""
    sizes = [(int(size), int(rows)) for rows in micro_batches.split(",") for size in hidden.split(",")]
    return [Case("quickstart", 4), *(Case(f"hidden {size}, micro-batch {rows}", 2, size, rows) for size, rows in sizes)]


def run(case: Case, mode: str, steps: int) -> Step:
    """One job. Raises ``RuntimeError`` with its output when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        flags = (*case.flags(), *MODES[mode], "--train-iters", str(steps))
        finished(command(2 * case.replicas, *flags, script=WORKER), OVERHEAD_OUT=folder)
        reports: list[dict[str, Any]] = [json.loads(path.read_text()) for path in Path(folder).glob("rank*.json")]
    return Step(
        statistics.median(seconds for report in reports for seconds in report["step_seconds"]),
        sum(statistics.median(report["process_seconds"]) for report in reports),
    )


def compare(case: Case, trials: int, steps: int) -> dict[str, Any]:
    """The figures of one case."""
    found: dict[str, list[Step]] = {mode: [] for mode in MODES}
    for _ in range(trials):
        for mode, done in found.items():
            done.append(run(case, mode, steps))
            print(
                f"{case.name}, {mode}: {done[-1].wall * 1e3:.1f} ms, cpu {done[-1].cpu * 1e3:.1f} ms", file=sys.stderr
            )
    pairs = list(zip(found["exact"], found["default"], strict=True))
    ratios = {"step": [a.wall / b.wall for a, b in pairs], "cpu": [a.cpu / b.cpu for a, b in pairs]}
    spreads: dict[str, dict[str, Spread]] = {
        "step_seconds": {mode: median_of([step.wall for step in done]) for mode, done in found.items()},
        "cpu_seconds": {mode: median_of([step.cpu for step in done]) for mode, done in found.items()},
        "ratio": {name: median_of(values) for name, values in ratios.items()},
    }
    return {"case": case.name, "ranks": 2 * case.replicas, **spreads}


def main() -> None:
    """Parse, run in turn, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--hidden", default="128,256,512", help="hidden sizes, multiples of 32; heads have 32 elements")
    parser.add_argument("--micro-batches", default="1,4", help="micro-batch sizes")
    options = parser.parse_args()
    chosen = cases(options.hidden, options.micro_batches)
    print_result("exact", {"cases": [compare(case, options.trials, options.steps) for case in chosen]})


if __name__ == "__main__":
    main()
