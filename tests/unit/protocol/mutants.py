"""Each rule of the bounded model, left out: where that is explored, and the finding that it leads to."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.unit.protocol.protocol_state import Faults, Setting

__all__ = [
    "DRAIN",
    "MUTANTS",
    "NO_MIRROR",
    "ONE_MIRROR",
    "REFUSED",
    "REPLENISH",
    "STATE_MODE",
    "TORN",
    "TWO_KILLS",
    "Mutant",
]

TWO_RANKS = Setting(ranks=2, mirrors=1, steps=3, kills=1)
REFUSED = Setting(ranks=3, mirrors=1, steps=1, kills=1, refuse=True, parked=1)
ONE_MIRROR = Setting(ranks=3, mirrors=1, steps=2, kills=1, migrate=True)
TWO_KILLS = replace(ONE_MIRROR, kills=2)
NO_MIRROR = Setting(ranks=2, mirrors=0, steps=2, kills=1, migrate=True)
STATE_MODE = Setting(ranks=2, mirrors=1, steps=2, kills=1, state_mode=True)
TORN = Setting(ranks=2, mirrors=1, steps=2, kills=0, tears=1)
DRAIN = Setting(ranks=3, mirrors=1, steps=2, kills=1, drain=True)
REPLENISH = Setting(ranks=3, mirrors=1, steps=1, kills=2, replenish=True)


@dataclass(frozen=True)
class Mutant:
    """``fault``: field of :class:`Faults`. ``slow``: its exploration takes more than ten seconds."""

    fault: str
    setting: Setting
    finding: str
    slow: bool = False

    @property
    def rules_off(self) -> Faults:
        return Faults(**{self.fault: True})

    @property
    def explored(self) -> Setting:
        """The setting without the rule."""
        return replace(self.setting, faults=self.rules_off)

    def __str__(self) -> str:
        return f"{self.fault}-{self.setting}"


MUTANTS = (
    Mutant("gradient_does_not_count", TWO_RANKS, "lost though every block has a copy"),
    Mutant("dropped_before_update", TWO_RANKS, "lost though every block has a copy"),
    Mutant("vote_before_mirrors", TWO_RANKS, "lost though every block has a copy"),
    Mutant("no_back_pressure", TWO_RANKS, "third gradient slot"),
    Mutant("generation_ignored", TWO_RANKS, "becomes"),
    Mutant("versions_mixed", STATE_MODE, "goes on with block"),
    Mutant("torn_counts", TORN, "for the second time"),
    Mutant("drain_not_recorded", DRAIN, "stuck"),
    Mutant("newest_copy_wins", TWO_RANKS, "committed version 1 is lost"),
    Mutant("attempt_ignored", REFUSED, "becomes"),
    Mutant("retired_before_vote", ONE_MIRROR, "lost with no more losses than mirrors"),
    Mutant("leaving_must_vote", ONE_MIRROR, "lost though every block has a copy"),
    Mutant("joining_need_not_vote", ONE_MIRROR, "taken again without any gradient"),
    Mutant("revote_under_the_record", ONE_MIRROR, "stuck"),
    Mutant("leaving_carry_a_vote", TWO_KILLS, "taken again without any gradient", slow=True),
    Mutant("only_named_copies", NO_MIRROR, "lost though every block has a copy"),
    Mutant("retired_before_revote", replace(NO_MIRROR, ranks=3, kills=2), "going on without any copy"),
    Mutant("replenished_after_a_vote", REPLENISH, "committed without the copies that are missing"),
    Mutant("only_named_copies", REPLENISH, "lost though every block has a copy"),
    Mutant("offered_without_gradient", REPLENISH, "taken again without any gradient"),
    Mutant("kept_at_any_version", REPLENISH, "lost though every block has a copy"),
)
