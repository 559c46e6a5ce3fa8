"""A rank dies at any named point of a step: the same step is committed, with the same samples, by those who are left.

Real jobs under the launcher with real SIGKILLs, dropout 0.1, fp32, compared with an
undisturbed run step by step. One job goes through many losses, each when the rank
before is back (:mod:`kill_walk`): quick ones through a few, the slow walk through
every named point of every rank of five layouts, three jobs a layout.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
from pathlib import Path

import pytest

from megatron.elastic.engine.inject import KILL_POINTS, RELAY_POINTS, STEP_POINTS
from megatron.elastic.observe.events import read_events
from tests.integration.elastic_job import ROOT, JobResult, elastic_command, elastic_job, largest_deviation
from tests.integration.kill_walk import (
    DROPOUT,
    GROUPS,
    LAYOUTS,
    MANY,
    PHASES,
    RATES,
    TWO,
    cases_of,
    compare,
    flags_of,
    undisturbed,
    victim,
    walk,
)
from tests.integration.launcher_cluster import cluster, descendants
from tests.integration.test_rank_orders import BACK
from tests.scenario.in_job import play
from tests.scenario.scenario import RETURNS, Scenario, parse

STEPS = 5
PARK = ("--elastic-tensor", "park")
ALONE = (*STEP_POINTS, "between_steps", "in_evaluate")
"""Points of the walk that nobody returns from: those that a rank comes to in every step."""


def one(layout: str, point: str, rank: int) -> Scenario:
    """The case of ``rank`` killed at ``point``."""
    return next(case for case in cases_of(LAYOUTS[layout], point) if victim(case) == rank)


def both(first: tuple[int, str], second: tuple[int, str]) -> Scenario:
    """Two ranks lost one after the other, (rank, point) each."""
    return parse(" ".join(f"kill:rank={rank},losses=0,point={point}" for rank, point in (first, second)))


def test_many_losses_and_returns_in_one_job_cost_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each phase of the transaction, between steps, while a rank is let in, and a second one during recovery.

    Samples come through loader workers, which end with their rank, and nothing is left of them on disk.
    """
    points = [("mid_backward", 0), ("after_vote", 3), ("after_gather", 0), ("between_steps", 2), ("in_join", 1)]
    cases = [one("pp2dp2", *case) for case in (*points, ("in_recovery_edit", 3))]
    with tempfile.TemporaryDirectory(prefix="t") as scratch:  # not below tmp_path: names of sockets are short
        monkeypatch.setenv("TMPDIR", scratch)
        walk(tmp_path, LAYOUTS["pp2dp2"], cases, *TWO)
        assert not os.listdir(scratch)


def test_over_gloo_losses_with_saves_and_returns_cost_no_step(tmp_path: Path) -> None:
    """Its gathers of parameters write other values in between, so members wait for that of an admission.

    Its messages, also those of a save, are done for a thread that waits for them alone.
    """
    cases = [one("pp2dp2", point, 1) for point in ("mid_backward", "in_save")]
    walk(tmp_path, LAYOUTS["pp2dp2"], cases, "--elastic-comm", "gloo", *flags_of("phases", tmp_path))


@pytest.mark.slow
def test_a_tensor_parallel_group_that_waits_for_its_rank_costs_no_step(tmp_path: Path) -> None:
    """Its partner is parked; in the last case it is lost as well, in the recovery from the first loss."""
    cases = [one("tp2dp2", *case) for case in (("after_ship", 3), ("mid_update", 0), ("in_recovery_decide", 1))]
    walk(tmp_path, LAYOUTS["tp2dp2"], cases, *TWO, *PARK)


@pytest.mark.slow
def test_a_tensor_parallel_group_goes_on_with_the_ranks_it_has(tmp_path: Path) -> None:
    """Its first rank, which reads the data set, is lost too; the losses are those of the whole group."""
    cases = [one("tp2dp2", *case) for case in (("mid_backward", 1), ("mid_update", 0))]
    walk(tmp_path, LAYOUTS["tp2dp2"], cases)
    said = (tmp_path / "output.txt").read_text()
    assert "rank 0 goes on" in said
    assert "rank 1 goes on" in said
    assert "parked" not in said


