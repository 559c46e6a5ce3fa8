"""A node that loses ranks is left out for a time, longer when it happens again; needed, it is let in at once.

Real training over two agents: no step is lost, and losses are those of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.elastic.observe.events import read_events
from tests.integration.elastic_job import ROOT, JobResult, elastic_command, environment_of
from tests.integration.kill_walk import DROPOUT, LAYOUTS, MANY, RATES, TWO, compare, undisturbed
from tests.integration.launcher_cluster import cluster

STEPS = 10
DETECTION = 0.4
SECONDS = 60 * DETECTION
"""For how long a node is left out the first time."""


@pytest.mark.slow
def test_a_node_that_is_left_out_is_let_in_when_the_others_need_it(tmp_path: Path) -> None:
    """Both ranks of the last stage are on node 1. The first to die stays out; the second takes the stage along.

    Layers may not move, else the others would take them over (test_lost_node.py).
    """
    layout, events = LAYOUTS["pp2dp2"], tmp_path / "events"
    script = "kill:rank=3,step=2,point=mid_forward;kill:rank=2,step=7,point=mid_forward"
    flags = (
        *DROPOUT,
        *RATES,
        *TWO,
        "--exit-interval",
        str(STEPS),
        "--elastic-quarantine-after",
        "1",
        "--elastic-migrate-after",
        "-1",
    )
    faults = ("--elastic-allow-inject", "--elastic-inject", script)
    command = elastic_command(events, layout.ranks, layout.tensor, layout.pipeline, MANY, *flags, *faults)
    command = command[command.index(str(ROOT / "pretrain_gpt.py")) :]
    with cluster(2, nodes=2, command=command) as job:
        assert [job.exit_code(node) for node in (0, 1)] == [0, 0], job.text()[-6000:]
        text = job.text()
    said = re.findall(r"node 1 .*?(its lost ranks are not started again|its lost ranks are started again: .*)", text)
    assert said[0] == "its lost ranks are not started again"
    assert re.fullmatch(r"its lost ranks are started again: ranks \[2, 3\] are needed", said[1]), said
    result = JobResult(0, text, read_events(events))
    assert {record.fields["lost_rank"] for record in result.of("loss")} == {2, 3}
    assert [1] in [list(record.fields["left_out"]) for record in result.of("generation")]
    assert all(record.fields["lost_steps"] == 0 for record in result.of("recovery"))
    assert set(result.committed) == set(range(1, STEPS + 1))
    assert compare(result, undisturbed(tmp_path / "undisturbed", layout, STEPS)) < 1e-5


@pytest.mark.slow
def test_its_time_over_a_node_is_let_in_and_the_next_loss_leaves_it_out_for_twice_as_long(tmp_path: Path) -> None:
    layout, events = LAYOUTS["pp2dp2"], tmp_path / "events"
    slow = "delay:missing=1,rank=0|1|2|3,count=0,seconds=0.4"  # else the comparison would be over many steps
    script = f"{slow};kill:rank=3,step=2,point=mid_forward;kill:rank=3,losses=1,point=mid_forward"
    flags = (*DROPOUT, *RATES, "--elastic-quarantine-after", "1", "--elastic-detection-timeout", str(DETECTION))
    faults = ("--elastic-allow-inject", "--elastic-inject", script)
    command = elastic_command(events, layout.ranks, layout.tensor, layout.pipeline, MANY, *flags, *faults)
    command = command[command.index(str(ROOT / "pretrain_gpt.py")) :]
    with cluster(2, nodes=2, command=command) as job:
        job.wait_text(f"its lost ranks are not started again for {SECONDS:.0f} s")
        ask = [sys.executable, "-m", "megatron.elastic.ctl", "status", "--json", "--run-id", job.run_id]
        status = json.loads(subprocess.run(ask, env=environment_of(), capture_output=True, check=True).stdout)
        job.wait_text("its lost ranks are started again: its time is over")
        job.wait_text(f"its lost ranks are not started again for {2 * SECONDS:.0f} s")
        os.kill(job.agents[0].pid, signal.SIGTERM)
        assert [job.exit_code(node) for node in (0, 1)] == [3, 3], job.text()[-6000:]
        result = JobResult(3, job.text(), read_events(events))
    assert 0 < status["nodes"]["1"]["out_s"] <= SECONDS
    assert [record.fields["lost_rank"] for record in result.of("loss") if record.rank == 0] == [3, 3]
    first, second = sorted(record.wall for record in result.of("loss") if record.rank == 0)
    back = min(record.wall for record in result.of("phases") if (record.rank, record.incarnation) == (3, 1))
    assert first + SECONDS - 1 < back < second, "not before its time"
    assert all(record.fields["lost_steps"] == 0 for record in result.of("recovery"))
    steps = max(result.committed)
    assert set(result.committed) == set(range(1, steps + 1))
    assert compare(result, undisturbed(tmp_path / "undisturbed", layout, steps)) < 1e-5
