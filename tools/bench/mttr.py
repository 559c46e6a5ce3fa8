"""Time to recover: from the death of a process to the next committed step, beyond a normal step.

    python -m tools.bench.mttr [--trials 5] [--ranks 8] [--point mid_backward] [--stop]

Each trial is a real job under the launcher, default settings (respawn included),
with one rank killed (SIGKILL; ``--stop``: SIGSTOP) in the middle of a run; the
two communicators take turns, so that the gloo baseline is measured on the same
machine at the same time. From the event logs, per trial:

overhead   interval between the commits around the loss, less the median interval of the steps before it
recovery   from noticing on the slowest survivor until it could go on (decide, edit, plan, settle)
redone     what is left of the overhead: finding out, and computing again what the dead rank had begun

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron.elastic.observe.events import Record, read_events
from tools.bench._common import median_of, print_result

ROOT = Path(__file__).resolve().parents[2]
KILLED_AT, STEPS = 12, 16

MODEL = shlex.split("""
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --micro-batch-size 2 --global-batch-size 32 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 1023
    --log-interval 1 --eval-iters 0 --eval-interval 1000 --num-workers 0 --seed 11
""")


@dataclass(frozen=True)
class Trial:
    """Seconds of one loss."""

    overhead: float
    recovery: float
    normal_step: float
    phases: dict[str, float]
    lost_steps: int


def run_trial(comm: str, ranks: int, point: str, kind: str, victim: int) -> Trial:
    """One job. Raises ``RuntimeError`` with its output when it does not finish."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "megatron.elastic.launch", "--nproc-per-node", str(ranks),
            str(ROOT / "pretrain_gpt.py"), *MODEL, "--pipeline-model-parallel-size", "2",
            "--train-iters", str(STEPS), "--elastic", "--elastic-comm", comm, "--elastic-event-log", folder,
            "--elastic-allow-inject", "--elastic-inject", f"{kind}:rank={victim},step={KILLED_AT},point={point}",
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return read_trial(read_events(folder))


def read_trial(events: list[Record]) -> Trial:
    """Figures of the one loss in a run's events."""
    commits = {r.fields["step"]: r.wall for r in events if r.kind == "step"}
    gaps = {step: commits[step] - commits[step - 1] for step in commits if step - 1 in commits}
    normal = statistics.median(gap for step, gap in gaps.items() if 3 <= step < KILLED_AT)
    first = min(r.generation for r in events if r.kind == "recovery")
    recoveries = [r.fields for r in events if r.kind == "recovery" and r.generation == first]
    slowest = max(recoveries, key=lambda fields: sum(fields["seconds"].values()))
    return Trial(
        overhead=gaps[KILLED_AT] - normal,
        recovery=sum(slowest["seconds"].values()),
        normal_step=normal,
        phases=slowest["seconds"],
        lost_steps=max(fields["lost_steps"] for fields in recoveries),
    )


def figures(trials: list[Trial]) -> dict[str, object]:
    """Medians over trials."""
    return {
        "overhead_s": median_of([t.overhead for t in trials]),
        "recovery_s": median_of([t.recovery for t in trials]),
        "redone_and_detection_s": median_of([t.overhead - t.recovery for t in trials]),
        "normal_step_s": median_of([t.normal_step for t in trials]),
        "phases_s": {name: statistics.median(t.phases[name] for t in trials) for name in trials[0].phases},
        "lost_steps": max(t.lost_steps for t in trials),
    }


def main() -> None:
    """Parse, run the trials in turn, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--point", default="mid_backward")
    parser.add_argument("--stop", action="store_true", help="SIGSTOP instead of SIGKILL")
    options = parser.parse_args()
    kind = "stop" if options.stop else "kill"
    results: dict[str, list[Trial]] = {"elastic": [], "gloo": []}
    for trial in range(options.trials):
        victim = (3 * trial + 1) % options.ranks
        for comm, trials in results.items():
            trials.append(run_trial(comm, options.ranks, options.point, kind, victim))
            print(f"{comm} rank {victim}: {trials[-1]}", file=sys.stderr, flush=True)
    print_result(
        "mttr",
        {
            "ranks": options.ranks, "layout": f"tp1 pp2 dp{options.ranks // 2}", "signal": kind, "point": options.point,
            **{comm: figures(trials) for comm, trials in results.items()},
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
