"""Each usual bug of device code, put into the engine, is caught by a job on the stand-in accelerator.

The engine as it is passes the same checks, so they do not fail by themselves.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.device_bugs_training import BUGS, ROOT, UNPINNED
from tests.integration.elastic_job import JobResult, elastic_job, largest_deviation
from tests.integration.kill_walk import DROPOUT
from tests.integration.test_standin import ROUNDING, finished, on_standin
from tests.standin.library import build

pytestmark = pytest.mark.slow

STEPS = 3


def job(folder: Path, bug: str, pipeline: int) -> JobResult:
    """Two ranks on a device each: two replicas or two stages."""
    flags = ("--no-elastic-respawn",)
    script = ROOT / "tests/integration/device_bugs_training.py"
    environment = on_standin(DEVICE_BUG=bug)
    return elastic_job(folder / bug, 2, 1, pipeline, STEPS, *DROPOUT, *flags, script=script, environment=environment)


def caught(result: JobResult, reference: dict[int, float]) -> set[str]:
    """The ways in which the bug showed."""
    ways = {
        "a fault": "the host touched memory of device" in result.output,
        "the wrong device": "works on standin:" in result.output,
        "a counter": UNPINNED in result.output,
        "the values": set(reference) > set(result.committed)
        or largest_deviation(reference, result.committed) > 1e3 * ROUNDING,
    }
    return {way for way, showed in ways.items() if showed}


SHOWS = {
    "host_read": (1, "a fault"),
    "missing_wait": (1, "the values"),
    "missing_event": (2, "the values"),
    "wrong_device": (1, "the wrong device"),
    "unpinned_copy": (2, "a counter"),
}
"""Bug → (stages of the job, how it shows)."""


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[int, float]]:
    """Stages → losses of the engine as it is."""
    build()
    folder = tmp_path_factory.mktemp("right")
    return {stages: finished(job(folder / str(stages), "none", stages)) for stages in (1, 2)}


def test_every_bug_is_run() -> None:
    assert set(SHOWS) | {"none"} == set(BUGS)


@pytest.mark.parametrize("bug", SHOWS)
def test_the_bug_is_caught(tmp_path: Path, right: dict[int, dict[int, float]], bug: str) -> None:
    stages, how = SHOWS[bug]
    result = job(tmp_path, bug, stages)
    assert how in caught(result, right[stages]), result.output[-4000:]
