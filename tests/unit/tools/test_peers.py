"""Figures of a run beside peers are read from logs, with the same definitions for all contenders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron.elastic.observe.event_kinds import PhasesEvent, StepEvent
from megatron.elastic.observe.events import EventLog
from tools import peer_tables
from tools.bench._jobs import ROOT, environment
from tools.bench._peer_contenders import CONTENDERS, Place, free_ports
from tools.bench._peer_figures import (
    Commit,
    History,
    Strike,
    deviation,
    figures_of,
    losses_by_step,
    normal_step,
    read_own_log,
    read_peer_log,
)
from tools.bench._peer_processes import Command, Job, words_of
from tools.bench._peer_summary import merged, summary
from tools.bench._peer_trials import FAULTS
from tools.bench.peers import parsed, trials_of, without_folders
from tools.bench.peers_programs.layouts import LAYOUTS, PLAIN

RANKS, STEP = 3, 0.5


def steps(rank: int, first: int, last: int, begin: float, life: int = 0, rows: int = 30) -> list[Commit]:
    """Commits of ``first`` to ``last`` by one process, one every ``STEP`` seconds from ``begin`` on."""
    return [
        Commit(rank, life, step, begin + STEP * (step - first), begin + STEP * (step - first + 1), rows, 10, 2.0 / step)
        for step in range(first, last + 1)
    ]


def whole(last: int) -> list[Commit]:
    """Steps 1 to ``last`` of all ranks, from second 0 on."""
    return [commit for rank in range(RANKS) for commit in steps(rank, 1, last, 0.0)]


def history(commits: list[Commit], *discarded: tuple[int, float]) -> History:
    return History(tuple(sorted(commits, key=lambda commit: commit.wall)), discarded)


STRIKE = Strike(5.25, frozenset({2}))
"""In the middle of step 11."""


def test_a_shrunken_batch_is_told_and_its_samples_are_lost() -> None:
    after = [commit for rank in (0, 1) for commit in steps(rank, 11, 20, 8.0, rows=20)]
    found = figures_of(history(whole(10) + after, (0, 6.0), (0, 7.0), (1, 6.0)), STRIKE, RANKS)
    assert found.mttr_s == pytest.approx(8.5 - 5.25 - STEP)
    assert (found.rows_before, found.rows_after, found.rows_lost) == (30, 20, 100)
    assert found.whole_after_s is None and found.rejoin_stall_s is None
    assert found.steps_discarded == 2
    assert found.throughput_without == pytest.approx(20 / 30)


def test_a_step_that_all_had_computed_before_the_signal_is_no_recovery() -> None:
    late = [commit for rank in (0, 1) for commit in steps(rank, 11, 11, 5.0)]
    after = [commit for rank in (0, 1) for commit in steps(rank, 12, 20, 9.0)]
    assert figures_of(history(whole(10) + late + after), STRIKE, RANKS).mttr_s == pytest.approx(9.5 - 5.25 - STEP)


def test_a_step_that_goes_on_in_a_new_membership_is_the_recovery() -> None:
    same = [replace(commit, membership=1) for rank in (0, 1) for commit in steps(rank, 11, 20, 5.2)]
    assert figures_of(history(whole(10) + same), STRIKE, RANKS).mttr_s == pytest.approx(5.7 - 5.25 - STEP)


def test_one_survivor_that_never_commits_again_is_no_recovery() -> None:
    assert figures_of(history(whole(10) + steps(0, 11, 20, 9.0)), STRIKE, RANKS).mttr_s is None


def test_ranks_that_are_given_up_with_a_lost_one_are_no_survivors() -> None:
    alone = history(whole(10) + steps(0, 11, 20, 9.0))
    assert figures_of(alone, replace(STRIKE, given_up=frozenset({1})), RANKS).mttr_s == pytest.approx(9.5 - 5.25 - STEP)
    assert LAYOUTS["tp2dp2"].replica_of(3) == {2, 3} and PLAIN.replica_of(3) == {3}


def test_steps_committed_again_from_a_checkpoint_are_undone() -> None:
    again = [commit for rank in range(RANKS) for commit in steps(rank, 9, 20, 12.0, life=1)]
    found = figures_of(history(whole(10) + again), STRIKE, RANKS)
    assert found.steps_undone == 2 and found.rows_lost == 0
    assert found.whole_after_s == pytest.approx(12.5 - 5.25)
    assert found.rejoin_stall_s is None, "all came back together"


def test_the_wait_for_a_rank_that_comes_back_is_the_rejoin_stall() -> None:
    between = [commit for rank in (0, 1) for commit in steps(rank, 11, 13, 6.0)]
    joined = [commit for rank in (0, 1) for commit in steps(rank, 14, 20, 8.5)]
    found = figures_of(history(whole(10) + between + joined + steps(2, 14, 20, 8.5, life=1)), STRIKE, RANKS)
    assert found.rejoin_stall_s == pytest.approx(9.0 - 7.5 - STEP)
    assert found.whole_after_s == pytest.approx(9.0 - 5.25)


def test_too_few_steps_before_the_fault_are_an_error() -> None:
    with pytest.raises(ValueError, match="too few steps"):
        normal_step(whole(4))


def test_the_loss_of_a_batch_weighs_ranks_by_their_samples_and_takes_the_newest() -> None:
    old = Commit(0, 0, 1, 0.0, 1.0, 30, 10, 9.0)
    new = [
        Commit(0, 1, 1, 2.0, 3.0, 30, 20, 3.0),
        Commit(1, 0, 1, 2.0, 3.0, 30, 10, 6.0),
        Commit(2, 0, 1, 2.0, 3.0, 30, 0, 99.0),
    ]
    unfinished = Commit(0, 1, 2, 3.0, 4.0, 30, 20, 3.0)
    assert losses_by_step(history([old, *new, unfinished])) == {1: pytest.approx(4.0)}
    assert deviation({1: 4.0, 2: 2.0, 3: 1.0}, {1: 1.0, 2: 2.5}, first=2) == pytest.approx(0.25)
    assert deviation({1: 4.0}, {1: 4.0}, first=2) is None


def test_a_torn_last_line_of_a_log_is_left_out(tmp_path: Path) -> None:
    line = {
        "kind": "step",
        "rank": 1,
        "pid": 7,
        "wall": 2.0,
        "step": 1,
        "began": 1.0,
        "rows": 30,
        "own_rows": 10,
        "loss": 2.5,
    }
    thrown = {"kind": "discarded", "rank": 1, "pid": 7, "wall": 3.0, "step": 2, "began": 2.0}
    (tmp_path / "rank00001.7.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(thrown)}\n{json.dumps(line)[:20]}")
    found = read_peer_log(tmp_path)
    assert found == History((Commit(1, 7, 1, 1.0, 2.0, 30, 10, 2.5),), ((1, 3.0),))


def test_words_are_the_last_line_that_tells_of_a_failure() -> None:
    output = 'Traceback\n  File "error.py", line 3\nRuntimeError: connection lost\nUserWarning: failed to mind\nbye\n'
    assert words_of(output) == "RuntimeError: connection lost"
    assert words_of("all is well\n") == ""


def test_no_process_of_a_job_is_left_also_if_it_left_its_session(tmp_path: Path) -> None:
    daemon = "import os, time; os.fork() or (os.setsid(), os.fork() and os._exit(0)); time.sleep(600)"
    job = Job([Command((sys.executable, "-c", daemon))], tmp_path)
    while len(job.processes()) < 2:
        assert not job.ended
    job.end()
    assert job.processes() == []


def test_every_contender_has_commands_and_known_faults(tmp_path: Path) -> None:
    place = Place(Path("python"), tmp_path, tmp_path / "data", 4, 100, free_ports(8))
    for name, contender in CONTENDERS.items():
        assert set(contender.faults) <= FAULTS.keys()
        for layout in contender.layouts:
            commands = contender.start(replace(place, layout=LAYOUTS[layout]))
            assert any(command.coordinator for command in commands) or "coordinator" not in contender.faults, name
            ranks = [command for command in commands if not command.coordinator or "torchft" not in command.words[0]]
            sizes = ("--tensor-model-parallel-size", str(LAYOUTS[layout].tensor)) if contender.own else (layout,)
            assert all(set(sizes) <= set(command.words) for command in ranks if "stores" not in command.words[2])


def test_a_summary_compares_with_the_quickest_peer_and_the_baseline_of_the_same_round() -> None:
    def calm(name: str, number: int, seconds: float) -> dict[str, object]:
        return {"contender": name, "fault": "calm", "number": number, "step_s": seconds, "losses": {"1": 4.0, "2": 2.0}}

    def killed(name: str, mttr: float | None) -> dict[str, object]:
        figures = dict.fromkeys(("whole_after_s", "rejoin_stall_s", "throughput_without"))
        counts = {"steps_undone": 0, "steps_discarded": 1, "rows_lost": 8, "rows_before": 32, "rows_after": 24}
        return {
            **{"contender": name, "fault": "kill", "number": 0, "load": 1.0, "struck_step": 2, "losses": {"2": 3.0}},
            **{
                "words": "" if mttr else "gave up",
                "figures": [{"mttr_s": mttr, "normal_step_s": 0.2, **figures, **counts}],
            },
        }

    rounds = [calm("megatron", 0, 0.2), calm("ours", 0, 0.22), calm("megatron", 1, 0.4), calm("ours", 1, 0.4)]
    found = summary(
        [*rounds, killed("ours", 0.1), killed("torchft", 4.0), killed("torchft_tuned", 1.0), killed("torchrun", None)]
    )
    assert found["best_mttr_s"]["kill"] == {
        "ours": 0.1,
        "peer": 1.0,
        "which": "torchft_tuned",
        "times": pytest.approx(10),
    }
    ours = found["contenders"]["ours"]
    assert ours["overhead"].high == pytest.approx(0.1) and ours["overhead"].low == pytest.approx(0.0)
    assert ours["faults"]["kill"]["loss_deviation"] == pytest.approx(0.5)
    assert found["contenders"]["torchrun"]["faults"]["kill"]["words"] == "gave up"
    assert found["contenders"]["torchft"]["faults"]["kill"]["batch_kept"] == pytest.approx(0.75)


def test_a_layout_has_two_faults_and_one_undisturbed_run_of_each_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["peers", "--layouts", "tp2dp2", "--contenders", "ours,ours_exact,torchrun", "--trials", "2"]
    monkeypatch.setattr(sys, "argv", asked)
    found = [trial.name for trial in trials_of(parsed())]
    calm = ["megatron.tp2dp2.calm.0", "plain.tp2dp2.calm.0"]
    kills = [[f"{name}.tp2dp2.kill.{n}" for name in ("ours", "torchrun")] + [f"ours.tp2dp2.stay.{n}"] for n in (0, 1)]
    assert found == [*calm, *kills[0], *kills[1]], "torchrun has no 'stay', exact mode no layouts"


def recovered(contender: str, seconds: float, layout: str = PLAIN.name) -> dict[str, object]:
    """The result of a trial with a kill."""
    one = dict.fromkeys(("whole_after_s", "rejoin_stall_s", "throughput_without"))
    counts = {"steps_undone": 0, "steps_discarded": 0, "rows_lost": 0, "rows_before": 32, "rows_after": 32}
    told = {"contender": contender, "fault": "kill", "number": 0, "layout": layout, "load": 1.0, "words": ""}
    losses = {"struck_step": 2, "losses": {"2": 3.0}, "at": "2026-11-25T09:00:00+00:00"}
    return {**told, **losses, "figures": [{"mttr_s": seconds, "normal_step_s": 0.2, **one, **counts}]}


def as_recorded(*results: dict[str, object], model: str = "small") -> dict[str, Any]:
    """The JSON object of a run with ``results``."""
    told = {"model": model, "ranks": 4, "calm_steps": 25, "versions": {"a peer": "1.0"}, "trial_s": 60.0}
    figures = {**told, "trials_asked": 2, "trials_done": 2, **summary(results)}
    read: dict[str, Any] = json.loads(json.dumps(figures, default=asdict))
    return read


def test_deviations_under_a_layout_are_from_its_baseline() -> None:
    calm = {"contender": "plain", "fault": "calm", "number": 0, "layout": "tp2dp2", "losses": {"2": 2.0}}
    found = summary([{**calm, "step_s": 0.2}, recovered("torchrun", 4.0, "tp2dp2")])
    assert found["contenders"] == {} and list(found["layouts"]) == ["tp2dp2"]
    kill = found["layouts"]["tp2dp2"]["contenders"]["torchrun"]["faults"]["kill"]
    assert kill["loss_deviation"] == pytest.approx(0.5)


def test_later_figures_take_the_place_of_recorded_ones_and_leave_the_others() -> None:
    recorded = as_recorded(recovered("ours", 0.5), recovered("torchft", 5.0))
    later = as_recorded(recovered("ours", 0.1), recovered("ours", 0.2, "tp2dp2"), recovered("torchrun", 4.0, "tp2dp2"))
    found = merged(recorded, later)
    assert found["best_mttr_s"]["kill"]["times"] == pytest.approx(50)
    assert found["contenders"]["torchft"] == recorded["contenders"]["torchft"]
    assert found["layouts"]["tp2dp2"]["best_mttr_s"]["kill"]["times"] == pytest.approx(20)
    again = merged(found, as_recorded(recovered("torchft", 4.0, "tp2dp2")))
    assert list(again["layouts"]["tp2dp2"]["contenders"]) == ["ours", "torchft", "torchrun"]
    assert again["contenders"] == found["contenders"]
    page = peer_tables.peers(again)
    assert "**Tensor parallel 2 x data parallel 2**, the last rank killed (measured from 2026-11-25T09:00:00" in page
    assert "| megatron-elastic | 0.2 | - | 100% | 0 | 0 | - |" in page
    with pytest.raises(ValueError, match="model: small is recorded, large was measured"):
        merged(recorded, as_recorded(recovered("ours", 0.1), model="large"))


def test_a_recorded_command_names_no_folder_of_its_machine() -> None:
    assert without_folders(["--environments", "e", "--trials", "2", "--kept", "k"]) == ["--trials", "2"]


@pytest.mark.parametrize(
    "flags",
    [
        *[("--contenders", "horse"), ("--faults", "flood"), ("--ranks", "2"), ("--ranks", "6"), ("--trials", "0")],
        *[("--layouts", "tp3"), ("--into", "nowhere.json")],
    ],
)
def test_bad_input_is_one_clear_line(
    flags: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peers", *flags])
    with pytest.raises(SystemExit):
        parsed()
    assert flags[0] in capsys.readouterr().err.splitlines()[-1]


def test_a_log_of_this_project_gives_a_commit_of_each_rank(tmp_path: Path) -> None:
    for rank in (0, 1):
        log = EventLog(tmp_path, rank, incarnation=2)
        log.generation = 3
        if rank == 0:
            log.write(StepEvent(step=5, samples=(64, 96), seconds=0.5, losses={"lm loss": 2.5}, computed=24))
        log.write(PhasesEvent(step=5, nanoseconds={}))
        log.close()
    found = read_own_log(tmp_path).commits
    assert sorted((c.rank, c.life, c.step, c.rows, c.loss, c.membership) for c in found) == [
        (0, 2, 5, 24, 2.5, 3),
        (1, 2, 5, 24, 2.5, 3),
    ]
    assert all(c.wall - c.began == pytest.approx(0.5) for c in found)


def test_tables_and_picture_say_where_a_contender_does_not_recover(tmp_path: Path) -> None:
    once = {"median": 1.5, "low": 1.0, "high": 2.0, "trials": 2}
    kill = {
        **{
            "trials": 2,
            "recovered": 2,
            "mttr_s": once,
            "whole_after_s": None,
            "rejoin_stall_s": None,
            "batch_kept": 0.75,
        },
        **{"rows_lost": 8, "steps_undone": 1, "steps_discarded": 0, "loss_deviation": 0.1, "words": ""},
        **{"throughput_without": None},
    }
    dead = {**kill, "recovered": 0, "mttr_s": None, "words": "RuntimeError: gone|lost"}
    row = {"title": "a peer", "own": False, "caveats": "", "coordinator": "", "overhead": None, "step_s": once}
    figures = {
        "contenders": {"peer": {**row, "faults": {"kill": kill, "rank0": dead}}},
        **{"versions": {"peer": "1.0"}, "best_mttr_s": {}, "trials_asked": 4, "trials_done": 2, "trial_s": 60.0},
    }
    page = peer_tables.peers(figures)
    assert "| a peer | 1.5 (1 to 2) | - | no |" in page and "RuntimeError: gone\\|lost" in page
    assert "the batch shrinks to 75%, 8 samples lost, 1 steps undone" in peer_tables.readme(figures)
    silent = {**row, "coordinator": "its launcher", "without_coordinator": "All end", "faults": {"coordinator": dead}}
    told = peer_tables.peers({**figures, "contenders": {"peer": silent}})
    assert "| a peer | coordinator killed: its launcher | All end |" in told, "not a line that says something else"
    peer_tables.picture(figures, tmp_path / "picture.svg")
    assert "<svg" in (tmp_path / "picture.svg").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kill_beside_torchrun_is_measured(tmp_path: Path, layout: str) -> None:
    place = os.environ.get("MEGATRON_ELASTIC_PEERS", str(ROOT / "out" / "peers"))
    small = ["--contenders", "ours,torchrun", "--faults", "calm,kill", "--trials", "1", "--losses", "1"]
    folders = ["--environments", place, "--kept", str(tmp_path)]
    command = [sys.executable, "-m", "tools.bench.peers", "--layouts", layout, *small, *folders]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=pipe, stderr=pipe, text=True) as bench:
        try:
            out, said = bench.communicate(timeout=280)
        except subprocess.TimeoutExpired:
            bench.send_signal(signal.SIGINT)  # so that it ends the jobs it started
            out, said = bench.communicate(timeout=30)
    assert bench.returncode == 0, said[-4000:]
    found = json.loads(out.splitlines()[-1])
    rows = (found if layout == PLAIN.name else found["layouts"][layout])["contenders"]
    ours, peer = (rows[name]["faults"]["kill"] for name in ("ours", "torchrun"))
    assert ours["recovered"] == peer["recovered"] == 1
    assert ours["steps_undone"] == ours["rows_lost"] == 0 and ours["batch_kept"] == 1
    assert ours["mttr_s"]["median"] < peer["mttr_s"]["median"]
