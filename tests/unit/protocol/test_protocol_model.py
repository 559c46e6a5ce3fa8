"""Every interleaving of a few ranks, every kill: no committed step is lost, no versions are mixed, nobody is stuck."""

from __future__ import annotations

import pytest

from tests.unit.protocol.protocol_model import Faults, Setting, Violation, explore

KINDS = ("rerun", "revote", "roll_forward")


@pytest.mark.parametrize(
    "setting",
    [
        Setting(ranks=2, mirrors=1, steps=3, kills=1),
        Setting(ranks=2, mirrors=1, steps=2, kills=2),
        Setting(ranks=3, mirrors=1, steps=1, kills=1),
        Setting(ranks=3, mirrors=1, steps=1, kills=1, statistics_travel=False),
    ],
    ids=str,
)
def test_every_kill_at_every_point_is_survived(setting):
    counts = explore(setting)
    kinds = {name.split()[1] for name in counts if name.startswith("decide")}
    assert kinds >= set(KINDS) if setting.statistics_travel else kinds >= {"rerun", "roll_forward"}, counts


def test_copies_change_place_at_any_time():
    """Two replicas' worth of blocks on three ranks: every block's owner moves between two steps."""
    counts = explore(Setting(ranks=3, mirrors=1, steps=2, kills=0, migrate=True))
    assert {name for name in counts if name.endswith("switches")} == {f"{rank} switches" for rank in range(3)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
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


def test_nobody_is_killed_nothing_is_decided():
    assert not any(name.startswith("decide") for name in explore(Setting(ranks=3, mirrors=1, steps=2, kills=0)))


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        ("gradient_does_not_count", "lost though every block has a copy"),
        ("dropped_before_update", "lost though every block has a copy"),
        ("vote_before_mirrors", "lost though every block has a copy"),
        ("no_back_pressure", "third gradient slot"),
        ("generation_ignored", "becomes"),
        ("newest_copy_wins", "committed version 1 is lost"),
    ],
)
def test_each_rule_is_needed_the_exploration_finds_the_interleaving_without_it(fault, finding):
    with pytest.raises(Violation, match=finding) as found:
        explore(Setting(ranks=2, mirrors=1, steps=3, kills=1, faults=Faults(**{fault: True})))
    assert "after: " in str(found.value), "the finding comes with the way there"


def test_old_copies_must_stay_until_the_first_vote_under_the_new_placement():
    faults = Faults(retired_before_vote=True)
    with pytest.raises(Violation, match="kill"):
        explore(Setting(ranks=3, mirrors=1, steps=2, kills=1, migrate=True, faults=faults))


def test_a_copy_that_no_vote_has_named_yet_counts():
    """One copy a block, which moves to the other rank: whoever is lost once it is there, nothing is."""
    for setting in (
        Setting(ranks=2, mirrors=0, steps=3, kills=1, migrate=True),
        Setting(ranks=3, mirrors=0, steps=2, kills=2, migrate=True),
    ):
        assert {"decide rerun 1", "decide roll_forward 1", "decide revote 2"} <= explore(setting).keys(), setting
    faults = Faults(only_named_copies=True)
    with pytest.raises(Violation, match="lost though every block has a copy"):
        explore(Setting(ranks=2, mirrors=0, steps=2, kills=1, migrate=True, faults=faults))


def test_without_rule_one_the_losing_interleaving_is_the_expected_one():
    """Vote done, one rank has stepped its own block and its peer dies: the peer's block is a version behind."""
    with pytest.raises(Violation) as found:
        explore(Setting(faults=Faults(gradient_does_not_count=True)))
    way = str(found.value).split("after: ")[1].split(" | ")
    kill = next(i for i, action in enumerate(way) if action.startswith("kill"))
    learned = next(i for i, action in enumerate(way) if action.endswith("learns the vote"))
    assert {way[i].split()[-1] for i in range(kill)} >= {"joins"} and learned < len(way) - 1
    assert any("updates" in action for action in way)
