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
UNSEEN = {
    "no_back_pressure": "what fails is the bound of two gradients a block; no rank acts otherwise",
    "generation_ignored": "both gradients are sums over the same samples, in exact mode with the same bits",
    "newest_copy_wins": "only lost ranks knew the record, and its step is computed again from the same samples",
    "only_named_copies": "the job promises nothing for copies before a vote has named them",
    "replenished_after_a_vote": "the same: the promise comes with the vote, here a step late",
}
"""Rules whose absence leaves no trace in a history, and why."""


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
def test_each_mutant_is_caught_unless_it_leaves_no_trace(mutant: Mutant) -> None:
    with pytest.raises(Violation) as error:
        explore(mutant.explored)
    found = findings(mutant.explored, error.value.way, SEEDS)
    assert bool(found) != (mutant.fault in UNSEEN), found
    assert not findings(mutant.setting, (), range(20)), "with the rule"


def test_every_reason_is_that_of_a_mutant() -> None:
    assert set(UNSEEN) <= {mutant.fault for mutant in MUTANTS}