@pytest.mark.slow
def test_a_pipeline_goes_on_with_cells_of_unequal_size(tmp_path: Path) -> None:
    """Without a replica: three ranks in one stage, four in the other. Slices of the sequence become whole and back."""
    cases = [one("tp4pp2", *case) for case in (("mid_backward", 1), ("after_vote", 4))]
    walk(tmp_path, LAYOUTS["tp4pp2"], cases, "--sequence-parallel")
    said = (tmp_path / "output.txt").read_text()
    for group, stage in (("{0,2,3}", 0), ("{5-7}", 1)):
        assert f"ranks {group} go on" in said and f"(stage {stage}, replica 0; ranks" in said
        off = f"sequence parallelism is off in tensor-parallel group {group}: 3 does not divide 32 positions"
        assert said.count(off) == 1


@pytest.mark.slow
def test_the_gloo_baseline_survives_as_well(tmp_path: Path) -> None:
    """Here with two model chunks a stage."""
    cases = [one("pp2dp2v2", "mid_forward", 1), one("pp2dp2v2", "after_reduce", 2)]
    walk(tmp_path, LAYOUTS["pp2dp2v2"], cases, "--elastic-comm", "gloo")


def test_every_named_point_is_walked() -> None:
    """Except the point before the first step, where all ranks start anew, and points that some layouts never reach."""
    walked = sorted(point for points in GROUPS.values() for point in points)
    assert walked == sorted(set(KILL_POINTS) - {"in_setup", *RELAY_POINTS})


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("layout", [*LAYOUTS, "pp2dp2 gloo"])
def test_every_point_of_every_rank(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, layout: str, group: str
) -> None:
    """One job a group of points: up to 192 losses, each rank back before the next."""
    layout, _, comm = layout.partition(" ")
    flags = ("--elastic-comm", comm or "elastic")
    cases = [case for point in GROUPS[group] for case in cases_of(LAYOUTS[layout], point)]
    shared = tmp_path_factory.getbasetemp() / "undisturbed"
    walk(tmp_path, LAYOUTS[layout], cases, *flags_of(group, tmp_path), *flags, seconds=3600.0, shared=shared)


@pytest.mark.slow
@pytest.mark.parametrize("at", range(len(ALONE)))
@pytest.mark.parametrize("layout", ["tp4pp2", "tp2pp2dp2", "tp4dp2"])
def test_every_point_of_every_rank_that_does_not_return(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, layout: str, at: int
) -> None:
    """Two jobs that lose every second rank of eight, each at another point; the tests together, every pair."""
    shared = tmp_path_factory.getbasetemp() / "undisturbed"
    for victims in ((0, 6, 2, 4), (5, 3, 7, 1)):
        points = [ALONE[(at + 4 * number) % len(ALONE)] for number in range(4)]
        kills = [
            f"kill:rank={rank},step={3 * number + 3},point={point}"
            for number, (rank, point) in enumerate(zip(victims, points, strict=True))
        ]
        folder = tmp_path / f"without {victims[0]}"
        text = f"{LAYOUTS[layout]} steps=15 back=never evaluate=3 mirrors=2 {' '.join(kills)}"
        assert play(parse(text), folder, shared) == "kept", text
        lost = {record.fields["lost_rank"] for record in read_events(folder / "events") if record.kind == "loss"}
        assert lost == set(victims), text


@pytest.mark.slow
@pytest.mark.parametrize("returns", [name for name in RETURNS if name != "soon"])
@pytest.mark.parametrize("layout", ["pp2dp2", "tp2dp2", "tp2pp2dp2", "tp4dp2"])
def test_it_does_not_matter_when_a_lost_rank_is_back(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, layout: str, returns: str
) -> None:
    """Within the step of its loss, while the others vote, between two steps, while copies are made without it."""
    points = ("mid_backward", "after_reduce", "after_vote", "mid_update")
    cases = [case for point in points for case in cases_of(LAYOUTS[layout], point)]
    shared = tmp_path_factory.getbasetemp() / "undisturbed"
    walk(tmp_path, LAYOUTS[layout], cases, seconds=3600.0, shared=shared, returns=returns)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "first", "second"), [("tp2dp2", 0, 3), ("pp2dp2", 2, 3)])
