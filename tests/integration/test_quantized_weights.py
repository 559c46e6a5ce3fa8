"""Layers that keep 8-bit copies of their weights make them anew in each step: losses are plain Megatron's.

Transformer Engine needs a GPU. Real jobs on a CPU with layers that keep such copies as its layers do
(``quantized_training.py``).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integration.elastic_job import (
    ROOT,
    JobResult,
    elastic_command,
    elastic_job,
    environment_of,
    largest_deviation,
)
from tests.integration.test_cpu_layouts import losses

SCRIPT = ROOT / "tests" / "integration" / "quantized_training.py"
STEPS = 6
FLAGS = ("--hidden-dropout", "0", "--attention-dropout", "0", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise")


def elastic(folder: Path, *flags: str) -> JobResult:
    """PP 2 x DP 2 under the engine."""
    result = elastic_job(folder, 4, 1, 2, STEPS, *FLAGS, *flags, script=SCRIPT)
    assert result.code == 0, result.output[-6000:]
    return result


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Step → loss of plain Megatron, whose own schedule tells layers of each first micro-batch."""
    command = elastic_command(tmp_path_factory.mktemp("plain"), 4, 1, 2, STEPS, *FLAGS, script=SCRIPT)
    command = command[: command.index("--elastic")] + list(FLAGS)
    done = subprocess.run(
        command, cwd=ROOT, env=environment_of(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return losses(done.stdout)


@pytest.mark.slow
def test_losses_are_plain_megatrons_also_after_a_loss(tmp_path: Path, plain: dict[int, float]) -> None:
    """The rank that is lost had quantized its weights for the step that the others compute again."""
    kill = ("--elastic-allow-inject", "--elastic-inject", "kill:rank=3,step=3,point=mid_backward")
    result = elastic(tmp_path, *kill)
    assert len(plain) == STEPS and "recovered at generation" in result.output
    assert largest_deviation(plain, result.losses) < 1e-5


@pytest.mark.slow
def test_copies_that_are_never_made_anew_give_other_losses(tmp_path: Path, plain: dict[int, float]) -> None:
    result = elastic_job(tmp_path, 4, 1, 2, STEPS, *FLAGS, script=SCRIPT, environment={"QUANTIZED_ONCE": "1"})
    assert result.code == 0, result.output[-6000:]
    assert largest_deviation(plain, result.losses) > 1e-4
