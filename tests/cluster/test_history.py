"""The logs of the cluster's ranks before the history checker: runs by the rules, and runs without one of them."""

from __future__ import annotations

import json
import random
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster import cluster
from tests.cluster.cluster import Program
from tests.cluster.history import drawn, judged, main, rules_of, run_and_judge, shrunk
from tests.cluster.scheduler import Scheduler
from tests.cluster.test_rules import RULES, TURNS, Rule
from tests.scenario.scenario import Scenario, parse

TRACES = {11: "all ended", 12: "not undone"}
"""Rule of the engine → what the checker finds where it is switched off. A hang shows as ranks without an end."""


@pytest.mark.parametrize(
    "text",
    [
        "pp2dp2 steps=4 seed=1 kill:rank=1,step=2,point=after_vote",
        "dp3 steps=4 exact=on mirrors=2 back=never "
        "kill:rank=0,step=2,point=after_vote kill:rank=2,step=3,point=mid_gather",
        "dp2 steps=3 snapshot=state back=never kill:rank=1,step=2,point=mid_update",
        "pp2dp2 steps=4 heavy=on migrate_after=0 kill:rank=3,step=2,point=before_reduce drain:rank=0,step=3",
        "dp4 steps=5 mirrors=2 verify_interval=1 flip:rank=2,step=2,point=before_vote,copy=mirror,tensor=exp_avg",
    ],
)
def test_runs_with_faults_tell_one_history(text: str) -> None:
    run_and_judge(text)


def test_a_record_that_only_a_lost_rank_knew_may_be_replaced(tmp_path: Path) -> None:
    replaced = 0
    for seed in range(12):
        text, folder = f"dp2 steps=3 seed={seed} kill:rank=1,step=2,point=after_vote", tmp_path / str(seed)
        cluster.run(text, Program(events=folder))
        verdict = judged(folder, rules_of(parse(text)))
        assert not verdict.violations
        replaced += verdict.replaced
    assert replaced, "in no order was the record known to the lost rank alone"


def shows(rule: Rule, folder: Path, patch: pytest.MonkeyPatch) -> bool:
    """Return True if the checker finds the trace of ``rule`` in some order of events of its scenario."""
    patch.setattr(cluster, "Scheduler", lambda seed: Scheduler(seed, TURNS))
    for seed in range(rule.seeds):
        here, scenario = folder / str(seed), replace(parse(rule.text), seed=seed)
        with suppress(Exception):  # what it ends with is the claim of test_rules
            cluster.run(scenario, replace(rule.program, events=here))
        if TRACES[rule.number] in {one.rule for one in judged(here, rules_of(scenario)).violations}:
            return True
    return False


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.number in TRACES], ids=str)
def test_with_a_rule_no_history_shows_it(rule: Rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not shows(rule, tmp_path, monkeypatch)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.number in TRACES], ids=str)
def test_without_a_rule_the_history_shows_it(rule: Rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule.off(monkeypatch)
    assert shows(rule, tmp_path, monkeypatch)


def test_a_scenario_that_fails_is_shrunk_to_the_fault_that_it_needs() -> None:
    scenario = parse("dp3 steps=3 kill:rank=1,step=1 kill:rank=2,step=2,point=mid_update kill:rank=0,step=3")

    def fails(one: Scenario) -> str:
        return "fails" if any(fault.points == ("mid_update",) for fault in one.faults) else ""

    least = shrunk(scenario, fails)
    assert least is not None and least.script == ["kill:rank=2,step=2,point=mid_update"]
    assert shrunk(scenario, lambda one: "") is None


def test_scenarios_are_a_function_of_the_seed_and_have_texts() -> None:
    for seed in range(50):
        scenario = drawn(random.Random(seed))
        assert scenario == drawn(random.Random(seed)) == parse(str(scenario))


@pytest.mark.parametrize(
    "script",
    [
        "pp4dp1 seed=502017 back=0.050 kill:rank=0,step=3,point=after_gather",
        "pp4dp1 seed=670363 back=0.010 kill:rank=0,step=1,point=after_update",
        "pp4dp1 seed=904905 back=0.050 exact=on "
        "kill:rank=0,step=1,point=after_step kill:rank=1,step=1,point=in_migration_begin",
    ],
)
def test_the_step_of_a_rank_that_is_back_at_once_is_told(script: str) -> None:
    """The lowest rank dies before it tells of its step, and is lowest again in the generation of its loss.

    The next one that knows the step may be lost as well before it says so.
    """
    run_and_judge(f"steps=4 migrate_after=1 mirrors=3 {script}")


@pytest.mark.parametrize(
    "script",
    [
        "pp4dp1 seed=958731 kill:rank=1,step=3,point=after_update kill:rank=2,step=2,point=in_recovery_promote",
        "tp2dp2 seed=155739 heavy=on kill:rank=0,step=1,point=after_update "
        "kill:rank=3,step=2,point=in_recovery_promote kill:rank=2,step=2,point=mid_update",
    ],
)
def test_a_newcomer_whose_admission_is_cut_short_joins_again(script: str) -> None:
    run_and_judge(f"steps=4 back=0.050 migrate_after=1 mirrors=3 {script}")


@pytest.mark.slow
def test_a_thousand_faults(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["history", "--faults", "1000", "--seed", "3"])
    assert main() == 0, capsys.readouterr().out
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["faults"] >= 1000
