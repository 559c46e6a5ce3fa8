"""Every interleaving of a few ranks, every kill: no committed step is lost, no versions are mixed, nobody is stuck."""

from __future__ import annotations

from dataclasses import replace

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
        Setting(ranks=2, mirrors=1, steps=2, kills=1, refuse=True),
        Setting(ranks=3, mirrors=1, steps=1, kills=1, refuse=True, parked=1),
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
    assert {name for name in counts if name.endswith("switches")} == {
        f"{rank} learns the vote and switches" for rank in range(3)
    }


def test_missing_copies_are_named_by_the_next_vote_and_count_as_soon_as_they_are_there():
    """Three ranks, two of them lost at any two instants, the copies that the first loss left missing made meanwhile."""
    counts = explore(REPLENISH)
    assert {"decide lost 0", "decide rerun 1", "decide revote 1", "decide roll_forward 1"} <= counts.keys()


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


REPLENISH = Setting(ranks=3, mirrors=1, steps=1, kills=2, replenish=True)
ONE_MIRROR = Setting(ranks=3, mirrors=1, steps=2, kills=1, migrate=True)
TWO_KILLS = replace(ONE_MIRROR, kills=2)
NO_MIRROR = Setting(ranks=2, mirrors=0, steps=2, kills=1, migrate=True)


@pytest.mark.parametrize(
    ("fault", "setting", "finding"),
    [
        ("retired_before_vote", ONE_MIRROR, "lost with no more losses than mirrors"),
        ("leaving_must_vote", ONE_MIRROR, "lost though every block has a copy"),
        ("joining_need_not_vote", ONE_MIRROR, "taken again without any gradient"),
        ("revote_under_the_record", ONE_MIRROR, "stuck"),
        pytest.param("leaving_carry_a_vote", TWO_KILLS, "taken again without any gradient", marks=pytest.mark.slow),
        ("only_named_copies", NO_MIRROR, "lost though every block has a copy"),
        ("retired_before_revote", replace(NO_MIRROR, ranks=3, kills=2), "going on without any copy"),
    ],
)
def test_one_vote_lets_copies_come_and_go_and_each_rule_of_it_is_needed(fault, setting, finding):
    with pytest.raises(Violation, match=finding):
        explore(replace(setting, faults=Faults(**{fault: True})))


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        ("replenished_after_a_vote", "committed without the copies that are missing"),
        ("only_named_copies", "lost though every block has a copy"),
        ("offered_without_gradient", "taken again without any gradient"),
        ("kept_at_any_version", "lost though every block has a copy"),
    ],
)
def test_each_rule_of_making_missing_copies_at_once_is_needed(fault, finding):
    with pytest.raises(Violation, match=finding):
        explore(replace(REPLENISH, faults=Faults(**{fault: True})))


def test_a_copy_that_no_vote_has_named_yet_counts():
    """One copy a block, which moves to another rank: whoever is lost once it is there, nothing is."""
    assert "decide rerun 1" in explore(replace(NO_MIRROR, steps=3))
    expected = {"decide rerun 1", "decide revote 2", "decide roll_forward 2"}
    assert expected <= explore(replace(NO_MIRROR, ranks=3, kills=2)).keys()


def test_a_step_computed_again_in_one_generation_gives_its_gradients_a_name_of_their_own():
    """The vote is refused; who knows it computes again, while a parked mirror still holds the refused gradients."""
    setting = Setting(ranks=3, mirrors=1, steps=1, kills=1, refuse=True, parked=1)
    with pytest.raises(Violation, match="becomes") as found:
        explore(replace(setting, faults=Faults(attempt_ignored=True)))
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
