"""With --elastic and nothing failing, losses and gradient norms are Megatron's own, to fp32 rounding.

The same flags run under plain Megatron-LM (``torchrun``'s environment, its DDP,
its schedules, its Adam) and under the engine; dropout 0, seven printed digits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.elastic_job import MODEL, elastic_job, largest_deviation
from tests.integration.test_cpu_layouts import gradient_norms, logs, losses, run_jobs

STEPS = 5
ROUNDING = 2e-6
CASES: dict[str, tuple[int, int, int, tuple[str, ...]]] = {
    "pp2dp2-untied-recompute-clip": (
        4, 1, 2,
        ("--untie-embeddings-and-output-weights", "--recompute-granularity", "full", "--recompute-method", "uniform",
         "--recompute-num-layers", "1", "--clip-grad", "0.5", "--eod-mask-loss"),
    ),
    "tp2pp2-per-token-uneven-masks": (
        4, 2, 2, ("--calculate-per-token-loss", "--eod-mask-loss", "--sequence-parallel"),
    ),
    "dp4-tied": (4, 1, 1, ()),
}  # fmt: skip
PLAIN_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0", "--train-iters", str(STEPS))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs of every case under plain Megatron."""
    folder = tmp_path_factory.mktemp("plain")
    jobs: list[dict[str, Any]] = [
        {
            "name": name, "world": world, "seconds": 240,
            "arguments": [*MODEL, *PLAIN_DROPOUT, *flags, "--tensor-model-parallel-size", str(tensor),
                          "--pipeline-model-parallel-size", str(pipeline)],
        }
        for name, (world, tensor, pipeline, flags) in CASES.items()
    ]  # fmt: skip
    codes = run_jobs(folder, jobs)
    assert all(set(ranks) == {0} for ranks in codes.values()), codes
    return folder


@pytest.mark.parametrize("name", CASES)
def test_losses_and_norms_are_megatrons(plain: Path, tmp_path: Path, name: str) -> None:
    world, tensor, pipeline, flags = CASES[name]
    result = elastic_job(tmp_path, world, tensor, pipeline, STEPS, *flags, "--hidden-dropout", "0",
                         "--attention-dropout", "0")  # fmt: skip
    assert result.code == 0, result.output[-6000:]
    reference = losses(logs(plain, name))
    assert len(reference) == STEPS
    assert largest_deviation(reference, result.losses) < ROUNDING
    theirs, ours = gradient_norms(logs(plain, name)), list(result.norms.values())
    assert all(abs(float(a) - b) <= 1.01e-3 for a, b in zip(theirs, ours, strict=True)), (theirs, ours)
