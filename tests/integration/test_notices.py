"""A notice that a node will be taken away has its ranks leave while the others train on."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.integration.elastic_job import RunningJob, elastic_command
from tests.integration.ports import free_port
from tests.unit.launch.test_notices import service


@pytest.mark.slow
def test_the_ranks_of_a_node_that_will_be_taken_away_leave(tmp_path: Path) -> None:
    run_id, port, notice = uuid.uuid4().hex[:12], str(free_port()), list[str]()

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        return (200, notice[0]) if notice else (404, "")

    def node(number: int, *flags: str) -> RunningJob:
        at = ("--nnodes", "2", "--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", port)
        launch = ("--rdzv-id", run_id, *at)
        save = ("--save", str(tmp_path / "saved"), "--save-interval", "1000000")
        command = elastic_command(tmp_path / "events", 2, 1, 1, 100_000, *save, *flags, launch=launch)
        job = RunningJob(tmp_path / "events", command, named=False)
        job.run_id = run_id
        return job

    with service(answer) as url, node(0) as stays, node(1, "--elastic-notices", url) as leaves:
        leaves.wait_for(r"iteration +3/")
        notice.append("rack 7 is serviced")
        leaves.wait_for(r"rack 7 is serviced: its ranks \[2, 3\] leave")
        stays.wait_for(r"iteration +\d+/")  # the highest living rank reports
        assert stays.ctl("drain").returncode == 0
        first, second = stays.finish(), leaves.finish()
    assert (first.code, second.code) == (3, 3), first.output[-3000:] + second.output[-3000:]
    assert not first.of("loss") and all(record.fields["lost_steps"] == 0 for record in first.of("recovery"))
    members = [record.fields["members"] for record in first.of("generation") if record.rank == 0]
    assert list(members[-1]) == [0, 1]
