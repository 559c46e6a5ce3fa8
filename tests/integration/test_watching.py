"""A user who looks at a running job sees what its event log says."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.elastic.launch.workers.processes import process_state
from megatron.elastic.state.expert_load import SPAN
from tests.integration.elastic_job import JobResult, RunningJob, elastic_command
from tests.integration.ports import free_port
from tests.receiver import receiver
from tools.bench._watched_job import asked, until_shown

FOR_EVER = 100_000
KILL = ("--elastic-allow-inject", "--elastic-inject", "kill:rank=3,step=3,point=mid_backward")
QUIET = ("--save-interval", "1000000", "--log-interval", "1")


def watched(folder: Path, look: Callable[[RunningJob], None], *flags: str) -> JobResult:
    """A job of four ranks that loses rank 3 in step 3, gets it back, and is drained after ``look``."""
    save = ("--save", str(folder / "saved"), "--tensorboard-dir", str(folder / "board"))
    command = elastic_command(folder / "events", 4, 1, 2, FOR_EVER, *QUIET, *KILL, *save, *flags)
    with RunningJob(folder / "events", command) as job:
        joined = job.wait_for(r"joined by 3").end()
        at = int(job.wait_for(r"iteration +(\d+)/", joined).group(1))
        job.wait_for(rf"iteration +{at + 5}/", joined)
        look(job)
        assert job.ctl("drain").returncode == 0
        result = job.finish()
    assert result.code == 3, result.output[-5000:]
    return result


def last_scalars(folder: Path) -> dict[str, float]:
    """The newest value of each figure of the run, over all event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    newest: dict[str, tuple[int, float]] = {}
    for path in folder.glob("events.out.tfevents.*"):
        board = EventAccumulator(str(path)).Reload()
        for tag in board.Tags()["scalars"]:
            if tag.startswith("elastic/"):
                last = board.Scalars(tag)[-1]
                newest[tag] = max(newest.get(tag, (-1, 0.0)), (last.step, last.value))
    return {tag.removeprefix("elastic/"): value for tag, (_, value) in newest.items()}


def test_the_status_of_a_job_that_lost_a_rank_is_that_of_its_event_log(tmp_path: Path) -> None:
    shown: dict[str, Any] = {}
    text: list[str] = []

    def look(job: RunningJob) -> None:
        shown.update(json.loads(job.ctl("status", "--json").stdout))
        text.extend(job.ctl("status").stdout.splitlines())

    with receiver() as server:
        result = watched(tmp_path, look, "--elastic-webhook", server.url)
        (_, told), (_, ended) = server.wait(2)
    assert "token=hidden" in server.url and "token=hidden" not in result.output
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in files if b"token=hidden" in path.read_bytes()] == []
    assert {"common.pt"} <= {path.name for path in files}
    (loss,) = told["losses"]
    assert (told["event"], loss["rank"], loss["cause"]) == ("loss", 3, "signal SIGKILL")
    assert (ended["event"], ended["exit_status"], ended["losses_total"]) == ("end", 3, 1)
    recoveries = {r.fields["step"]: r.fields for r in result.of("recovery") if r.rank == 0}
    past, step = shown["history"], shown["progress"]["step"]
    assert step in result.committed and abs(shown["progress"]["loss"] - result.committed[step]) < 1e-6
    assert shown["progress"]["target"] == FOR_EVER and shown["progress"]["steps_per_s"] > 0
    assert (past["losses"], past["recoveries"], past["changes"], past["lost_steps"]) == (1, 1, 1, 0)
    assert [(loss["rank"], loss["step"], loss["cause"]) for loss in past["last_losses"]] == [(3, 3, "signal SIGKILL")]
    for told in past["last_recoveries"]:
        assert recoveries[told["step"]]["outcome"] == told["outcome"]
        assert recoveries[told["step"]]["seconds"].keys() == told["seconds"].keys()
    lost = past["last_recoveries"][0]
    scalars = last_scalars(tmp_path / "board")
    assert (scalars["losses"], scalars["recoveries"], scalars["tolerated_ranks"]) == (1, 1, 1)
    assert abs(scalars["recovery_s"] - sum(lost["seconds"].values())) < 1e-3
    assert abs(scalars["lost_s"] - sum(past["lost_s"].values())) < 1e-3 and 0 < scalars["goodput"] < 1
    assert abs(scalars["lost_computed_again_s"] - past["lost_s"]["computed again"]) < 1e-3
    assert "lost_restart_s" not in scalars
    assert lost["lost"] == [3] and lost["outcome"] == "re-run" and lost["repeated_s"] > 0
    assert past["lost_s"]["computed again"] == lost["repeated_s"] < 60
    assert past["first_step"] == 1 and 0 < past["goodput"] < 1
    assert past["protection"]["ranks"] == 1 and past["protection"]["short"] == 0 and past["unprotected_s"] > 0
    summary = result.output[result.output.index("ends with exit status 3 after") :]
    assert re.search(rf"steps 1 to {max(result.committed)} of {FOR_EVER}: {len(result.committed)} committed", summary)
    assert "1 loss, 1 recovery of" in summary and re.search(r"goodput \d\d?\.\d\d% .*computed again \d", summary)
    assert any(line.startswith("step ") and f"of {FOR_EVER}" in line for line in text)
    assert any("rank 3 on" in line and "SIGKILL" in line for line in text)


