"""Random jobs are a function of the seed; one that fails is told with the command that repeats it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.integration.kill_walk import LAYOUTS
from tests.unit.tools.history_runs import SPOILED, Job, write
from tools.chaos import __main__ as chaos
from tools.chaos.acts import ACTS, Act
from tools.chaos.jobs import KINDS, SETTINGS, drawn, layout_of
from tools.chaos.jobs import Job as ChaosJob
from tools.chaos.reference import Played, judge, rules_for


def test_jobs_are_a_function_of_the_seed_and_of_every_kind() -> None:
    jobs = [drawn("7", number) for number in range(200)]
    assert jobs == [drawn("7", number) for number in range(200)]
    assert {job.kind for job in jobs} == set(KINDS) == set(ACTS)
    assert jobs != [drawn("8", number) for number in range(200)]
    exact = [LAYOUTS[job.layout] for job in jobs if job.exact]
    assert exact and all(layout.experts == layout.chunks == 1 for layout in exact), "others are refused at the start"


def test_every_setting_is_drawn_where_it_fits() -> None:
    jobs = [job for job in (drawn("7", number) for number in range(2000)) if job.kind in ("outside", "nodes")]
    for setting in (setting for line in SETTINGS for setting in line):
        having = [job for job in jobs if contains(job.flags, setting.words)]
        assert having and all(setting.fits(layout_of(job.kind, job.layout)) for job in having), setting
        assert setting.exact or not any(job.exact for job in having), setting
    assert not any(job.etcd and "gloo" in job.flags for job in jobs), "refused at the start"


def contains(flags: tuple[str, ...], words: tuple[str, ...]) -> bool:
    return any(flags[at : at + len(words)] == words for at in range(len(flags)))


def test_copies_that_receive_state_may_go_back_a_step() -> None:
    jobs = [drawn("7", number) for number in range(200)]
    assert {rules_for(job).state_mode for job in jobs if "state" in job.flags or "muon" in job.flags} == {True}
    assert {rules_for(job).state_mode for job in jobs if not {"state", "muon"} & {*job.flags}} == {False}


def good(job: ChaosJob, folder: Path, played: Played) -> None:
    played.faults = 2
    history = Job(0, 3)
    for _ in range(3):
        history.step()
    write(folder / "events", history.end())


def spoiled(job: ChaosJob, folder: Path, played: Played) -> None:
    good(job, folder, played)
    history = Job(0, 3)
    for _ in range(3):
        history.step()
    files = history.end()
    SPOILED["records_differ"][0](files, random.Random(0))
    write(folder / "events", files)


def breaks(job: ChaosJob, folder: Path, played: Played) -> None:
    played.smaller = "dp2 kill:rank=1"
    raise AssertionError("exit status 1")


def told(act: Act, folder: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    patch.setattr(chaos, "ACTS", dict.fromkeys(KINDS, act))
    status = chaos.main(["--seed", "7", "--only", "3", "--folder", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    assert (status == 1) == bool(json.loads(lines[-1])["failed"])
    return lines


def test_a_job_with_a_good_history_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = json.loads(told(good, tmp_path, monkeypatch, capsys)[-1])
    assert (result["jobs"], result["faults"], result["failed"]) == (1, 2, [])


@pytest.mark.parametrize(("act", "why"), [(spoiled, "one history: "), (breaks, "AssertionError: exit status 1")])
def test_a_job_that_fails_is_told_with_the_command_that_repeats_it(
    act: Act, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = told(act, tmp_path, monkeypatch, capsys)
    assert any(why in line for line in lines)
    assert "repeat: python -m tools.chaos --seed 7 --only 3" in lines
    assert ("shrunk: python -m tests.scenario 'dp2 kill:rank=1' --as cluster" in lines) == (act is breaks)
    (kept,) = tmp_path.glob("*/why.txt")
    assert why in kept.read_text()


def test_a_lost_step_is_a_failure_though_the_history_is_one(tmp_path: Path) -> None:
    history = Job(0, 2)
    history.step()
    history._say(0, "recovery", step=1, outcome="re-run", seconds={}, lost_steps=2)
    write(tmp_path / "events", history.end())
    played = Played()
    judge(tmp_path / "events", played)
    assert played.why == ["a step was lost: rank00000.jsonl"]
