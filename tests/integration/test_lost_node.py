"""A node that takes a whole stage along and will not be back: the others take its layers over at once.

Real training over two agents; both ranks of the last stage are on node 1. No step is lost, and losses are those of
an undisturbed run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.elastic.observe.events import read_events
from tests.integration.elastic_job import ROOT, JobResult, elastic_command
from tests.integration.kill_walk import DROPOUT, LAYOUTS, MANY, RATES, TWO, compare, undisturbed
from tests.integration.launcher_cluster import cluster

STEPS = 10


def command_of(events: Path, *flags: str) -> list[str]:
    layout = LAYOUTS["pp2dp2"]
    common = (*DROPOUT, *RATES, *TWO, "--exit-interval", str(STEPS))
    command = elastic_command(events, layout.ranks, layout.tensor, layout.pipeline, MANY, *common, *flags)
    return command[command.index(str(ROOT / "pretrain_gpt.py")) :]


def check(folder: Path, text: str, lost: set[int]) -> None:
    """Nobody was waited for, and what was computed is what an undisturbed run computes."""
    assert "waiting up to" not in text
    result = JobResult(0, text, read_events(folder / "events"))
    assert {record.fields["lost_rank"] for record in result.of("loss")} == lost
    assert all(record.fields["lost_steps"] == 0 for record in result.of("recovery"))
    assert set(result.committed) == set(range(1, STEPS + 1))
    assert compare(result, undisturbed(folder / "undisturbed", LAYOUTS["pp2dp2"], STEPS)) < 1e-5


@pytest.mark.slow
def test_a_node_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    slow = ("--elastic-allow-inject", "--elastic-inject", "delay:missing=0,rank=0|1|2|3,count=0,seconds=0.4")
    with cluster(2, nodes=2, command=command_of(tmp_path / "events", *slow)) as job:
        job.wait_text(f"iteration        3/{MANY:8d}")
        job.agents[1].kill()
        assert job.exit_code(0) == 0, job.text()[-6000:]
        text = job.text()
    check(tmp_path, text, {2, 3})