@pytest.mark.slow
def test_a_scrape_is_answered_while_a_rank_is_stopped_and_the_others_wait_for_it(tmp_path: Path) -> None:
    """With a time-out that is long enough that the stopped rank is not taken for lost meanwhile."""
    flags = (*QUIET, "--elastic-metrics", "0", "--elastic-detection-timeout", "20")
    save = ("--save", str(tmp_path / "saved"))
    with RunningJob(tmp_path / "events", elastic_command(tmp_path / "events", 2, 1, 1, FOR_EVER, *flags, *save)) as job:
        address = job.wait_for(r"metrics at (http://\S+)").group(1)
        job.wait_for(r"iteration +2/")
        until_shown(address)
        stopped = int(json.loads(job.ctl("status", "--json").stdout)["workers_here"]["1"]["pid"])
        os.kill(stopped, signal.SIGSTOP)
        scrapes = [asked(address, "/metrics")[1] for _ in range(20)]
        assert process_state(stopped) == "T" and all(b"megatron_elastic_job_info" in scrape for scrape in scrapes)
        os.kill(stopped, signal.SIGCONT)
        at = int(re.findall(r"iteration +(\d+)/", job.output)[-1])
        job.wait_for(rf"iteration +{at + 3}/")
        assert job.ctl("drain").returncode == 0
        assert job.finish().code == 3


@pytest.mark.slow
def test_the_load_of_experts_is_that_of_the_event_log(tmp_path: Path) -> None:
    experts = ("--num-experts", "4", "--expert-model-parallel-size", "2", "--disable-bias-linear")
    command = elastic_command(
        tmp_path / "events", 2, 1, 1, FOR_EVER, *QUIET, *experts, "--save", str(tmp_path / "saved")
    )
    with RunningJob(tmp_path / "events", command) as job:
        job.wait_for(rf"iteration +{2 * SPAN + 2}/")
        shown = json.loads(job.ctl("status", "--json").stdout)["expert_loads"]
        text = job.ctl("status").stdout
        assert job.ctl("drain").returncode == 0
        result = job.finish()
    (logged,) = [record.fields for record in result.of("experts") if record.fields["step"] == shown["step"]]
    assert shown["step"] >= SPAN and shown["imbalance"] == logged["imbalance"]
    for busiest in shown["busiest"]:
        tokens = logged["tokens"][str(busiest["layer"])]
        assert tokens[busiest["expert"]] == max(tokens)
        assert busiest["ratio"] == max(tokens) * len(tokens) / sum(tokens)
    assert len(shown["busiest"]) == 4 and re.search(r"experts +the busiest rank has \d\.\d\d times", text)


def test_the_doctor_names_the_nodes_that_a_job_waits_for(tmp_path: Path) -> None:
    launch = ("--nnodes", "3", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    with RunningJob(tmp_path, elastic_command(tmp_path, 1, 1, 1, 1, launch=launch)) as job:
        job.wait_for(r"waiting for node 1 of 3 .*\(9 s\)")
        told = job.ctl("doctor")
    assert told.returncode == 1, told.stdout + told.stderr
    assert (
        "waits for nodes {1,2} of 3 at 127.0.0.1:" in told.stdout and "ok       store          served by" in told.stdout
    )
    assert "Traceback" not in told.stderr
