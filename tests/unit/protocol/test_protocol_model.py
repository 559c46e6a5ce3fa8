"""Every interleaving of a few ranks, every kill: no committed step is lost, no versions are mixed, nobody is stuck."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.unit.protocol.mutants import DRAIN, MUTANTS, NO_MIRROR, REFUSED, REPLENISH, STATE_MODE, TORN, Mutant
from tests.unit.protocol.protocol_explore import explore
from tests.unit.protocol.protocol_state import Faults, Setting, Violation

KINDS = ("rerun", "revote", "roll_forward")


@pytest.mark.parametrize(
    "setting",
    [
        Setting(ranks=2, mirrors=1, steps=3, kills=1),
        Setting(ranks=2, mirrors=1, steps=2, kills=2),
        Setting(ranks=3, mirrors=1, steps=1, kills=1),
        Setting(ranks=3, mirrors=1, steps=1, kills=1, statistics_travel=False),
        Setting(ranks=2, mirrors=1, steps=2, kills=1, refuse=True),
        Setting(ranks=3, mirrors=1, steps=1, kills=1, refuse=True, parked=1),
    ],
    ids=str,
)
def test_every_kill_at_every_point_is_survived(setting):
    counts = explore(setting)
    kinds = {name.split()[1] for name in counts if name.startswith("decide")}
    assert kinds >= set(KINDS) if setting.statistics_travel else kinds >= {"rerun", "roll_forward"}, counts


@pytest.mark.parametrize(
    "setting",
    [
        Setting(ranks=2, mirrors=1, steps=3, kills=1, early=True),
        Setting(ranks=2, mirrors=1, steps=2, kills=2, early=True),
        Setting(ranks=3, mirrors=1, steps=1, kills=1, early=True),
        Setting(ranks=2, mirrors=1, steps=2, kills=1, refuse=True, early=True),
        Setting(ranks=3, mirrors=1, steps=1, kills=1, refuse=True, parked=1, early=True),
        replace(TORN, early=True),
        pytest.param(Setting(ranks=3, mirrors=1, steps=2, kills=1, early=True), marks=pytest.mark.slow),
        pytest.param(Setting(ranks=3, mirrors=2, steps=1, kills=2, early=True), marks=pytest.mark.slow),
        pytest.param(replace(REPLENISH, early=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_blocks_that_are_shipped_while_others_are_computed_lose_nothing(setting: Setting) -> None:
    assert any(name.startswith("decide") for name in explore(setting))


EARLY = ("gradient_does_not_count", "vote_before_mirrors", "no_back_pressure", "generation_ignored", "newest_copy_wins")


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(one, id=str(one), marks=() if one.fault in EARLY else pytest.mark.slow)
        for one in MUTANTS
        if not one.slow
    ],
)
def test_each_rule_is_needed_there_too(mutant: Mutant) -> None:
    with pytest.raises(Violation, match=mutant.finding):
        explore(replace(mutant.explored, early=True))


def test_copies_change_place_at_any_time():
    """Two replicas' worth of blocks on three ranks: every block's owner moves between two steps."""
    counts = explore(Setting(ranks=3, mirrors=1, steps=2, kills=0, migrate=True))
    assert {name for name in counts if name.endswith("switches")} == {
        f"{rank} learns the vote and switches" for rank in range(3)
    }


def test_missing_copies_are_named_by_the_next_vote_and_count_as_soon_as_they_are_there():
    """Three ranks, two of them lost at any two instants, the copies that the first loss left missing made meanwhile."""
    counts = explore(REPLENISH)
    assert {"decide lost 0", "decide rerun 1", "decide revote 1", "decide roll_forward 1"} <= counts.keys()


@pytest.mark.parametrize("setting", [STATE_MODE, replace(STATE_MODE, ranks=3, steps=1), TORN, DRAIN], ids=str)
def test_state_mode_torn_blocks_and_the_end_of_a_job_lose_nothing(setting: Setting) -> None:
    assert any(name.startswith("decide") for name in explore(setting))


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        Setting(ranks=3, mirrors=1, steps=2, kills=2, replenish=True),
        Setting(ranks=3, mirrors=1, steps=2, kills=1),
        Setting(ranks=3, mirrors=2, steps=1, kills=2),
        Setting(ranks=3, mirrors=1, steps=2, kills=2),
        Setting(ranks=3, mirrors=2, steps=2, kills=1),
        Setting(ranks=3, mirrors=1, steps=2, kills=1, migrate=True),
        Setting(ranks=3, mirrors=1, steps=2, kills=2, migrate=True),
    ],
    ids=str,
)
def test_two_kills_two_mirrors_and_losses_while_copies_change_place(setting):
    assert explore(setting)["states"] > 10_000


def test_without_a_kill_nothing_is_decided():
    assert not any(name.startswith("decide") for name in explore(Setting(ranks=3, mirrors=1, steps=2, kills=0)))


@pytest.mark.parametrize(
    "mutant", [pytest.param(one, id=str(one), marks=pytest.mark.slow if one.slow else ()) for one in MUTANTS]
)
def test_each_rule_is_needed_the_exploration_finds_the_interleaving_without_it(mutant):
    with pytest.raises(Violation, match=mutant.finding) as found:
        explore(mutant.explored)
    assert "after: " in str(found.value) and "scenario: dp" in str(found.value), "the finding comes with the way there"


def test_every_rule_that_can_be_switched_off_is_a_mutant():
    assert {mutant.fault for mutant in MUTANTS} == {field.name for field in fields(Faults)}


def test_a_copy_that_no_vote_has_named_yet_counts():
    """One copy a block, which moves to another rank: whoever is lost once it is there, nothing is."""
    assert "decide rerun 1" in explore(replace(NO_MIRROR, steps=3))
    expected = {"decide rerun 1", "decide revote 2", "decide roll_forward 2"}
    assert expected <= explore(replace(NO_MIRROR, ranks=3, kills=2)).keys()


def test_a_step_computed_again_in_one_generation_gives_its_gradients_a_name_of_their_own():
    """The vote is refused; who knows it computes again, while a parked mirror still holds the refused gradients."""
    with pytest.raises(Violation, match="becomes") as found:
        explore(replace(REFUSED, faults=Faults(attempt_ignored=True)))
    way = str(found.value)
    assert way.index("learns the refusal") < way.index("decide revote")


def test_without_rule_one_the_losing_interleaving_is_the_expected_one():
    """Vote done, one rank has stepped its own block and its peer dies: the peer's block is a version behind."""
    with pytest.raises(Violation) as found:
        explore(Setting(faults=Faults(gradient_does_not_count=True)))
    way = str(found.value).split("after: ")[1].split(" | ")
    kill = next(i for i, action in enumerate(way) if action.startswith("kill"))
    learned = next(i for i, action in enumerate(way) if action.endswith("learns the vote"))
    assert {way[i].split()[-1] for i in range(kill)} >= {"joins"} and learned < len(way) - 1
    assert any("updates" in action for action in way)
