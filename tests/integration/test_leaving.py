"""SIGTERM and ``ctl`` at every moment of a job: it ends with status 3 and a checkpoint, or some of its ranks leave.

Real launchers and workers. A moment is held open by an injected delay of all ranks
at a named point, so that the signal arrives in it; what the moment is, is then read
from the output, not assumed.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.elastic_job import JobResult, RunningJob, elastic_command, elastic_job, largest_deviation

QUIET = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--lr-decay-iters", "8")
RARELY = ("--save-interval", "1000000")
ANY_SCHEDULE = ("--override-opt-param-scheduler",)
"""Megatron compares the number of iterations with that of the checkpoint otherwise."""
FOR_EVER = 100_000


def held(point: str, step: int, seconds: float = 3.0) -> str:
    """All ranks stay for ``seconds`` at a named point."""
    return f"delay:step={step},point={point},seconds={seconds}"


@dataclass(frozen=True)
class Moment:
    """Where the job is when the signal comes: ``seen`` in the output, with ``faults`` in the script."""

    name: str
    seen: str
    faults: str
    flags: tuple[str, ...] = ()
    last: int = 4
    """The newest iteration at which it may still be drained."""


MOMENTS = (
    Moment("prelude", r"Megatron flags", held("before_step", 1)),
    Moment("step", r"iteration +2/", held("mid_forward", 3)),
    Moment("evaluation", r"iteration +2/", held("in_evaluate", 2), ("--eval-interval", "2", "--eval-iters", "1")),
    Moment(
        "long evaluation",
        r"iteration +2/",
        "delay:step=2,count=0,point=in_evaluate,seconds=1",
        ("--eval-interval", "2", "--eval-iters", "600", "--train-iters", "10"),
    ),
    Moment("save", r"saving checkpoint at iteration +2", held("in_save", 2), ("--save-interval", "2")),
    Moment(
        "recovery",
        r"iteration +2/",
        "kill:rank=1,step=3,point=mid_forward;delay:rank=0|2|3,step=2,point=in_recovery_promote,seconds=3",
        ("--no-elastic-respawn",),
    ),
    Moment("joiner", r"lost rank 1", "kill:rank=1,step=2,point=mid_forward", last=200),
)
QUICK = ("long evaluation", "joiner")
"""Moments in each run of the tests, the others in long ones."""


def children(pid: int) -> list[int]:
    """Of a process's main thread."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def iteration_saved(folder: Path) -> int:
    """The iteration in the tracker file."""
    return int((folder / "latest_checkpointed_iteration.txt").read_text())


def drain_at(folder: Path, moment: Moment, world: int = 4, pipeline: int = 2) -> JobResult:
    saved = folder / "saved"
    command = elastic_command(
        folder / "events",
        world,
        1,
        pipeline,
        FOR_EVER,
        *QUIET,
        *RARELY,
        *moment.flags,
        "--save",
        str(saved),
        "--elastic-allow-inject",
        "--elastic-inject",
        moment.faults,
    )
    with RunningJob(folder / "events", command) as job:
        job.wait_for(moment.seen)
        job.launcher.send_signal(signal.SIGTERM)
        result = job.finish()
    assert result.code == 3, result.output[-5000:]
    assert "Traceback" not in result.output
    saved_at = iteration_saved(saved)
    assert saved_at == max(result.committed) <= moment.last, "the newest committed step, soon after the signal"
    assert f"drained at iteration {saved_at}, saved to" in result.output
    return result


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(m, id=m.name, marks=() if m.name in ("joiner", "long evaluation") else pytest.mark.slow)
        for m in MOMENTS
    ],
)
def test_sigterm_drains_at_the_next_boundary(tmp_path: Path, moment: Moment) -> None:
    drain_at(tmp_path, moment)


def test_a_worker_that_is_sent_sigterm_drains_the_job_and_exit_signal_handler_is_honoured_so(tmp_path: Path) -> None:
    """Slurm signals every process of a job step."""
    command = elastic_command(
        tmp_path / "events",
        2,
        1,
        1,
        FOR_EVER,
        *QUIET,
        *RARELY,
        "--save",
        str(tmp_path / "saved"),
        "--exit-signal-handler",
    )
    with RunningJob(tmp_path / "events", command) as job:
        job.wait_for(r"iteration +2/")
        workers = [pid for parent in children(job.launcher.pid) for pid in children(parent)]
        assert len(workers) == 2, "the launcher's child forks the workers"
        for pid in workers:
            os.kill(pid, signal.SIGTERM)
        result = job.finish()
    assert result.code == 3, result.output[-4000:]
    assert "--exit-signal-handler" in result.output
    assert iteration_saved(tmp_path / "saved") == max(result.committed)
    assert not result.of("loss")


SLOW_TO_RETURN = """
import os
import time

import pretrain_gpt

if __name__ == "__main__":
    if os.environ["MEGATRON_ELASTIC_INCARNATION"] != "0":
        time.sleep({seconds})
    pretrain_gpt.main()
"""
STAGE_LOST = "kill:rank=2,step=3,point=before_reduce;kill:rank=3,step=2,point=in_recovery_resume"
"""Both ranks of the last of two stages, one after the other; two mirrors keep its state on the other stage."""