def test_a_stage_without_a_living_group_waits_for_its_ranks(
    tmp_path: Path, layout: str, first: int, second: int
) -> None:
    """Its state survives (in parked partners; on the other stage), its ranks are started again: the step is finished.

    Once in a step that has to be run again, once in one that was committed.
    """
    cases = [
        both((first, "before_reduce"), (second, "in_recovery_resume")),
        both((first, "after_vote"), (second, "in_recovery_edit")),
    ]
    walk(tmp_path, LAYOUTS[layout], cases, *TWO, *PARK)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "first", "second"), [("tp2dp2", 0, 3), ("pp2dp2", 2, 3)])
def test_a_stage_without_a_living_group_waits_for_its_ranks_between_steps_too(
    tmp_path: Path, layout: str, first: int, second: int
) -> None:
    """The host's loop is at its log line, in evaluation, in saving: whoever comes back is told what was over."""
    points = ("after_step", "in_evaluate", "in_save", "save_finish")
    cases = [both((first, point), (second, "in_recovery_resume")) for point in points]
    flags = (*PHASES, "--log-params-norm", "--save", str(tmp_path / "saved"))
    walk(tmp_path, LAYOUTS[layout], cases, *TWO, *PARK, *flags)


@pytest.mark.slow
def test_without_respawn_a_stage_without_a_living_group_ends_the_job(tmp_path: Path) -> None:
    script = "kill:rank=0,losses=0,point=before_reduce;kill:rank=3,losses=0,point=in_recovery_resume"
    flags = (*TWO, *PARK, "--no-elastic-respawn", "--elastic-allow-inject", "--elastic-inject", script)
    ended = elastic_job(tmp_path, 4, 2, 1, 5, *flags)
    assert ended.code == 4, ended.output[-3000:]
    assert "ranks [0, 3] are gone" in ended.output and "--no-elastic-respawn" in ended.output
    assert "Traceback" not in ended.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "script", "lost"),
    [
        ("pp2dp2", "kill:rank=0|3,step=3,point=before_reduce", {0, 3}),
        # What the first loss made move is ready to count when the vote about it is cut short by the second.
        (
            "tp2dp2",
            "kill:rank=0,step=2,point=mid_forward;delay:step=3,point=after_reduce;kill:rank=1,step=3,point=before_vote",
            {0, 1},
        ),
        ("tp2dp2", "kill:rank=2,step=5,point=mid_backward", {2}),
        ("pp2dp2", "kill:rank=3,step=5,point=after_vote", {3}),
        ("pp2dp2", "kill:rank=0,step=5,point=after_step", {0}),
        ("pp2dp2", "kill:rank=2,step=5,point=in_evaluate,nth=2;kill:rank=1,step=5,point=in_evaluate,nth=4", {1, 2}),
    ],
    ids=[
        "two stages at once",
        "its partner while state moves",
        "in the last step",
        "at its vote",
        "after it",
        "in the last batches",
    ],
)
def test_losses_without_returns(tmp_path: Path, layout: str, script: str, lost: set[int]) -> None:
    """The job ends as if nothing had happened: losses, and those of validation and test after the last step."""
    size = LAYOUTS[layout]
    job = (size.ranks, size.tensor, size.pipeline, 5, *DROPOUT, *TWO, "--eval-iters", "2", "--split", "60,20,20")
    whole = elastic_job(tmp_path / "whole", *job)
    flags = ("--no-elastic-respawn", "--elastic-allow-inject", "--elastic-inject", script)
    killed = elastic_job(tmp_path / "killed", *job, *flags)
    assert whole.code == killed.code == 0, killed.output[-6000:]
    seen = {int(rank) for rank in re.findall(r"injected kill: rank (\d+)", killed.output)}
    assert seen == lost
    assert set(killed.committed) == set(whole.committed)
    assert largest_deviation(whole.committed, killed.committed) < 1e-5
    assert all(record.fields["lost_steps"] == 0 for record in killed.of("recovery"))
    values = r"loss at iteration .*? lm loss value: (\S+)"
    evaluated = [[float(value) for value in re.findall(values, run.output)] for run in (whole, killed)]
    assert len(evaluated[0]) == 2 and evaluated[1] == pytest.approx(evaluated[0], rel=1e-5)


