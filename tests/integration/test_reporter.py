"""The TensorBoard and W&B logs go on when the rank that wrote them is lost, and every line it had logged is there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.integration.elastic_job import ROOT, JobResult, elastic_job

STEPS = 8
LAST = 1
"""Megatron's writer is on the last rank."""


def logged(folder: Path, name: str = "lm loss") -> dict[int, float]:
    """Step → training loss, or another value, over all event files of the run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[int, float] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        log = EventAccumulator(str(path))
        log.Reload()
        if name in log.Tags()["scalars"]:
            steps = {event.step: event.value for event in log.Scalars(name)}
            assert not set(steps) & set(found), "two ranks have logged the same step"
            found |= steps
    return found


def run(
    folder: Path,
    *flags: str,
    steps: int = STEPS,
    environment: dict[str, str] | None = None,
    at: str = "step=4,point=mid_forward",
) -> JobResult:
    fault = f"kill:rank={LAST},{at}"
    result = elastic_job(
        folder / "events",
        2,
        1,
        1,
        steps,
        "--tensorboard-dir",
        str(folder / "log"),
        "--elastic-allow-inject",
        "--elastic-inject",
        fault,
        *flags,
        environment=environment,
    )
    assert result.code == 0, result.output[-4000:]
    assert {record.fields["lost_rank"] for record in result.of("loss")} == {LAST}
    return result


@pytest.mark.slow
def test_the_log_goes_on_without_the_last_rank(tmp_path: Path) -> None:
    result = run(tmp_path, "--no-elastic-respawn")
    found = logged(tmp_path / "log")
    assert set(found) == set(range(1, STEPS + 1)), "no step is missing, those of the lost rank are there too"
    assert all(abs(found[step] - loss) < 1e-4 * loss for step, loss in result.committed.items() if step > 2)


def test_no_validation_is_missing_when_the_last_rank_dies_in_one(tmp_path: Path) -> None:
    """That of step 2 is in the lost rank's file, that of step 4 is logged by the other rank."""
    evaluated = ("--eval-interval", "2", "--eval-iters", "2")
    result = run(tmp_path, "--no-elastic-respawn", *evaluated, at="step=4,point=in_evaluate,nth=2")
    found = logged(tmp_path / "log", "lm loss validation")
    assert set(result.validation) == {2, 4, 6, 8} <= set(found)
    assert all(abs(found[step] - loss) < 1e-4 * loss for step, loss in result.validation.items() if step < STEPS)


def test_no_step_is_missing_that_was_logged_to_tensorboard_alone(tmp_path: Path) -> None:
    result = run(tmp_path, "--no-elastic-respawn", "--log-interval", "100")
    assert set(result.losses) <= {1}
    assert set(logged(tmp_path / "log")) == set(range(1, STEPS + 1))


def calls(folder: Path) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """(rank, process) → what it called of wandb, in order."""
    found = {}
    for path in folder.glob("*.jsonl"):
        rank, process = path.stem.split("-")
        found[int(rank), process] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


@pytest.mark.slow
def test_one_wandb_run_is_handed_over_and_back(tmp_path: Path) -> None:
    """Rank 1 dies, rank 0 resumes its run, and gives it up when rank 1 is back."""
    steps = 60
    (tmp_path / "calls").mkdir()
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests/integration/standins")))
    result = run(
        tmp_path,
        "--wandb-project",
        "elastic",
        "--wandb-exp-name",
        "handed",
        "--wandb-save-dir",
        str(tmp_path / "w"),
        steps=steps,
        environment={"PYTHONPATH": path, "WANDB_CALLS": str(tmp_path / "calls")},
    )
    assert result.of("ready"), "rank 1 was started again"
    found = calls(tmp_path / "calls")
    runs = {(call["id"], call["resume"]) for made in found.values() for call in made if call["call"] == "init"}
    assert len(runs) == 1 and next(iter(runs))[1] == "allow", f"one run, resumed: {runs}"
    (first, *_), between, back = sorted(found.values(), key=lambda made: _steps(made)[0])
    assert first["rank"] == 1 and between[0]["rank"] == 0 and back[0]["rank"] == 1
    assert [made[-1]["call"] for made in (between, back)] == ["finish", "finish"]
    told = [
        (call["step"], call["value"]) for made in found.values() for call in made if call.get("key") == "elastic/losses"
    ]
    assert dict(told)[1] == 0 and dict(told)[steps] == 1, "the figures of the run go on too"
    logged_steps = [step for made in found.values() for step in _steps(made)]
    assert sorted(logged_steps) == list(range(1, steps + 1)), "each step once, whoever reported it"


def _steps(made: list[dict[str, Any]]) -> list[int]:
    return [call["step"] for call in made if call.get("key") == "lm loss"]
