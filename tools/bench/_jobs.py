"""Real training jobs, as the benches start them: one command, its output, its event log.

Benches say which model, how many ranks and which flags; how a job is started, in which environment, and what
becomes of one that fails is the same for all.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "LAUNCH",
    "PRETRAIN",
    "QUIET",
    "ROOT",
    "TORCHRUN",
    "command",
    "environment",
    "faults",
    "finished",
    "followed",
    "waits",
]

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = str(ROOT / "pretrain_gpt.py")
LAUNCH, TORCHRUN = "megatron.elastic.launch", "torch.distributed.run"

QUIET = shlex.split("""
    --mock-data --tokenizer-type NullTokenizer --log-interval 1 --eval-iters 0 --eval-interval 100000
    --num-workers 0 --seed 11 --lr 1e-3
""")
"""Synthetic data, every step logged, nothing evaluated."""


def command(ranks: int, *flags: str, module: str = LAUNCH, script: str = PRETRAIN) -> list[str]:
    """``script`` with ``flags`` on ``ranks`` processes of this machine, under ``module``."""
    # torchrun leaves a folder behind unless told not to; our launcher takes any free port, so that jobs may run at once
    own = ("--log-dir", os.devnull) if module == TORCHRUN else ("--master-port", "0")
    return [sys.executable, "-m", module, "--nproc-per-node", str(ranks), *own, script, *flags]


def faults(script: str) -> tuple[str, ...]:
    """Flags for a fault script."""
    return "--elastic-allow-inject", "--elastic-inject", script


def waits(seconds: float) -> list[str]:
    """Faults by which each forward and backward of every rank waits ``seconds``; none if that is 0."""
    points = ("mid_forward", "mid_backward") if seconds else ()
    return [f"delay:point={point},incarnation=*,count=0,seconds={seconds}" for point in points]


def environment(**more: str) -> dict[str, str]:
    """This process's, with the repository importable and one thread a rank."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def finished(job: Sequence[str], seconds: float = 400.0, **more: str) -> str:
    """The output of ``job`` on stdout. Raises ``RuntimeError`` with the end of its output when it fails."""
    done = subprocess.run(
        job, cwd=ROOT, env=environment(**more), capture_output=True, text=True, timeout=seconds, check=False
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def followed(job: Sequence[str], seconds: float = 400.0, ended: str = "", **more: str) -> list[tuple[float, str]]:
    """Every line ``job`` wrote to stdout, and when it came (monotonic seconds). Raises as :func:`finished` does.

    ``ended``: words by which the job tells that it is done; if one is given, the exit status does not matter after it.
    """
    with subprocess.Popen(
        job,
        cwd=ROOT,
        env=environment(PYTHONUNBUFFERED="1", **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        late = threading.Timer(seconds, running.kill)
        late.start()
        try:
            assert running.stdout is not None
            lines = [(time.monotonic(), line) for line in running.stdout]
        finally:
            late.cancel()
    done = bool(ended) and any(ended in line for _, line in lines)
    if running.returncode and not done:
        raise RuntimeError(f"exit code {running.returncode}\n" + "".join(line for _, line in lines[-60:]))
    return lines
