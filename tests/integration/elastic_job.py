"""Runs one elastic training job under the launcher, and reads what it printed and logged."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.elastic.control import env
from megatron.elastic.observe.events import EventRecord, read_events
from tests.integration.launcher import ROOT as ROOT
from tests.integration.launcher import start_launcher

SECRET = secrets.token_hex(16)
"""Of every job that these tests start."""

MODEL = shlex.split("""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 1
    --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --log-interval 1 --eval-interval 1000 --eval-iters 0
    --split 98,1,1 --make-vocab-size-divisible-by 64 --num-workers 0 --seed 7 --ckpt-format torch_dist
""")


@dataclass
class JobResult:
    """Exit status, output and events of a finished job."""

    code: int
    output: str
    events: list[EventRecord] = field(default_factory=list)

    @property
    def losses(self) -> dict[int, float]:
        """Iteration → loss as Megatron's log prints it."""
        return {int(i): float(v) for i, v in re.findall(r"iteration\s+(\d+)/.*?lm loss: (\S+)", self.output)}

    @property
    def committed(self) -> dict[int, float]:
        """Step → loss from the event log (all digits), of the steps that were computed."""
        steps = [record.fields for record in self.of("step")]
        return {step["step"]: step["losses"]["lm loss"] for step in steps if step["losses"]}

    @property
    def validation(self) -> dict[int, float]:
        """Iteration → validation loss as printed in the loop."""
        found = re.findall(r"loss at iteration (\d+) \| lm loss value: (\S+)", self.output)
        return {int(step): float(loss) for step, loss in found}

    @property
    def norms(self) -> dict[int, float]:
        """Iteration → gradient norm as printed."""
        return {int(i): float(v) for i, v in re.findall(r"iteration\s+(\d+)/.*?grad norm: (\S+)", self.output)}

    def of(self, kind: str) -> list[EventRecord]:
        """Events of one kind."""
        return [record for record in self.events if record.kind == kind]


def elastic_command(
    folder: Path,
    world: int,
    tensor: int,
    pipeline: int,
    iterations: int,
    *flags: str,
    comm: str = "elastic",
    launch: tuple[str, ...] = (),
    script: Path = ROOT / "pretrain_gpt.py",
    model: Sequence[str] = MODEL,
) -> list[str]:
    """The command line of a job of ``world`` ranks; events go to ``folder``. Without ``iterations``, flags end it."""
    return [
        sys.executable,
        "-m",
        "megatron.elastic.launch",
        "--nproc-per-node",
        str(world),
        *launch,
        str(script),
        *model,
        "--tensor-model-parallel-size",
        str(tensor),
        "--pipeline-model-parallel-size",
        str(pipeline),
        *(("--train-iters", str(iterations)) if iterations else ()),
        "--elastic",
        "--elastic-comm",
        comm,
        "--elastic-event-log",
        str(folder),
        *flags,
    ]


def environment_of(more: dict[str, str] | None = None) -> dict[str, str]:
    """Of every job, and ``more``."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", env.SECRET: SECRET, **(more or {})}


def elastic_job(
    folder: Path,
    world: int,
    tensor: int,
    pipeline: int,
    iterations: int,
    *flags: str,
    comm: str = "elastic",
    seconds: float = 240.0,
    launch: tuple[str, ...] = (),
    script: Path = ROOT / "pretrain_gpt.py",
    environment: dict[str, str] | None = None,
    model: Sequence[str] = MODEL,
) -> JobResult:
    """One finished job of ``world`` ranks; events go to ``folder``."""
    command = elastic_command(
        folder, world, tensor, pipeline, iterations, *flags, comm=comm, launch=launch, script=script, model=model
    )
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        launcher = start_launcher(command, environment_of(environment), out)
        try:
            code = launcher.wait(seconds)
        finally:
            launcher.kill()
            launcher.wait()
        out.seek(0)
        return JobResult(code, out.read(), read_events(folder) if folder.is_dir() else [])


class RunningJob:
    """A job under way, to be signalled, asked and waited for. Leaves no process behind."""

    def __init__(
        self,
        folder: Path,
        command: list[str],
        seconds: float = 240.0,
        environ: dict[str, str] | None = None,
        named: bool = True,
    ) -> None:
        self.folder = folder
        self.run_id = uuid.uuid4().hex[:12]
        if named:  # else something else names the job
            at = command.index("--nproc-per-node")
            command = [*command[:at], "--rdzv-id", self.run_id, *command[at:]]
        self._end = time.monotonic() + seconds
        self._lines: list[str] = []
        self._more = threading.Condition()
        self.launcher = start_launcher(command, environ or environment_of())
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.launcher.stdout is not None
        for line in self.launcher.stdout:
            with self._more:
                self._lines.append(line)
                self._more.notify_all()
        with self._more:
            self._more.notify_all()

    @property
    def output(self) -> str:
        """Everything printed so far."""
        with self._more:
            return "".join(self._lines)

    def wait_for(self, pattern: str, after: int = 0) -> re.Match[str]:
        """The first place from ``after`` on in the output that ``pattern`` matches within a line.

        Fails when the job ends or time is up first.
        """
        compiled = re.compile(pattern)
        while True:
            ended = not self._reader.is_alive()
            text = self.output
            found = compiled.search(text, after)
            if found:
                return found
            left = self._end - time.monotonic()
            assert not ended and left > 0, f"{pattern!r} not seen, job ended: {ended}\n{text[-4000:]}"
            with self._more:
                self._more.wait(min(left, 1.0))

    def ctl(self, *words: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """One request to this job's launcher."""
        return subprocess.run(
            [sys.executable, "-m", "megatron.elastic.ctl", *words, "--run-id", self.run_id],
            cwd=ROOT,
            env=environment_of(),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def finish(self) -> JobResult:
        """Wait for the end."""
        code = self.launcher.wait(max(1.0, self._end - time.monotonic()))
        self._reader.join(10)
        return JobResult(code, self.output, read_events(self.folder) if self.folder.is_dir() else [])

    def __enter__(self) -> RunningJob:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.launcher.poll() is None:
            self.launcher.kill()
            self.launcher.wait()


def deviation_without_loss(whole: JobResult, killed: JobResult) -> float:
    """The largest relative deviation of a loss. Asserts that no step was lost and each had the samples of ``whole``."""
    assert (whole.code, killed.code) == (0, 0), killed.output[-6000:]
    assert all(record.fields["lost_steps"] == 0 for record in killed.of("recovery"))
    ledgers = [{r.fields["step"]: r.fields["ledger"] for r in run.of("step")} for run in (whole, killed)]
    assert ledgers[0] == ledgers[1]
    return largest_deviation(whole.committed, killed.committed)


def largest_deviation(reference: dict[int, float], other: dict[int, float]) -> float:
    """Largest relative difference over the steps of the reference; a missing step is infinite."""
    return max(abs(other.get(step, float("inf")) - value) / abs(value) for step, value in reference.items())