@pytest.mark.slow
def test_a_node_that_wakes_up_after_it_was_given_up_does_no_harm(tmp_path: Path) -> None:
    """All processes of a node are stopped in the middle of a run, given up, and wake up a generation later."""
    layout, events = LAYOUTS["tp2dp2"], tmp_path / "events"
    flags = (*DROPOUT, *RATES, "--elastic-detection-timeout", "0.5")
    command = elastic_command(events, layout.ranks, layout.tensor, layout.pipeline, MANY, *flags)
    script = command[command.index(str(ROOT / "pretrain_gpt.py")) :]
    with cluster(2, nodes=2, command=script) as job:
        job.wait_text("iteration        3/")
        asleep = [job.agents[1].pid, *descendants(job.agents[1].pid)]
        for pid in asleep:
            os.kill(pid, signal.SIGSTOP)
        job.wait_text("node unreachable")
        job.wait_text("recovered at generation 2")
        for pid in asleep:
            os.kill(pid, signal.SIGCONT)
        job.wait_text("joined by")
        back = [line for line in job.output if "joined by" in line]
        os.kill(job.agents[0].pid, signal.SIGTERM)
        assert job.exit_code(0) == 3, job.text()[-6000:]
    assert back
    result = JobResult(3, job.text(), read_events(events))
    lost = {(record.fields["lost_rank"], record.fields["lost_incarnation"]) for record in result.of("loss")}
    assert {rank for rank, _ in lost} == {2, 3}, "nobody of the other node is lost"
    assert all(record.fields["lost_steps"] == 0 for record in result.of("recovery"))
    assert compare(result, undisturbed(tmp_path / "undisturbed", layout, max(result.committed))) < 1e-5


def test_when_no_copy_is_left_the_job_says_what_is_lost(tmp_path: Path) -> None:
    """Both ranks of the last stage die at once: exit code 4, one line and the run's summary, no traceback."""
    script = "kill:rank=2|3,step=3,point=mid_forward"
    result = elastic_job(
        tmp_path, 4, 1, 2, STEPS, "--no-elastic-respawn", "--elastic-allow-inject", "--elastic-inject", script
    )
    assert result.code == 4, result.output[-3000:]
    assert "have no surviving copy" in result.output
    assert "Traceback" not in result.output
    summary = result.output[result.output.index("ends with exit status 4 after") :]
    assert "steps 1 to 2 of" in summary and "2 losses, " in summary and "goodput " in summary, summary


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        "kill:rank=2|3,step=6,point=mid_forward",
        "kill:rank=2,losses=0,step=6,point=mid_forward;kill:rank=3,losses=0,point=in_recovery_edit",
        "kill:rank=2,step=6,point=before_reduce;kill:rank=3,step=6,point=after_update",
    ],
    ids=["at once", "in the recovery from the first", "after the vote that follows"],
)
def test_when_no_copy_is_left_the_job_goes_back_to_its_last_checkpoint(tmp_path: Path, script: str) -> None:
    """By itself: what was committed after it is computed again, with the same samples and to the same losses."""
    size, saved = LAYOUTS["pp2dp2"], str(tmp_path / "saved")
    job = (size.ranks, size.tensor, size.pipeline, 8, *DROPOUT)
    whole = elastic_job(tmp_path / "whole", *job)
    saving = ("--save", saved, "--load", saved, "--save-interval", "3")
    killed = elastic_job(tmp_path / "killed", *job, *saving, "--elastic-allow-inject", "--elastic-inject", script)
    assert whole.code == killed.code == 0, killed.output[-6000:]
    found = re.search(
        r"have no surviving copy: the job goes back to its last checkpoint, of step 3 \(--load\); "
        r"steps 4 to (\d) are computed again",
        killed.output,
    )
    lost = max(record.fields["lost_steps"] for record in killed.of("recovery"))
    if "after_update" in script and found is None:  # the vote came so late that it named the new copies
        assert lost == 0
    else:
        assert found is not None and lost == int(found[1]) - 3, killed.output[-6000:]
    assert set(killed.committed) == set(whole.committed)
    assert largest_deviation(whole.committed, killed.committed) < 1e-5
    assert "Traceback" not in killed.output


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.slow
def test_a_loss_before_the_first_step_starts_all_ranks_anew(tmp_path: Path, nth: int) -> None:
    """While the engine forms, after state is resumed, while data is built: nothing is held yet that could be lost."""
    fault = ("--elastic-allow-inject", "--elastic-inject", f"kill:rank=1,point=in_setup,nth={nth}")
    whole = elastic_job(tmp_path / "whole", 4, 1, 2, 3, *DROPOUT)
    killed = elastic_job(tmp_path / "killed", 4, 1, 2, 3, *DROPOUT, *fault)
    assert killed.code == whole.code == 0, killed.output[-4000:]
    assert (
        "rank 1 was lost before the first step, when no rank could go on without it: all ranks are started again"
        in killed.output
    )
    assert killed.committed == whole.committed, "the same run, begun again"
    ended = elastic_job(tmp_path / "ended", 4, 1, 2, 3, *DROPOUT, *fault, "--no-elastic-respawn")
    assert ended.code == 4
    assert (
        "rank 1 was lost before the first step, when no rank could go on without it: the job ends" in ended.output
        and "Traceback" not in ended.output
    )


