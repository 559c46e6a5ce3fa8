"""With two mirrors on four nodes, two nodes are killed at the same instant, and no step is lost.

Agents on one machine with a label each, so that each is a failure domain. Node 0 serves the store, and stays.
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
from tests.integration.elastic_job import ROOT, elastic_command
from tests.integration.launcher_cluster import Cluster, cluster, descendants

NODES, EACH = 4, 2
SURVIVES_TWO = r"state now survives the loss of any 2 ranks or of any 2 nodes; not of nodes \S+ and \S+ and \S+ "

pytestmark = pytest.mark.slow


def kill_nodes(job: Cluster, nodes: tuple[int, ...]) -> None:
    """Agents, parents of workers and workers of ``nodes``."""
    pids = [pid for node in nodes for pid in (job.agents[node].pid, *descendants(job.agents[node].pid))]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def status(job: Cluster) -> dict[str, object]:
    asked = [sys.executable, "-m", "megatron.elastic.ctl", "status", "--json", "--run-id", job.run_id]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_two_nodes_are_killed_at_once_and_no_step_is_lost(tmp_path: Path) -> None:
    events = tmp_path / "events"
    flags = ("--elastic-mirrors", "2", "--elastic-block-bytes", "4096")
    command = elastic_command(events, NODES * EACH, 1, 1, 100_000, *flags)
    script = command[command.index(str(ROOT / "pretrain_gpt.py")) :]
    with cluster(EACH, nodes=NODES, command=script) as job:
        job.wait_text("iteration        3/")
        first = re.search(SURVIVES_TWO, job.text())
        assert first is not None, job.text()[-4000:]
        assert first[0] in str(status(job)["tolerance"])
        kill_nodes(job, (1, 2))
        job.wait_text("recovered at generation")
        job.wait(lambda: job.text().count("state now survives") > 1, "what can be lost is told anew")
        before = len(job.output)
        job.wait(lambda: sum("iteration " in text for text in job.output[before:]) > 3, "further steps")
        os.kill(job.agents[0].pid, signal.SIGTERM)
        assert job.exit_code(0) == 3, job.text()[-6000:]
    records = read_events(events)
    lost = {record.fields["lost_rank"] for record in records if record.kind == "loss"}
    assert lost == {2, 3, 4, 5}
    assert all(record.fields["lost_steps"] == 0 for record in records if record.kind == "recovery")
    steps = {record.fields["step"] for record in records if record.kind == "step"}
    assert steps == set(range(1, max(steps) + 1)), "every step is committed"
    told = [record.fields for record in records if record.kind == "tolerance"]
    assert (told[0]["ranks"], told[0]["nodes"], told[0]["short"]) == (2, 2, 0)
    assert told[-1]["nodes"] == 1, "two nodes are left: either may go"
