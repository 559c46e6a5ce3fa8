"""Runs one elastic training job under the launcher, and reads what it printed and logged."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from megatron.elastic.observe.events import Record, read_events

ROOT = Path(__file__).resolve().parents[2]

MODEL = shlex.split("""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 1
    --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --log-interval 1 --eval-interval 1000 --eval-iters 0
    --split 98,1,1 --make-vocab-size-divisible-by 64 --num-workers 0 --seed 7 --ckpt-format torch_dist
""")


@dataclass
class JobResult:
    """What a finished job left behind."""

    code: int
    output: str
    events: list[Record] = field(default_factory=list)

    @property
    def losses(self) -> dict[int, float]:
        """Iteration → loss as Megatron's log prints it."""
        return {int(i): float(v) for i, v in re.findall(r"iteration\s+(\d+)/.*?lm loss: (\S+)", self.output)}

    @property
    def committed(self) -> dict[int, float]:
        """Step → loss from the event log (all digits)."""
        steps = [r.event for r in self.events if r.kind == "step"]
        return {event.step: event.losses["lm loss"] for event in steps if event is not None}  # type: ignore[attr-defined]

    @property
    def validation(self) -> dict[int, float]:
        """Iteration → validation loss as printed in the loop."""
        found = re.findall(r"loss at iteration (\d+) \| lm loss value: (\S+)", self.output)
        return {int(step): float(loss) for step, loss in found}

    @property
    def norms(self) -> dict[int, float]:
        """Iteration → gradient norm as printed."""
        return {int(i): float(v) for i, v in re.findall(r"iteration\s+(\d+)/.*?grad norm: (\S+)", self.output)}

    def of(self, kind: str) -> list[Record]:
        """Events of one kind."""
        return [record for record in self.events if record.kind == kind]


def elastic_command(
    folder: Path, world: int, tensor: int, pipeline: int, iterations: int, *flags: str, comm: str = "elastic",
    launch: tuple[str, ...] = (), script: Path = ROOT / "pretrain_gpt.py",
) -> list[str]:
    """The command line of a job of ``world`` ranks; events go to ``folder``."""
    return [
        sys.executable, "-m", "megatron.elastic.launch", "--nproc-per-node", str(world), *launch,
        str(script), *MODEL,
        "--tensor-model-parallel-size", str(tensor), "--pipeline-model-parallel-size", str(pipeline),
        "--train-iters", str(iterations), "--elastic", "--elastic-comm", comm,
        "--elastic-event-log", str(folder), *flags,
    ]  # fmt: skip


def elastic_job(
    folder: Path, world: int, tensor: int, pipeline: int, iterations: int, *flags: str, comm: str = "elastic",
    seconds: float = 240.0, launch: tuple[str, ...] = (), script: Path = ROOT / "pretrain_gpt.py",
    environment: dict[str, str] | None = None,
) -> JobResult:
    """One finished job of ``world`` ranks; events go to ``folder``."""
    command = elastic_command(
        folder, world, tensor, pipeline, iterations, *flags, comm=comm, launch=launch, script=script
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=seconds, check=False,
    )  # fmt: skip
    return JobResult(done.returncode, done.stdout, read_events(folder) if folder.is_dir() else [])


def largest_deviation(reference: dict[int, float], other: dict[int, float]) -> float:
    """Largest relative difference over the steps of the reference; a missing step is infinite."""
    return max(abs(other.get(step, float("inf")) - value) / abs(value) for step, value in reference.items())