@pytest.mark.slow
def test_a_loss_in_evaluation_and_in_saving_repeats_the_phase(tmp_path: Path) -> None:
    """Validation losses are those of an undisturbed run, and the checkpoint saved by the survivors is resumed.

    The run that loses ranks is of a script that knows nothing of elasticity, under ``launch --adapt``.
    """
    flags = (
        *DROPOUT,
        "--eval-interval",
        "2",
        "--eval-iters",
        "2",
        "--save-interval",
        "4",
        "--log-params-norm",
        "--exit-duration-in-mins",
        "60",
        "--lr-decay-iters",
        "8",
    )
    whole = elastic_job(tmp_path / "whole", 4, 1, 2, 6, *flags)
    script = "kill:rank=2,step=2,point=in_evaluate;kill:rank=1,step=4,point=in_save"
    saved = str(tmp_path / "saved")
    kills = ("--no-elastic-respawn", "--elastic-allow-inject", "--elastic-inject", script, "--save", saved)
    mine = ROOT / "tests/integration/pretrain_mine.py"
    killed = elastic_job(
        tmp_path / "killed", 4, 1, 2, 4, *flags, *kills, "--greeting", "aloha", launch=("--adapt",), script=mine
    )
    assert whole.code == 0, whole.output[-4000:]
    assert killed.code == 0, killed.output[-4000:]
    assert len(killed.of("loss")) > 0 and "aloha: building a model" in killed.output
    assert killed.validation == {step: loss for step, loss in whole.validation.items() if step <= 4}
    resumed = elastic_job(tmp_path / "resumed", 2, 1, 2, 6, *flags, "--load", saved, "--override-opt-param-scheduler")
    assert resumed.code == 0, resumed.output[-4000:]
    later = {step: loss for step, loss in whole.committed.items() if step > 4}
    assert set(resumed.committed) == set(later)
    assert largest_deviation(later, resumed.committed) < 1e-5


@pytest.mark.slow
def test_a_rank_that_is_back_prints_the_means_of_the_whole_interval(tmp_path: Path) -> None:
    """The highest rank prints the lines, and returns in the middle of what the second line is about."""
    calm, killed = (
        elastic_job(tmp_path / name, 4, 1, 2, 8, "--log-interval", "4", "--elastic-allow-inject", *faults)
        for name, faults in (
            ("calm", ()),
            ("killed", ("--elastic-inject", f"kill:rank=3,step=6,point=mid_backward;{BACK}")),
        )
    )
    assert (calm.code, killed.code) == (0, 0), killed.output[-4000:]
    assert re.search(r"step 7 joined by 3", killed.output), killed.output[-4000:]
    assert sorted(calm.losses) == [1, 4, 8] and killed.losses == pytest.approx(calm.losses, rel=1e-5)


