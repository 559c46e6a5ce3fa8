"""The scenarios of the cluster and of real jobs in the bounded model, and its counterexamples as scenarios."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron.elastic.engine.inject import KILL_POINTS
from tests.scenario.in_model import NotInModel, play
from tests.scenario.named import NAMED, Named
from tests.scenario.points import STATES, at, scenario_of
from tests.scenario.scenario import parse
from tests.unit.protocol.mutants import MUTANTS, Mutant
from tests.unit.protocol.protocol_explore import explore
from tests.unit.protocol.protocol_state import Violation

TOLD = [one for one in MUTANTS if one.fault not in ("attempt_ignored", "torn_counts")]
"""Those whose counterexample is a scenario: a member that computes nothing has no word, nor an error inside a block."""
MINUTES = ("leaving_must_vote", "joining_need_not_vote", "revote_under_the_record", "leaving_carry_a_vote")


def test_each_kill_point_belongs_to_one_state() -> None:
    assert Counter(point for state in STATES for point in state.points) == Counter(list(KILL_POINTS))


def test_a_state_is_written_as_a_point_of_its_own() -> None:
    """But where no point lies between a summand and the sum."""
    written = {state.name: at(state.written).name for state in STATES}
    assert {name for name, other in written.items() if name != other} == {"has joined the vote"}


@pytest.mark.parametrize("named", NAMED, ids=str)
def test_named(named: Named) -> None:
    assert play(named.scenario) in (("kept", "lost") if named.may_lose else ("kept",))


@pytest.mark.parametrize(
    "mutant", [pytest.param(m, id=str(m), marks=pytest.mark.slow if m.fault in MINUTES else ()) for m in TOLD]
)
def test_a_counterexample_is_a_scenario_that_finds_the_same(mutant: Mutant) -> None:
    """From its text alone: without the rule it is found again, with the rule it ends well."""
    with pytest.raises(Violation) as found:
        explore(mutant.explored)
    scenario = scenario_of(mutant.setting, found.value.way)
    assert f"scenario: {scenario};" in str(found.value)
    with pytest.raises(Violation):
        play(parse(str(scenario)), mutant.rules_off)
    play(scenario)


@pytest.mark.parametrize(
    "text", ["tp2dp2 kill:rank=1,step=1", "dp2 raise:rank=1,step=1", "dp2 kill:rank=1,incarnation=1", "dp2 kill:step=1"]
)
def test_what_the_model_does_not_know_is_refused(text: str) -> None:
    with pytest.raises(NotInModel):
        play(parse(text))


def test_a_kill_that_never_strikes_is_no_success() -> None:
    with pytest.raises(NotInModel, match=r"no kill of .* strikes"):
        play(parse("dp2 steps=2 kill:rank=1,step=9"))
