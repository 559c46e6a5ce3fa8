"""The status of a job in lines that a person can read."""

from __future__ import annotations

import msgspec
import pytest

from megatron.elastic.control.answers import (
    GenerationStatus,
    HistoryStatus,
    JobStatus,
    NodeStatus,
    ProgressStatus,
    RankStatus,
    ReshapeStatus,
    ToleranceStatus,
    WorkerStatus,
)
from megatron.elastic.control.history import LossNote
from megatron.elastic.control.observations import BusiestExpert, ExpertLoads, Protection, Recovered
from megatron.elastic.control.status_text import duration, progress_line, status_lines, summary_lines

RECOVERED = Recovered(3, 118, "re-run", {"decide": 0.02, "edit": 0.1, "plan": 0.01, "settle": 0.054}, lost=(3,), at=330)
STATUS = JobStatus(
    run_id="llama",
    up_s=400.0,
    job_s=400.0,
    state="training",
    progress=ProgressStatus(120, 500, 960, 1.8, 0.5, 760.0, 3.25, 0.4, 2.0),
    generation=GenerationStatus(3, 3, ()),
    members=(0, 1, 2),
    pending=("join",),
    tolerance=ToleranceStatus(3, "state now survives the loss of any 1 rank"),
    reshape=ReshapeStatus(1, "TP 1, PP 3, DP 1", "in force", "TP 1, PP 3, DP 1 since step 40"),
    moving="7 layers (embedding and head count) move to other ranks",
    history=HistoryStatus(
        losses=1,
        recoveries=1,
        changes=0,
        lost_steps=0,
        mttr_s=0.184,
        lost_s={"decide": 0.02, "computed again": 1.2},
        unprotected_s=0.0,
        first_step=1,
        stepping_s=240.0,
        goodput=0.9931,
        protection=Protection(1, 0, 0, 12),
        last_losses=(LossNote(329.0, 3, 0, "gpu2", "signal SIGKILL", 118),),
        last_recoveries=(RECOVERED,),
    ),
    ranks={rank: RankStatus("member" if rank < 3 else "starting", int(rank == 3), True) for rank in range(4)},
    nodes={0: NodeStatus("gpu1", True, 0, 0.0), 1: NodeStatus("gpu2", True, 1, 55.0)},
    workers_here={0: WorkerStatus(71, 121, "compute", (), 0.2), 1: WorkerStatus(72, 121, "compute", (), 0.3)},
    expert_loads=ExpertLoads(112, 16, 1.321, (BusiestExpert(2, 5, 1.9), BusiestExpert(4, 11, 3.104))),
)


def test_a_glance_shows_step_members_protection_losses_and_what_moves() -> None:
    assert "\n".join(status_lines(STATUS)) == (
        "job         llama: training, generation 3, up 6 min 40 s\n"
        "step        120 of 500 (24%), 2.000 s a step, 12 min 40 s left, loss 3.25\n"
        "members     3 of 4 ranks {0-2} on 2 nodes\n"
        "            starting: {3}\n"
        "            node 1 (gpu2): left out for 55 s, 1 loss within an hour\n"
        "can be lost state now survives the loss of any 1 rank\n"
        "moving      7 layers (embedding and head count) move to other ranks\n"
        "experts     the busiest rank has 1.32 times the mean of tokens; "
        "expert 11 of layer 4 has 3.10 times that of its layer (step 112)\n"
        "reshape     in force: TP 1, PP 3, DP 1 since step 40\n"
        "goodput     99.31% of 4 min; lost: decide 0.020 s, computed again 1.200 s\n"
        "losses      1 loss, 1 recovery of 0.184 s on average (MTTR), 0 other changes of members\n"
        "last losses 71 s ago: rank 3 on gpu2 at step 118: signal SIGKILL\n"
        "recoveries  70 s ago: generation 3 without {3}, step 118 re-run: 0.184 s "
        "(decide 0.020, edit 0.100, plan 0.010, settle 0.054)\n"
        "pending     join\n"
        "here        {0,1} step 121, compute (rank 0: pid 71, rank 1: pid 72)"
    )


def test_progress_is_one_line_and_the_summary_has_steps_losses_and_lost_time() -> None:
    assert progress_line(STATUS) == (
        "training; step 120 of 500 (24%), 2.000 s a step, 12 min 40 s left, loss 3.25; 3 of 4 ranks; "
        "1 loss, MTTR 0.184 s; goodput 99.3%"
    )
    assert summary_lines(STATUS) == [
        "steps 1 to 120 of 500: 120 committed in 4 min; loss 3.25",
        "1 loss, 1 recovery of 0.184 s on average (MTTR), 0 other changes of members",
        "goodput 99.31% of 4 min; lost: decide 0.020 s, computed again 1.200 s",
    ]


def test_a_job_before_its_first_step_says_so() -> None:
    past = HistoryStatus(0, 0, 0, 0, None, {}, 0.0, -1, 0.0, None, Protection(), (), ())
    early = msgspec.structs.replace(STATUS, state="starting", progress=None, history=past, moving="", pending=())
    early = msgspec.structs.replace(early, expert_loads=None)
    text = "\n".join(status_lines(early))
    assert "none committed on this node" in text and "goodput     not known" in text
    assert "experts" not in text
    assert summary_lines(early)[0] == "no step was committed"
    assert progress_line(early) == "starting; 3 of 4 ranks"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (float("inf"), "not known"),
        (0.0, "0.000 s"),
        (9.9, "9.900 s"),
        (61.04, "61.0 s"),
        (100, "1 min 40 s"),
        (7200, "2 h"),
        (180_000, "2 d 2 h"),
    ],
)
def test_durations_have_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text
