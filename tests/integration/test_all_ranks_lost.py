"""All ranks of a job killed at one moment: no rank is left that could tell of it, and the job tells of it all the same.

Real SIGKILLs of real processes, which are stopped before, so that none of them sees another one end.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from megatron.elastic.control.requests import Status
from megatron.elastic.ctl import ask
from tests.integration.elastic_job import RunningJob, elastic_command, elastic_job, largest_deviation

DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
RATES = ("--lr", "1e-4", "--lr-decay-iters", "400", "--lr-warmup-iters", "2")
SLOW = ("--elastic-allow-inject", "--elastic-inject", "delay:count=0,seconds=0.2")
"""A checkpoint takes less time than a step."""
MANY, STATE_LOST, DRAINED = 4000, 4, 3


def kill_all(job: RunningJob) -> None:
    workers = [worker.pid for worker in ask(job.run_id, 0, Status()).workers_here.values()]
    assert len(workers) == 2
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in workers:
            os.kill(pid, number)


def test_the_job_goes_back_to_its_last_checkpoint_and_says_which_steps_it_computes_again(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    saving = ("--save", saved, "--load", saved, "--save-interval", "3")
    command = elastic_command(tmp_path / "killed", 2, 1, 1, MANY, *DROPOUT, *RATES, *SLOW, *saving)
    with RunningJob(tmp_path / "killed", command) as job:
        job.wait_for("successfully saved checkpoint from iteration +3 ")
        job.wait_for(r"iteration +5/")
        kill_all(job)
        said = job.wait_for(
            r"all ranks ended at once, in step (\d+): the job goes back to its last checkpoint, "
            r"of step (\d+) \(--load\); (?:steps (\d+) to (\d+) are computed again|no step is lost)\n"
        )
        ended_in, back = int(said[1]), int(said[2])
        job.wait_for(rf"iteration +{ended_in + 2}/", after=said.end())
        job.launcher.send_signal(signal.SIGTERM)
        result = job.finish()
    assert result.code == DRAINED and "Traceback" not in result.output, result.output[-6000:]
    assert back % 3 == 0 and back < ended_in
    assert said[3] is None if ended_in == back + 1 else (int(said[3]), int(said[4])) == (back + 1, ended_in - 1)
    assert result.output.count("goes back to its last checkpoint") == 1
    ways = sorted((way.rank, way.fields["step"], way.fields["lost_steps"]) for way in result.of("recovery"))
    assert ways == [(rank, back + 1, ended_in - 1 - back) for rank in range(2)]
    whole = elastic_job(tmp_path / "whole", 2, 1, 1, ended_in + 2, *DROPOUT, *RATES).committed
    assert largest_deviation(whole, {step: result.committed[step] for step in whole}) < 1e-5


def test_without_a_checkpoint_it_ends_and_does_not_begin_with_step_1_again(tmp_path: Path) -> None:
    command = elastic_command(tmp_path, 2, 1, 1, MANY, *SLOW)
    with RunningJob(tmp_path, command) as job:
        job.wait_for(r"iteration +3/")
        kill_all(job)
        result = job.finish()
    assert result.code == STATE_LOST, result.output[-6000:]
    assert re.search(
        r"\[launch\] all ranks ended at once, in step \d+, and --load has no checkpoint: the job ends, "
        r"since it would begin with step 1 again\n",
        result.output,
    ), result.output[-6000:]
    assert len(re.findall(r"iteration +1/", result.output)) == 1 and "Traceback" not in result.output
