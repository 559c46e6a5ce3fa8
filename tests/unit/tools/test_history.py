"""The history checker passes every history that keeps the rules, and names the rule that a spoiled one breaks."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.tools.history_runs import SPOILED, History, Job, write
from tools.history.__main__ import launches, main
from tools.history.judge import Rules, Verdict, compare, judge
from tools.history.lines import Unreadable, read

ROOT = Path(__file__).resolve().parents[3]
HAPPENINGS = ("step", "lose_unknown", "lose_known", "lose_the_vote", "rejoin", "all_anew")
STEADY = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SEEDS, SIZES = st.integers(0, 10_000), st.integers(2, 5)
ORDERS = st.lists(st.sampled_from(HAPPENINGS), max_size=10)
EVENTFUL = ("step", "step", "lose_known", "step", "rejoin", "step", "lose_unknown", "step", "rejoin", "step")
"""One of a kind that every way to spoil a history needs."""


def ran(seed: int, ranks: int, order: tuple[str, ...] | list[str]) -> Job:
    job = Job(seed, ranks)
    for happening in order:
        getattr(job, happening)()
    job.end()
    return job


def judged(folder: Path, files: History, rules: Rules = Rules(), cut: dict[int, int] | None = None) -> Verdict:  # noqa: B008
    (lines,) = launches(read(write(folder, files, cut))).values()
    return judge(lines, rules)


def texts(found: Verdict) -> list[str]:
    return [str(one) for one in found.violations]


@STEADY
@given(SEEDS, SIZES, ORDERS, st.integers(0, 26))
def test_a_history_that_keeps_the_rules_passes(
    tmp_path: Path, seed: int, ranks: int, order: list[str], torn: int
) -> None:
    job = ran(seed, ranks, order)
    found = judged(tmp_path, job.files, Rules(exact=True), dict.fromkeys(job.cut, torn))
    assert not texts(found)
    assert not found.unended and found.generations >= 1


@STEADY
@given(SEEDS, SIZES, st.lists(st.sampled_from(HAPPENINGS[:-1]), max_size=4), st.sampled_from(sorted(SPOILED)))
def test_each_way_to_spoil_a_history_is_caught(
    tmp_path: Path, seed: int, ranks: int, order: list[str], name: str
) -> None:
    spoil, rules = SPOILED[name]
    job = ran(seed, ranks, [*EVENTFUL, *order])
    spoil(job.files, random.Random(seed))
    found = judged(tmp_path, job.files)
    assert {one.rule for one in found.violations} & set(rules), (name, texts(found))


@pytest.mark.parametrize("name", sorted(SPOILED))
def test_a_violation_names_ranks_steps_and_lines(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, _ = SPOILED[name]
    job = ran(3, 4, EVENTFUL)
    spoil(job.files, random.Random(1))
    assert main([str(write(tmp_path, job.files))]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["violations"] == len(lines) > 0
    assert all(".jsonl:" in line for line in lines)


def test_a_step_that_is_computed_again_has_other_bits_in_exact_mode(tmp_path: Path) -> None:
    job = ran(0, 3, ["step", "lose_the_vote", "step"])
    lost = next(line for lines in job.files.values() for line in lines if line["kind"] == "loss")["event"]["lost_rank"]
    vote = next(line for line in reversed(job.files[lost]) if line["kind"] == "record")
    vote["event"]["grad_norm"] *= 1.0 + 2**-52
    assert not texts(judged(tmp_path / "default", job.files))
    assert "one fingerprint" in {one.rule for one in judged(tmp_path / "x", job.files, Rules(exact=True)).violations}


def test_two_runs_of_a_job_have_one_fingerprint(tmp_path: Path) -> None:
    calm, torn = ran(0, 2, ["step"] * 4), ran(1, 4, ["step", "lose_known", "lose_unknown", "rejoin"])
    one, other = judged(tmp_path / "calm", calm.files), judged(tmp_path / "torn", torn.files)
    assert not list(compare(one, other))
    for lines in torn.files.values():
        for line in lines:
            if line["kind"] in ("record", "step") and line["event"]["step"] == 2:
                line["event"]["grad_norm"] = 0.25
    assert [text.split(":")[0] for text in compare(one, judged(tmp_path / "off", torn.files))] == ["one fingerprint"]


def test_state_that_is_lost_within_what_the_job_said_it_survives(tmp_path: Path) -> None:
    """Rank 1 of three is killed, and the two others end as if the state were lost with it."""
    job = Job(0, 3)
    job.step()
    job._say(0, "tolerance", step=1, ranks=1, nodes=1, text="state now survives the loss of any 1 rank")
    for rank in (0, 2):
        job._say(rank, "end", step=1, code=4, why="state of step 1 is lost: 2 blocks of units [0] have no ...")
    found = judged(tmp_path, job.files, Rules(running=True))
    assert [one.rule for one in found.violations] == ["state kept"]
    job.files[0][:] = [line for line in job.files[0] if line["kind"] != "end"]  # two are lost
    assert not texts(judged(tmp_path, job.files, Rules(running=True)))


def test_the_words_by_which_lost_state_is_recognised_are_the_engine_s() -> None:
    from megatron.elastic.engine.transaction.agreement import StateLost
    from tools.history.judge import LOST_STATE

    assert LOST_STATE.search(str(StateLost(7, ((0, 0, 0),))))


def test_a_line_that_is_no_event_is_an_error_and_two_launches_need_two_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "events", ran(0, 2, ["step"]).files)
    text = (folder / "rank00000.jsonl").read_text()
    (folder / "rank00000.jsonl").write_text(text + text)
    assert main([str(folder)]) == 2
    assert "rank00000.jsonl:10: rank 0.0 of run job begins for the second time" in capsys.readouterr().err
    (folder / "rank00000.jsonl").write_text(text + "half of something\n" + text)
    assert main([str(folder)]) == 2
    assert "rank00000.jsonl:10: not an event" in capsys.readouterr().err
    assert main([str(tmp_path / "none")]) == 2
    with pytest.raises(Unreadable):
        read(tmp_path)


def test_the_checker_imports_nothing_of_the_engine() -> None:
    code = (
        "import sys, tools.history.__main__; print([m for m in sys.modules if m.split('.')[0] in ('megatron','torch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