def test_a_rank_that_is_back_within_the_first_step_logs_it_too(tmp_path: Path) -> None:
    """Its stage has no other rank. The line of the job's first step is printed whatever the interval."""
    faults = ("--elastic-allow-inject", "--elastic-inject", "kill:rank=1,step=1,point=mid_backward")
    job = elastic_job(tmp_path, 2, 1, 2, 4, "--log-interval", "4", *faults, seconds=120)
    assert job.code == 0, job.output[-4000:]
    assert "step 1 joined by 1, re-run" in job.output and sorted(job.losses) == [1, 4]


@pytest.mark.slow
def test_a_repeated_log_line_has_the_time_of_its_whole_interval(tmp_path: Path) -> None:
    """The rank that prints is lost in the line, when the timers have been read and have begun anew."""
    slow = ("--elastic-allow-inject", "--elastic-inject", "delay:rank=0,step=2,seconds=1.5")
    job = elastic_job(
        tmp_path,
        2,
        1,
        1,
        4,
        *("--log-interval", "3", "--timing-log-level", "1", "--no-elastic-respawn", *slow),
        script=ROOT / "tests/integration/lost_in_timers.py",
        environment={"LOST_RANK": "1", "LOST_RANK_TIMER": "forward-backward"},
    )
    assert job.code == 0, job.output[-4000:]
    assert re.search(r"step 3 between steps, 0 steps lost", job.output), job.output[-4000:]
    times = re.findall(r"iteration\s+3/.*?elapsed time per iteration \(ms\): (\S+)", job.output)
    assert len(times) == 2 and all(float(time) >= 500.0 for time in times), "three steps, one of which sleeps"


@pytest.mark.slow
def test_a_rank_that_is_back_behind_the_first_line_counts_the_first_step_in_the_second(tmp_path: Path) -> None:
    """Megatron has the first step in both lines. The rank that prints returns in the evaluation between them."""
    evaluates = ("--log-interval", "3", "--eval-interval", "1", "--eval-iters", "1", "--elastic-allow-inject")
    calm, killed = (
        elastic_job(tmp_path / name, 2, 1, 2, 3, *evaluates, *faults, seconds=120)
        for name, faults in (
            ("calm", ()),
            ("killed", ("--elastic-inject", "kill:rank=1,step=1,point=in_evaluate")),
        )
    )
    assert (calm.code, killed.code) == (0, 0), killed.output[-4000:]
    assert "step 1 joined by 1" in killed.output
    assert sorted(calm.losses) == [1, 3] and killed.losses == pytest.approx(calm.losses, rel=1e-5)


@pytest.mark.slow
def test_a_rank_that_is_back_is_not_profiled(tmp_path: Path) -> None:
    """Its profiler would count other steps: one that is stopped before it records ended the process two steps later."""
    profiles = ("--profile", "--use-pytorch-profiler", "--profile-step-start", "2", "--profile-step-end", "4")
    faults = ("--elastic-allow-inject", "--elastic-inject", "kill:rank=1,step=3,point=after_vote")
    folders = ("--tensorboard-dir", str(tmp_path / "board"), "--save", str(tmp_path / "saved"), "--save-interval", "8")
    job = elastic_job(tmp_path, 2, 1, 2, 8, *profiles, "--profile-ranks", "0", "1", *folders, *faults, seconds=120)
    assert job.code == 0, job.output[-4000:]
    assert "step 3 joined by 1" in job.output and len(job.of("loss")) == 1, job.output[-4000:]
    assert [path.name for path in (tmp_path / "torch_profile").iterdir()] == ["rank-0.json.gz"]
    assert "--profile: rank 1 has joined" in job.output and "common state" not in job.output.lower()
