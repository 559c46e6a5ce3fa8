"""A node that is left out is let in at once when the others can do nothing without its ranks: no step is lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.elastic.observe.events import read_events
from tests.integration.elastic_job import ROOT, JobResult, elastic_command
from tests.integration.kill_walk import DROPOUT, LAYOUTS, MANY, RATES, TWO, compare, undisturbed
from tests.integration.launcher_cluster import cluster

STEPS = 10


@pytest.mark.slow
def test_a_node_that_is_left_out_is_let_in_when_the_others_need_it(tmp_path: Path) -> None:
    """Both ranks of the last stage are on node 1. The first to die stays out; the second takes the stage along."""
    layout, events = LAYOUTS["pp2dp2"], tmp_path / "events"
    script = "kill:rank=3,step=2,point=mid_forward;kill:rank=2,step=7,point=mid_forward"
    flags = (*DROPOUT, *RATES, *TWO, "--exit-interval", str(STEPS), "--elastic-quarantine-after", "1")
    faults = ("--elastic-allow-inject", "--elastic-inject", script)
    command = elastic_command(events, layout.ranks, layout.tensor, layout.pipeline, MANY, *flags, *faults)
    command = command[command.index(str(ROOT / "pretrain_gpt.py")) :]
    with cluster(2, nodes=2, command=command) as job:
        assert [job.exit_code(node) for node in (0, 1)] == [0, 0], job.text()[-6000:]
        text = job.text()
    said = re.findall(r"node 1 .*?(they are not started again|its lost ranks are started again: .*)", text)
    assert said[0] == "they are not started again"
    assert re.fullmatch(r"its lost ranks are started again: ranks \[2, 3\] are needed", said[1]), said
    result = JobResult(0, text, read_events(events))
    assert {record.fields["lost_rank"] for record in result.of("loss")} == {2, 3}
    assert [1] in [list(record.fields["left_out"]) for record in result.of("generation")]
    assert all(record.fields["lost_steps"] == 0 for record in result.of("recovery"))
    assert set(result.committed) == set(range(1, STEPS + 1))
    assert compare(result, undisturbed(tmp_path / "undisturbed", layout, STEPS)) < 1e-5
