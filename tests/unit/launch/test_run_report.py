"""The launcher reports progress to a terminal, and every job that began ends with a summary."""

from __future__ import annotations

import pytest

from megatron.elastic.control.clock import JobClock
from megatron.elastic.control.events import JobEnded, Lost
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.history import JobHistory
from megatron.elastic.control.membership import Loss
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.observations import Stepping
from megatron.elastic.launch.agent.admin import Sources
from megatron.elastic.launch.agent.run_report import RunReport


def sources() -> Sources:
    return Sources("job", Generations({0: Node("h", (0, 1))}), JobHistory(), JobClock())


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_comes_at_growing_intervals_and_only_to_a_terminal(
    terminal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    job, now = sources(), [0.0]
    report, lines = RunReport(job, terminal, lambda: now[0]), dict[float, str]()
    for second in range(301):
        now[0] = float(second)
        if second == 10:
            job.history.follow(Stepping(1, at=10.0), job.state)
        report.beat()
        if written := capsys.readouterr().err:
            lines[second] = written
    assert list(lines) == ([15, 25, 45, 85, 145, 205, 265] if terminal else [])
    assert all(line.startswith("[launch] ") and line.count("\n") == 1 for line in lines.values())


def test_a_job_that_began_has_one_summary_whatever_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    job = sources()
    report = RunReport(job, False)
    report.end(1)
    assert capsys.readouterr().err == "", "bad input: nothing ran"
    job.history.follow(Stepping(1, at=0.0), job.state)
    lost = Lost((Loss(0, 0, "h", "signal SIGKILL"), Loss(1, 0, "h", "signal SIGKILL")), (4, 4), 3.0)
    for event in (lost, JobEnded(4, "no state")):
        job.state.apply(event)
        job.history.follow(event, job.state)
    report.end(4)
    report.end(4)
    written = capsys.readouterr().err
    assert written.count("job job ends with exit status 4") == 1 and "2 losses, 0 recoveries" in written
