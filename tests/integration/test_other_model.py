"""A checkpoint that does not fit the flags is one line, which names those that differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.elastic_job import elastic_job

STEPS = 2
CASES = {
    "more layers": (("--num-layers", "6"), ("another model", "--num-layers: 4 there, 6 here")),
    "output of its own": (
        ("--untie-embeddings-and-output-weights", "--pipeline-model-parallel-size", "2"),
        ("another model", "--untie-embeddings-and-output-weights: False there, True here"),
    ),
    "other masters": (("--bf16",), ("--bf16: False there, True here", "--no-load-optim")),
    "another schedule": (
        ("--train-iters", "9"),
        ("number of iterations do not match", "--override-opt_param-scheduler"),
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    job = elastic_job(folder / "events", 1, 1, 1, STEPS, "--save", str(folder / "all"), "--save-interval", str(STEPS))
    assert job.code == 0, job.output[-4000:]
    return folder / "all"


def refused(folder: Path, world: int, *flags: str) -> str:
    """The one line of a job that was refused."""
    job = elastic_job(folder / "events", world, 1, 1, STEPS, *flags)
    errors = [line for line in job.output.splitlines() if line.startswith("error: ")]
    assert job.code == 1 and len(errors) == 1 and "Traceback" not in job.output, job.output[-3000:]
    return errors[0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "output of its own" else pytest.mark.slow) for name in CASES]
)
def test_flags_that_differ_are_named(tmp_path: Path, saved: Path, name: str) -> None:
    """Also where one of two stages alone finds it out."""
    flags, words = CASES[name]
    line = refused(tmp_path, 2, "--load", str(saved), *flags)
    assert line.startswith(f"error: --load {saved}: ") and all(word in line for word in words), line


@pytest.mark.slow
def test_a_checkpoint_without_optimizer_state_is_named(tmp_path: Path) -> None:
    saved = ("--save", str(tmp_path / "saved"), "--save-interval", str(STEPS), "--no-save-optim")
    assert elastic_job(tmp_path / "events", 1, 1, 1, STEPS, *saved).code == 0
    line = refused(tmp_path / "later", 1, "--load", str(tmp_path / "saved"))
    assert "no optimizer state (--no-save-optim)" in line and "--no-load-optim" in line
