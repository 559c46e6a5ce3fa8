"""Checkpoints without optimizer or random state have every parameter's value, also of what their writer does not hold.

Plain Megatron resumes them. The loss of the next step is that of the run that saved (dropout 0).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.elastic_job import MODEL, RunningJob, elastic_command, elastic_job, largest_deviation
from tests.integration.test_checkpoints import QUIET, ROUNDING, SAVED_AT, STEPS, plain_job, saving
from tests.integration.test_cpu_layouts import logs, losses, run_jobs

RATES = ("--hidden-dropout", "0", "--attention-dropout", "0", "--lr-decay-iters", "400")
KINDS = {
    "optimizer": ("--no-save-optim", "--no-load-optim"),
    "random": ("--no-save-rng", "--no-load-rng"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_a_lost_stage_are_written(tmp_path: Path, kind: str) -> None:
    without, loading = KINDS[kind]
    fault = ("--no-elastic-respawn", "--elastic-allow-inject", "--elastic-inject", "kill:rank=1,step=2")
    written = elastic_job(tmp_path / "events", 2, 1, 2, STEPS, *QUIET, without, *fault, *saving(tmp_path / "saved"))
    assert written.code == 0 and "could not be" not in written.output, written.output[-4000:]
    jobs = [
        plain_job("straight", 2, 2),
        plain_job("resumes", 2, 2, "--load", str(tmp_path / "saved"), loading, "--exit-on-missing-checkpoint"),
    ]
    codes = run_jobs(tmp_path, jobs)
    assert all(set(ranks) == {0} for ranks in codes.values()), (codes, logs(tmp_path, "resumes")[-3000:])
    straight = losses(logs(tmp_path, "straight"))
    expected = {step: loss for step, loss in straight.items() if step == SAVED_AT + 1}
    assert largest_deviation(expected, losses(logs(tmp_path, "resumes"))) < ROUNDING["fp32"]


@pytest.mark.slow
def test_the_parameters_of_layers_that_have_moved_are_written(tmp_path: Path) -> None:
    """Rank 0 writes all layers, of which it computes a half."""
    saved = tmp_path / "saved"
    flags = ("--no-save-optim", "--save", str(saved), "--save-interval", "1000000", *RATES)
    with RunningJob(tmp_path / "events", elastic_command(tmp_path / "events", 2, 1, 1, 400, *flags)) as running:
        running.wait_for(r"iteration\s+2/")
        moved = running.ctl("reshape", "--tp", "1", "--pp", "2", "--dp", "1")
        assert moved.returncode == 0, moved.stderr
        assert running.ctl("checkpoint").returncode == 0
        step = int(running.wait_for(r"successfully saved checkpoint from iteration\s+(\d+)").group(1))
        running.wait_for(rf"iteration\s+{step + 2}/")
        assert running.ctl("drain").returncode == 0
        whole = running.finish()
    arguments = [*MODEL, *RATES, "--train-iters", str(step + 1), "--load", str(saved), "--no-load-optim"]
    arguments += ["--ckpt-step", str(step)]
    assert run_jobs(tmp_path, [{"name": "plain", "world": 1, "seconds": 120, "arguments": arguments}]) == {"plain": [0]}
    expected = {step + 1: whole.losses[step + 1]}
    assert largest_deviation(expected, losses(logs(tmp_path, "plain"))) < ROUNDING["fp32"]
