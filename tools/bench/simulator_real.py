"""The simulator against real training: costs from one layout, predictions for others.

    python -m tools.bench.simulator_real [--steps 12]

Two ranks throughout, so that both cores are as busy in every run. Calibration:
data parallelism with two depths of one model gives what a layer and what
embedding and head cost a micro-batch (backward taken as twice the forward).
Prediction: pipelines of two stages, even and uneven cuts, few and many
micro-batches, by the tables of their plans. Compared is the compute phase of
committed steps (its slowest rank, waits included; the fastest of the steps, since
whatever else runs on the machine only adds): what the simulator claims to know. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from megatron.elastic.observe.events import read_events
from megatron.elastic.plan.model import Profile, UnitCost
from megatron.elastic.plan.planner import nominal_plan
from megatron.elastic.plan.timing import plan_time
from megatron.elastic.plan.topology import regular_topology
from tools.bench._common import print_result

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 3
MODEL = shlex.split("""
    --hidden-size 192 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2
    --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --log-interval 1 --eval-iters 0
    --eval-interval 1000 --num-workers 0 --seed 11
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


CALIBRATION = (Layout(1, 4, 4), Layout(1, 8, 4))
PREDICTED = (Layout(2, 8, 4), Layout(2, 8, 8), Layout(2, 8, 6, 3), Layout(2, 12, 4))


def compute_ns(layout: Layout, steps: int) -> float:
    """Fastest step's compute phase, on its slowest rank. Raises ``RuntimeError`` when the job fails."""
    with tempfile.TemporaryDirectory(prefix="simulator-") as folder:
        command = [
            sys.executable, "-m", "megatron.elastic.launch", "--nproc-per-node", "2", str(ROOT / "pretrain_gpt.py"),
            *MODEL, *layout.flags(), "--train-iters", str(steps), "--elastic", "--elastic-event-log", folder,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        slowest: dict[int, int] = {}
        for record in read_events(Path(folder)):
            if record.kind == "phases":
                step = record.fields["step"]
                slowest[step] = max(slowest.get(step, 0), record.fields["nanoseconds"]["compute"])
    return float(min(spent for step, spent in slowest.items() if step > WARM_UP))


def calibrated(times: dict[Layout, float]) -> tuple[float, float]:
    """ns a micro-batch: (a layer, embedding and head together)."""
    few, many = CALIBRATION
    each = {layout: times[layout] / layout.microbatches for layout in CALIBRATION}
    layer = (each[many] - each[few]) / (many.layers - few.layers)
    return layer, each[few] - few.layers * layer


def predicted_ns(layout: Layout, layer: float, ends: float) -> int:
    """The simulator's compute phase of ``layout``: its nominal tables with calibrated costs.

    The head is next to all of what both ends cost; the embedding is a lookup.
    """

    def unit(cost: float) -> UnitCost:
        forward = max(1, round(cost / 3 / 2))  # a row; two rows a micro-batch
        return UnitCost(forward, 2 * forward, forward, 0, 0, 1, 0)

    units = (unit(0.0), *(unit(layer) for _ in range(layout.layers)), unit(ends))
    first = layout.layers // 2 if layout.first_stage is None else layout.first_stage
    cuts = (0, 1 + first, len(units))
    topology = regular_topology(1, 2, len(units), micro_batch_size=2, waves=layout.microbatches, cuts=cuts)
    profile = Profile(units, latency_ns=0)
    return plan_time(nominal_plan(topology, profile), profile)


def main() -> None:
    """Calibrate, predict, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    times = {layout: compute_ns(layout, options.steps) for layout in CALIBRATION}
    layer, ends = calibrated(times)
    print(f"calibrated: {layer / 1e6:.2f} ms a layer and micro-batch, {ends / 1e6:.2f} ms embedding and head")
    rows = []
    for layout in PREDICTED:
        measured, said = compute_ns(layout, options.steps), predicted_ns(layout, layer, ends)
        rows.append({"layout": str(layout), "measured_ms": measured / 1e6, "simulated_ms": said / 1e6,
                     "error": said / measured - 1})  # fmt: skip
        print(f"{layout!s:44} measured {measured / 1e6:8.1f} ms, simulated {said / 1e6:8.1f} ms, "
              f"error {said / measured - 1:+.1%}", flush=True)  # fmt: skip
    errors = [abs(float(row["error"])) for row in rows]
    print_result(
        "simulator_real",
        {
            "calibration": {"layer_ms": layer / 1e6, "ends_ms": ends / 1e6},
            "rows": rows,
            "median_error": median(errors),
            "worst_error": max(errors),
        },
    )


if __name__ == "__main__":
    main()