def drained_while_waiting(folder: Path, seconds: float, *launch: str) -> JobResult:
    """SIGTERM while members wait for ranks that take so long to come back."""
    script = folder / "pretrain_slow.py"
    script.write_text(SLOW_TO_RETURN.format(seconds=seconds))
    command = elastic_command(
        folder / "events",
        4,
        1,
        2,
        FOR_EVER,
        *QUIET,
        *RARELY,
        "--elastic-mirrors",
        "2",
        "--save",
        str(folder / "saved"),
        "--elastic-allow-inject",
        "--elastic-inject",
        STAGE_LOST,
        launch=launch,
        script=script,
    )
    with RunningJob(folder / "events", command) as job:
        job.wait_for(r"ranks \[2, 3\] are gone.*: waiting up to")
        job.launcher.send_signal(signal.SIGTERM)
        job.wait_for(r"cannot save before ranks \[2, 3\] are back")
        result = job.finish()
    assert "Traceback" not in result.output
    return result


@pytest.mark.slow
def test_sigterm_while_a_lost_stage_is_waited_for_drains_when_it_is_back(tmp_path: Path) -> None:
    result = drained_while_waiting(tmp_path, 2.0)
    assert result.code == 3, result.output[-5000:]
    assert iteration_saved(tmp_path / "saved") == max(result.committed) >= 3
    assert result.output.count("drained at iteration") == 1


@pytest.mark.slow
def test_when_it_does_not_come_back_in_time_the_end_says_for_whom_was_waited(tmp_path: Path) -> None:
    result = drained_while_waiting(tmp_path, 60.0, "--shutdown-timeout", "1")
    assert result.code == 128 + signal.SIGTERM, result.output[-5000:]
    assert "ranks [2, 3] did not come back, without which nothing can be saved" in result.output
    assert not (tmp_path / "saved/latest_checkpointed_iteration.txt").exists()


@pytest.mark.slow
def test_ranks_asked_to_leave_give_up_their_blocks_and_can_come_back(tmp_path: Path) -> None:
    """ctl status, drain --ranks, checkpoint, admit, drain, against one job; losses are those of an undisturbed run."""
    saved = tmp_path / "saved"
    # With layers where they were, rank 2 alone has those of its stage; spread over all, it could leave as well.
    flags = (*QUIET, "--elastic-verify-interval", "5", "--elastic-migrate-after", "-1")
    command = elastic_command(tmp_path / "events", 4, 1, 2, FOR_EVER, *flags, *RARELY, "--save", str(saved))
    with RunningJob(tmp_path / "events", command) as job:
        job.wait_for(r"iteration +2/")
        assert job.ctl("drain", "--ranks", "3").returncode == 0
        left = job.wait_for(r"rank 3 leaves as requested").end()
        job.wait_for(r"iteration +\d+/", left)
        status = json.loads(job.ctl("status", "--json").stdout)
        assert status["members"] == [0, 1, 2] and status["ranks"]["3"]["standing"] == "done"
        refused = job.ctl("drain", "--ranks", "2")
        assert refused.returncode == 0
        job.wait_for(r"ranks 2 cannot leave: ")
        assert job.ctl("checkpoint").returncode == 0
        job.wait_for(r"successfully saved checkpoint")
        assert job.ctl("admit", "--ranks", "3").returncode == 0
        joined = job.wait_for(r"joined by 3").end()
        at = int(job.wait_for(r"iteration +(\d+)/", joined).group(1))
        job.wait_for(rf"iteration +{at + 5}/")
        assert job.ctl("drain").returncode == 0
        result = job.finish()
    assert result.code == 3, result.output[-5000:]
    assert not result.of("loss"), "who leaves is not lost"
    reasons = {record.fields["number"]: record.fields["reason"] for record in result.of("generation")}
    assert sorted(reasons.values()) == ["drain", "join"]
    undisturbed = elastic_job(tmp_path / "undisturbed", 4, 1, 2, 8, *flags)
    assert largest_deviation(undisturbed.committed, result.committed) < 1e-5
    assert sorted(result.committed) == list(range(1, max(result.committed) + 1)), "every step is committed"


@pytest.mark.slow
def test_a_rank_that_left_with_experts_of_its_own_does_not_keep_the_job_from_saving(tmp_path: Path) -> None:
    """Four ranks in two stages share experts in pairs, so that each has the only seat of its stage with its experts."""
    saved = tmp_path / "saved"
    experts = ("--num-experts", "4", "--moe-aux-loss-coeff", "0.01", "--disable-bias-linear")
    flags = (*QUIET, *experts, "--expert-model-parallel-size", "2")
    command = elastic_command(tmp_path / "events", 4, 1, 2, FOR_EVER, *flags, *RARELY, "--save", str(saved))
    with RunningJob(tmp_path / "events", command) as job:
        job.wait_for(r"iteration +2/")
        assert job.ctl("drain", "--ranks", "3").returncode == 0
        left = job.wait_for(r"rank 3 leaves as requested").end()
        job.wait_for(r"iteration +\d+/", left)
        job.launcher.send_signal(signal.SIGTERM)
        result = job.finish()
    assert result.code == 3, result.output[-5000:]
    at = iteration_saved(saved)
    assert at == max(result.committed)
    resumed = elastic_job(tmp_path / "resumed", 4, 1, 2, at + 2, *flags, "--load", str(saved), *ANY_SCHEDULE)
    assert resumed.code == 0 and set(resumed.committed) == {at + 1, at + 2}, resumed.output[-4000:]
