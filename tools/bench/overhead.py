"""Cost of elasticity while nothing fails: mirrors, votes, heartbeats, verification, as shares of a step.

    python -m tools.bench.overhead [--ranks 4] [--batch 16] [--hidden 128] [--trials 3] [--mirrors 1]
        [--verify-interval 100]

Two measurements on the quickstart's model, data parallel over all ranks:

share      CPU time, rank by rank and step by step, of work that a run without elasticity would not do
           (packing and sealing shipped gradients, keeping them, replaying mirrored blocks, voting,
           publishing activity), over the CPU time of the whole step. Waiting is not cost, and the
           other processes of the machine do not count
replaced   CPU time of plain Megatron, in the same job, on norms of gradients and on the check that they are
           finite, which the vote does here, over the CPU time of a step with elasticity
step_ratio wall time of a step with mirrors and verification over that of the same job without,
           run in turn, pair by pair

The vote is counted in full in ``share``, though a run without elasticity does what it replaces; ``beyond_replaced`` is
the total without that. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench._common import median_of, print_result
from tools.bench._jobs import QUIET, ROOT, command, finished

WORKER = str(ROOT / "tools" / "bench" / "_overhead_worker.py")
PLAIN_WORKER = str(ROOT / "tools" / "bench" / "_overhead_plain_worker.py")
STEPS = 28
MODEL = QUIET + shlex.split("""
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --micro-batch-size 1 --calculate-per-token-loss --vocab-size 2047
    --attention-dropout 0.1 --hidden-dropout 0.1
""")
"""The quickstart's sizes (``tools/quickstart.py``); synthetic data, so that nothing has to be prepared."""
BATCH, LENGTH, HIDDEN = 16, 128, 128
"""Sequences of a step there, tokens of each, and the hidden size."""
COSTS = ("ship", "checksums", "retain", "replay_mirrored", "vote", "publish")
REPLACED = ("norm", "finite")


def run(ranks: int, batch: int, *flags: str, script: str = WORKER) -> list[dict[str, Any]]:
    """One job; the counts of each rank. Raises ``RuntimeError`` with its output when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = ("--global-batch-size", str(batch), "--train-iters", str(STEPS))
        job = command(ranks, *MODEL, *sizes, *flags, script=script)
        finished(job, OVERHEAD_OUT=folder)
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]


def step_seconds(reports: list[dict[str, Any]]) -> float:
    """Return the CPU time of a step, all ranks together."""
    return math.fsum(statistics.mean(report["process_seconds"]) for report in reports)


def shares(reports: list[dict[str, Any]], names: Sequence[str], whole: float) -> dict[str, float]:
    """Return the shares of ``whole`` that all ranks together spend on the clocks ``names``, and their sum."""
    spent = {name: sum(report["cpu_seconds"].get(name, 0.0) for report in reports) / whole for name in names}
    return {**spent, "total": sum(spent.values())}


def main() -> None:
    """Parse, run in turn, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=BATCH, help="sequences of a step, 128 tokens each")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="hidden size, a multiple of 32")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--mirrors", type=int, default=1)
    parser.add_argument("--verify-interval", type=int, default=100)
    options = parser.parse_args()
    verified = ("--elastic-verify-interval", str(options.verify_interval))
    sizes = ("--hidden-size", str(options.hidden), "--num-attention-heads", str(options.hidden // 32))
    on = (*sizes, "--elastic", "--elastic-mirrors", str(options.mirrors), *verified)
    off = (*sizes, "--elastic", "--elastic-mirrors", "0", "--elastic-verify-interval", "0")
    measured: list[dict[str, float]] = []
    replaced: list[dict[str, float]] = []
    walls: dict[str, list[float]] = {"with": [], "without": []}
    last: list[dict[str, Any]] = []
    for _ in range(options.trials):
        last, bare = run(options.ranks, options.batch, *on), run(options.ranks, options.batch, *off)
        plain = run(options.ranks, options.batch, *sizes, "--use-distributed-optimizer", script=PLAIN_WORKER)
        whole = step_seconds(last)
        measured.append(shares(last, COSTS, whole))
        replaced.append(shares(plain, REPLACED, whole))
        for name, reports in (("with", last), ("without", bare)):
            walls[name].append(statistics.median(seconds for report in reports for seconds in report["step_seconds"]))
        print(f"share {measured[-1]['total']:.3f}, step {walls['with'][-1]:.4f} s", file=sys.stderr, flush=True)
    print_result(
        "overhead",
        {
            "ranks": options.ranks,
            "tokens": options.batch * LENGTH,
            "hidden": options.hidden,
            "mirrors": options.mirrors,
            "verify_interval": options.verify_interval,
            "share": {name: median_of([trial[name] for trial in measured]) for name in measured[0]},
            "replaced": {name: median_of([trial[name] for trial in replaced]) for name in replaced[0]},
            "beyond_replaced": median_of([a["total"] - b["total"] for a, b in zip(measured, replaced, strict=True)]),
            "step_seconds": {name: median_of(values) for name, values in walls.items()},
            "step_ratio": median_of([a / b for a, b in zip(walls["with"], walls["without"], strict=True)]),
            "publishes_a_step": statistics.mean(report["calls"].get("publish", 0.0) for report in last),
            "host_bytes_a_parameter": statistics.mean(r["bytes_held"] / r["parameters"] for r in last),
        },
    )


if __name__ == "__main__":
    main()
