"""The TensorBoard log goes on when the rank that wrote it is lost, and every line it had logged is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.elastic_job import JobResult, elastic_job

STEPS = 8
LAST = 1
"""Megatron's writer is on the last rank."""


def logged(folder: Path) -> dict[int, float]:
    """Step → training loss over all event files of the run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[int, float] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        log = EventAccumulator(str(path))
        log.Reload()
        if "lm loss" in log.Tags()["scalars"]:
            steps = {event.step: event.value for event in log.Scalars("lm loss")}
            assert not set(steps) & set(found), "two ranks have logged the same step"
            found |= steps
    return found


def run(folder: Path, *flags: str) -> JobResult:
    fault = f"kill:rank={LAST},step=4,point=mid_forward"
    result = elastic_job(
        folder / "events", 2, 1, 1, STEPS, "--tensorboard-dir", str(folder / "log"), "--elastic-allow-inject",
        "--elastic-inject", fault, *flags,
    )  # fmt: skip
    assert result.code == 0, result.output[-4000:]
    assert {record.fields["lost_rank"] for record in result.of("loss")} == {LAST}
    return result


@pytest.mark.slow
def test_the_log_goes_on_without_the_last_rank(tmp_path: Path) -> None:
    result = run(tmp_path, "--no-elastic-respawn")
    found = logged(tmp_path / "log")
    assert set(found) == set(range(1, STEPS + 1)), "no step is missing, those of the lost rank are there too"
    assert all(abs(found[step] - loss) < 1e-4 * loss for step, loss in result.committed.items() if step > 2)
