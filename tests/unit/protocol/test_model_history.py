"""The history checker on walks through the bounded model: with all rules nothing is found, without one it is caught."""

from __future__ import annotations

import random

import pytest

from tests.unit.protocol.model_history import findings, judged, walk
from tests.unit.protocol.mutants import (
    DRAIN,
    MUTANTS,
    NO_MIRROR,
    ONE_MIRROR,
    REFUSED,
    REPLENISH,
    STATE_MODE,
    TORN,
    TWO_KILLS,
    Mutant,
)
from tests.unit.protocol.protocol_explore import explore
from tests.unit.protocol.protocol_state import Setting, Violation

SEEDS = range(600)
SETTINGS = (
    Setting(ranks=2, mirrors=1, steps=3, kills=1),
    Setting(ranks=3, mirrors=1, steps=2, kills=1),
    *(DRAIN, NO_MIRROR, ONE_MIRROR, REFUSED, REPLENISH, STATE_MODE, TORN, TWO_KILLS),
)
BY_COPIES = {
    "no_back_pressure": "updated in time",
    "generation_ignored": "one gradient",
    "newest_copy_wins": "vote taken again",
    "only_named_copies": "every copy counts",
    "replenished_after_a_vote": "copies named in time",
}
"""Rule of the model whose absence leaves the records as they are → what the checker finds in the facts of copies."""


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_nothing_is_found_where_all_rules_hold(setting: Setting) -> None:
    for seed in range(40):
        found = judged(setting, walk(setting, random.Random(seed)))
        assert not found, (seed, found)


MINUTES = ("drain_not_recorded", "leaving_must_vote", "joining_need_not_vote", "revote_under_the_record")
"""Mutants whose exploration takes seconds of processor time."""


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(one, id=str(one), marks=pytest.mark.slow if one.slow or one.fault in MINUTES else ())
        for one in MUTANTS
    ],
)
def test_each_mutant_is_caught(mutant: Mutant) -> None:
    with pytest.raises(Violation) as error:
        explore(mutant.explored)
    found = findings(mutant.explored, error.value.way, SEEDS)
    assert found
    assert any(text.startswith(BY_COPIES.get(mutant.fault, "")) for text in found), found
    assert not findings(mutant.setting, (), range(20)), "with the rule"


def test_the_rules_named_are_those_of_mutants() -> None:
    assert set(BY_COPIES) <= {mutant.fault for mutant in MUTANTS}
