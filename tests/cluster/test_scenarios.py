"""The scenarios that the bounded model explores and that run as jobs, on the engine, in several orders of events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cluster.cluster import named as told
from tests.scenario.__main__ import main
from tests.scenario.in_cluster import play
from tests.scenario.named import NAMED, Named
from tests.scenario.points import scenario_of
from tests.scenario.scenario import parse
from tests.unit.protocol.mutants import MUTANTS, Mutant
from tests.unit.protocol.protocol_explore import explore
from tests.unit.protocol.protocol_state import Violation

SEEDS = range(3)
QUICK = [one for one in MUTANTS if one.setting.mirrors != 1 or not one.setting.migrate]
"""Mutants whose counterexample is found in a second."""


@pytest.mark.parametrize("named", NAMED, ids=str)
def test_named(named: Named) -> None:
    ends = {play(replace(named.scenario, seed=seed)) for seed in SEEDS}
    assert ends <= ({"kept", "lost"} if named.may_lose else {"kept"})


@pytest.mark.parametrize("mutant", QUICK, ids=str)
def test_the_engine_survives_a_counterexample_of_the_model(mutant: Mutant) -> None:
    """The model lost it without one rule, which the engine keeps: nothing is lost but by more losses than mirrors."""
    with pytest.raises(Violation) as found:
        explore(mutant.explored)
    scenario = scenario_of(mutant.setting, found.value.way)
    ends = {play(replace(scenario, seed=seed)) for seed in SEEDS}
    assert ends <= ({"kept"} if mutant.setting.kills <= scenario.mirrors else {"kept", "lost"}), scenario


def test_a_failing_run_tells_the_command_that_repeats_it() -> None:
    scenario = parse("dp2 steps=3 seed=5 heavy=on kill:rank=1,step=2,point=mid_update")
    with pytest.raises(ZeroDivisionError) as error, told(scenario):
        raise ZeroDivisionError
    command, text, way = error.value.__notes__[0].split("'")
    assert parse(text) == scenario and f"{command}TEXT{way}" == "python -m tests.scenario TEXT --as cluster"


@pytest.mark.parametrize("way", ["model", "cluster"])
def test_command_line(way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = "dp2 steps=2 back=never kill:rank=1,step=1,point=after_vote"
    monkeypatch.setattr("sys.argv", ["scenario", text, "--as", way])
    assert main() == 0
    assert f"kept: {text}" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["scenario", "dp2 kill:rank=1,point=nowhere", "--as", way])
    assert main() == 2
    assert "unknown point" in capsys.readouterr().err
