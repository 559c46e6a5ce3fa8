"""Checkpoints are Megatron's: written under --elastic and resumed without it, and the other way round, elsewhere.

Losses after resuming, optimizer included, are those of a run that was never
interrupted (dropout 0; Megatron's second log line after a start averages the
first two steps, so steps are compared from the third on).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.elastic_job import MODEL, elastic_job, largest_deviation
from tests.integration.test_cpu_layouts import logs, losses, run_jobs

SAVED_AT, STEPS = 3, 7
QUIET = ("--hidden-dropout", "0", "--attention-dropout", "0", "--lr-decay-iters", "8")
FORMATS = {
    "fp32": (),
    "bf16-distributed-optimizer": ("--bf16", "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"),
}
ROUNDING = {"fp32": 2e-6, "bf16-distributed-optimizer": 2e-4}


def saving(folder: Path) -> tuple[str, ...]:
    return ("--save", str(folder), "--save-interval", str(SAVED_AT), "--exit-interval", str(SAVED_AT))


def plain_job(name: str, world: int, pipeline: int, *flags: str) -> dict[str, Any]:
    arguments = [*MODEL, *QUIET, "--pipeline-model-parallel-size", str(pipeline), "--train-iters", str(STEPS), *flags]
    return {"name": name, "world": world, "seconds": 200, "arguments": arguments}


def tail(values: dict[int, float]) -> dict[int, float]:
    return {step: loss for step, loss in values.items() if step > SAVED_AT + 2}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_either_resumes_what_the_other_wrote(tmp_path: Path, kind: str) -> None:
    flags = FORMATS[kind]
    written = elastic_job(tmp_path / "events", 4, 1, 2, STEPS, *QUIET, *flags, *saving(tmp_path / "ours"))
    assert written.code == 0, written.output[-4000:]
    plain = [
        plain_job("straight", 2, 2, *flags),
        plain_job("writes", 2, 2, *flags, *saving(tmp_path / "theirs")),
        plain_job("resumes-ours", 2, 1, *flags, "--load", str(tmp_path / "ours")),
    ]
    codes = run_jobs(tmp_path, plain)
    assert all(set(ranks) == {0} for ranks in codes.values()), (codes, logs(tmp_path, "resumes-ours")[-3000:])
    straight = tail(losses(logs(tmp_path, "straight")))
    assert len(straight) == STEPS - SAVED_AT - 2
    resumed = elastic_job(tmp_path / "later", 4, 2, 1, STEPS, *QUIET, *flags, "--load", str(tmp_path / "theirs"))
    assert resumed.code == 0, resumed.output[-4000:]
    assert largest_deviation(straight, tail(losses(logs(tmp_path, "resumes-ours")))) < ROUNDING[kind]
    assert largest_deviation(straight, tail(resumed.losses)) < ROUNDING[kind]
