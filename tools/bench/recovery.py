"""Time to recover: from the loss of a process to the next committed step, beyond a normal step.

    python -m tools.bench.recovery [--losses 5] [--ranks 8] [--point mid_backward] [--signals kill,stop]

For each signal and communicator (the gloo baseline, which rebuilds every group, in the
same run) one real job under the launcher, default settings: pipeline 2, the rest data
parallel. Ranks of both stages are lost one after the other, each when the one before is
back and some steps have passed with all ranks. Per loss, from the event logs:

overhead    from the signal to the next committed step, less the median step with all ranks present
redone      apart from it: work of the step from before the signal that was computed again
detect      from the signal to the first survivor that reports
phases      of the slowest survivor: decide, edit, plan, settle (and freeze, where it is told apart)
recovering  from the signal until the slowest survivor goes on: detect and phases
state bytes received by any rank between the two commits: new copies, beside the step; no rank waits for them
lost steps  that some survivor knew to be committed and that were not kept

The last line is one JSON object: medians over the losses.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.elastic.observe.events import EventRecord, read_events
from tools.bench._common import median_of, print_result
from tools.bench._jobs import QUIET, ROOT, command, environment, faults

MANY_STEPS, PATIENCE = 2000, 600.0
WHOLE_STEPS = 6
"""Steps with all ranks present before each loss, of which the normal step is the median."""
DRAINED = 3

MODEL = QUIET + shlex.split("""
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --micro-batch-size 2 --global-batch-size 32 --vocab-size 1023
""")


@dataclass(frozen=True)
class Loss:
    """One loss: seconds, bytes, steps."""

    rank: int
    step: int
    overhead: float
    redone: float
    detect: float
    phases: dict[str, float]
    state_bytes: int
    lost_steps: int
    normal_step: float
    """Of the job it happened in."""


def run_job(comm: str, ranks: int, point: str, kind: str, victims: Sequence[int]) -> list[Loss]:
    """One job that loses ``victims`` in turn. Raises ``RuntimeError`` with its output when it does not get there."""
    return read_losses(*job_of_losses(comm, ranks, point, kind, victims, MODEL), ranks)


def job_of_losses(
    comm: str, ranks: int, point: str, kind: str, victims: Sequence[int], model: Sequence[str]
) -> tuple[list[EventRecord], str]:
    """Events and output of such a job. Raises ``RuntimeError`` with its output when it does not get there."""
    script = [
        f"{kind}:rank={rank},losses={number},wait={WHOLE_STEPS},point={point}" for number, rank in enumerate(victims)
    ]
    with tempfile.TemporaryDirectory() as folder:
        shape = ("--pipeline-model-parallel-size", "2", "--train-iters", str(MANY_STEPS))
        elastic = ("--elastic", "--elastic-comm", comm, "--elastic-event-log", folder)
        job = command(ranks, *model, *shape, *elastic, *faults(";".join(script)))
        output = _run_until_whole(job, len(victims), Path(folder) / "output.txt")
        return read_events(folder), output


def _run_until_whole(line: list[str], losses: int, said: Path) -> str:
    end = time.monotonic() + PATIENCE
    with said.open("w") as out:
        job = subprocess.Popen(line, cwd=ROOT, env=environment(), stdout=out, stderr=subprocess.STDOUT)
    try:
        while job.poll() is None and time.monotonic() < end:
            if len(re.findall(r"joined by \d+", said.read_text())) >= losses:
                job.send_signal(signal.SIGTERM)
                job.wait(max(1.0, end - time.monotonic()))
            time.sleep(0.5)
    finally:
        if job.poll() is None:
            job.kill()
        job.wait()
    if job.returncode != DRAINED:
        raise RuntimeError(f"exit code {job.returncode}\n{said.read_text()[-6000:]}")
    return said.read_text()


def read_losses(events: list[EventRecord], output: str, ranks: int) -> list[Loss]:
    """Figures of every loss in a run's events and output (which says when each signal was sent)."""
    commits = {record.fields["step"]: record for record in events if record.kind == "step"}
    gaps = {step: now.wall - commits[step - 1].wall for step, now in commits.items() if step - 1 in commits}
    whole = {r.generation for r in events if r.kind == "generation" and len(r.fields["members"]) == ranks}
    first = min(record.generation for record in commits.values())
    quiet = [
        step
        for step in gaps
        if commits[step].generation == commits[step - 1].generation in (whole | {first}) and step > 3
    ]
    normal = statistics.median(gaps[step] for step in quiet)
    sent = re.findall(r"injected \w+: rank (\d+), step (\d+), .*wall time ([\d.]+)", output)
    losses = []
    for rank, step, at in ((int(rank), int(step), float(at)) for rank, step, at in sent):
        after = [r for r in events if r.kind == "recovery" and r.wall > at]
        recoveries = [r for r in after if r.fields["step"] in (step, step - 1)]
        generation = min(record.generation for record in recoveries)
        mine = [record for record in recoveries if record.generation == generation]
        slowest = max(mine, key=lambda record: sum(record.fields["seconds"].values())).fields["seconds"]
        losses.append(
            Loss(
                rank=rank,
                step=step,
                overhead=commits[step].wall - at - normal,
                redone=at - commits[step - 1].wall,
                detect=min(r.wall - sum(r.fields["seconds"].values()) for r in mine) - at,
                phases=slowest,
                state_bytes=_state_bytes(events, step),
                lost_steps=max(record.fields["lost_steps"] for record in mine),
                normal_step=normal,
            )
        )
    return losses


