"""A node whose hardware check has a finding is left by its ranks, and gets them back when the finding is gone."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path

import pytest

from tests.integration.elastic_job import RunningJob, elastic_command
from tests.integration.kill_walk import DROPOUT
from tests.integration.ports import free_port


def node(tmp_path: Path, run_id: str, port: int, number: int, *flags: str) -> RunningJob:
    """The agent and the two ranks of one of two nodes; looks every two seconds."""
    at = ("--nnodes", "2", "--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", str(port))
    save = ("--save", str(tmp_path / "saved"), "--save-interval", "1000000", "--elastic-detection-timeout", "0.4")
    command = elastic_command(
        tmp_path / "events", 2, 1, 1, 100_000, *DROPOUT, *save, *flags, launch=("--rdzv-id", run_id, *at)
    )
    job = RunningJob(tmp_path / "events", command, named=False)
    job.run_id = run_id
    return job


@pytest.mark.slow
def test_ranks_leave_an_unfit_node_and_come_back_when_it_is_mended(tmp_path: Path) -> None:
    run_id, port, disk = uuid.uuid4().hex[:12], free_port(), tmp_path / "disk"
    disk.mkdir()
    with (
        node(tmp_path, run_id, port, 0) as stays,
        node(tmp_path, run_id, port, 1, "--elastic-health", f"disk={disk}") as unfit,
    ):
        unfit.wait_for(r"iteration +3/")
        disk.rmdir()
        unfit.wait_for(r"No such file or directory: its ranks \[2, 3\] leave")
        stays.wait_for(r"node 1 .*: its lost ranks are not started again until that is mended")
        stays.wait_for(r"iteration +\d+/")  # the highest living rank reports
        status = json.loads(stays.ctl("status", "--json").stdout)
        disk.mkdir()
        stays.wait_for(r"joined by (2, 3|[23]\b[\s\S]*joined by [23]\b)")
        assert stays.ctl("drain", "--yes").returncode == 0
        first, second = stays.finish(), unfit.finish()
    assert (first.code, second.code) == (3, 3), first.output[-3000:] + second.output[-3000:]
    assert status["members"] == [0, 1] and "No such file" in status["nodes"]["1"]["finding"]
    assert not first.of("loss") and all(record.fields["lost_steps"] == 0 for record in first.of("recovery"))
    assert list([r.fields["members"] for r in first.of("generation") if r.rank == 0][-1]) == [0, 1, 2, 3]


def test_an_unfit_node_does_not_start(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    command = elastic_command(tmp_path / "events", 1, 1, 1, 2, "--elastic-health", f"disk={absent}")
    with RunningJob(tmp_path / "events", command) as job:
        result = job.finish()
    assert result.code == 1
    assert re.findall(r"error: .*", result.output) == [
        f"error: this node is not fit (--elastic-health): disk: {absent}: No such file or directory; mend it, or leave "
        "that check out"
    ]