def _state_bytes(events: list[EventRecord], step: int) -> int:
    """Bytes of state received by all survivors between the commits of ``step - 1`` and ``step``."""
    counts = {
        (record.rank, record.incarnation, record.fields["step"]): record.fields["state_bytes"]
        for record in events
        if record.kind == "phases" and record.fields["step"] in (step - 1, step)
    }
    return sum(
        after - counts[rank, life, step - 1]
        for (rank, life, at), after in counts.items()
        if at == step and (rank, life, step - 1) in counts
    )


def figures(losses: list[Loss]) -> dict[str, object]:
    """Medians over losses; the worst value of figures that must be 0."""
    names = dict.fromkeys(name for loss in losses for name in loss.phases)
    return {
        "losses": len(losses),
        "overhead_s": median_of([loss.overhead for loss in losses]),
        "redone_s": median_of([loss.redone for loss in losses]),
        "detect_s": median_of([loss.detect for loss in losses]),
        "recovering_s": median_of([loss.detect + sum(loss.phases.values()) for loss in losses]),
        "normal_step_s": losses[0].normal_step,
        "phases_s": {name: statistics.median(loss.phases.get(name, 0.0) for loss in losses) for name in names},
        "state_bytes_beside_the_step": max(loss.state_bytes for loss in losses),
        "lost_steps": max(loss.lost_steps for loss in losses),
    }


def main() -> None:
    """Parse, run the jobs in turn, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--losses", type=int, default=5, help="Losses a job.")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--point", default="mid_backward")
    parser.add_argument("--signals", default="kill,stop", help="kill (SIGKILL), stop (SIGSTOP).")
    parser.add_argument("--comms", default="elastic,gloo")
    options = parser.parse_args()
    # Odd steps visit ranks of both stages, rank 0 among them.
    victims = [(3 * number) % options.ranks for number in range(options.losses)]
    results: dict[str, dict[str, object]] = {}
    for kind in options.signals.split(","):
        for comm in options.comms.split(","):
            losses = run_job(comm, options.ranks, options.point, kind, victims)
            for loss in losses:
                print(f"{kind} {comm}: {loss}", file=sys.stderr, flush=True)
            results.setdefault(kind, {})[comm] = figures(losses)
    model = {"layout": f"tp1 pp2 dp{options.ranks // 2}", "flags": " ".join(MODEL)}
    print_result("recovery", {"ranks": options.ranks, "point": options.point, **model, **results})


if __name__ == "__main__":
    main()
