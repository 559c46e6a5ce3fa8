"""The losing interleavings of the rules in docs/design.md §3.6, §4.6, §4.9 and §6.5, as scenarios.

With the rules in force each ends well, in the model, in the cluster and as a job. In the model no rank comes later, so
that there the ranks that return and the spares stay away. A text has no word for a control plane that fails (rules 11,
13, 14 and 17, which ``tests/cluster/test_control_rules.py`` switches off) and for a stray message (rule 15).
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.scenario.scenario import Scenario, parse

__all__ = ["NAMED", "Named"]


@dataclass(frozen=True)
class Named:
    """A scenario with the rule that it needs. ``may_lose``: with more losses than mirrors state may be lost."""

    rule: int
    name: str
    text: str
    may_lose: bool = False

    @property
    def scenario(self) -> Scenario:
        return parse(self.text)

    def __str__(self) -> str:
        return f"rule {self.rule}, {self.name}"


LEFT = "back=never evaluate=0"
NAMED: tuple[Named, ...] = (
    Named(
        1,
        "the survivor knows the vote and has updated nothing",
        f"dp2 steps=3 {LEFT} kill:rank=0,step=1,point=after_vote delay:rank=1,step=1,point=after_vote",
    ),
    Named(
        2,
        "the survivor has updated some copies",
        f"dp2 steps=3 {LEFT} kill:rank=0,step=1,point=after_vote delay:rank=1,step=1,point=mid_update",
    ),
    Named(
        3,
        "an owner is lost with what it ships",
        f"dp2 steps=3 {LEFT} kill:rank=0,step=1,point=after_reduce delay:rank=1,step=1,point=after_reduce",
    ),
    Named(4, "an update takes long", f"dp2 steps=3 {LEFT} delay:rank=1,step=1|2,point=after_vote"),
    Named(
        5,
        "a step is computed again alone",
        f"dp2 steps=3 {LEFT} kill:rank=0,step=2,point=after_reduce delay:rank=1,step=2,point=after_reduce",
    ),
    Named(
        6,
        "a loss while a refused gradient is computed again",
        f"dp3 steps=3 {LEFT} nonfinite:rank=0,step=1 kill:rank=1,step=1,point=after_reduce,nth=2 "
        "delay:rank=0,step=1,point=after_reduce,nth=2",
    ),
    Named(7, "mirrors receive the result", f"dp2 steps=3 {LEFT} snapshot=state kill:rank=1,step=1,point=mid_update"),
    Named(
        8,
        "a vote that no survivor knows",
        f"dp2 steps=3 {LEFT} kill:rank=0,step=1,point=before_vote delay:rank=1,step=1,point=before_vote",
    ),
    Named(
        9,
        "one is lost inside an update, one interrupted",
        f"dp2 steps=3 {LEFT} kill:rank=1,step=2,point=mid_update delay:rank=0,step=2,point=mid_update",
    ),
    Named(
        10,
        "a loss at the vote that agrees on a drain",
        f"dp3 steps=9 {LEFT} kill:rank=0,step=4,point=after_vote drain:step=2",
    ),
    Named(
        12,
        "a second loss in the recovery from the first",
        f"dp3 steps=2 {LEFT} mirrors=2 kill:rank=2,step=1,point=after_ship kill:rank=0,point=in_recovery_promote",
    ),
    Named(
        16,
        "a rank is lost in the step that lets another in",
        "dp3 steps=9 evaluate=0 back=boundary "
        "kill:rank=2,losses=0,point=mid_backward kill:rank=1,rejoin=1,point=before_vote",
        may_lose=True,
    ),
    Named(
        16,
        "a user lets one lost rank in, another is lost",
        f"dp3 steps=9 {LEFT} mirrors=2 kill:rank=2,step=2,point=mid_backward kill:rank=1,step=6,point=after_reduce "
        "delay:missing=1,count=0,point=between_steps,seconds=3.0 admit:rank=2,step=3",
    ),
    Named(
        16,
        "a spare takes a lost rank's place",
        f"dp2 steps=6 {LEFT} spares=1 kill:rank=1,step=3,point=after_reduce",
    ),
    Named(
        18,
        "one is past the evaluation, one in it",
        "dp3 steps=3 evaluate=1 back=never kill:rank=2,step=2,point=before_step delay:rank=1,step=1,point=in_evaluate",
    ),
    Named(
        19,
        "the old owner is lost before copies have come",
        f"dp3 steps=6 {LEFT} kill:rank=0,step=2,point=after_reduce drain:rank=2,step=1",
    ),
    Named(
        20,
        "a loss at the vote that names moved copies",
        f"dp3 steps=6 {LEFT} kill:rank=0,step=2,point=after_vote drain:rank=2,step=1",
    ),
    Named(
        21,
        "a loss while copies are counted",
        f"dp3 steps=6 {LEFT} kill:rank=0,point=in_migration_finish drain:rank=2,step=1",
    ),
    Named(
        22,
        "the ranks that copies go to and come from",
        f"dp3 steps=6 {LEFT} "
        "kill:rank=0,step=2,point=after_ship kill:rank=2,step=2,point=before_vote drain:rank=1,step=1",
        may_lose=True,
    ),
    Named(
        23,
        "a loss after shipping to moved copies",
        f"dp3 steps=6 {LEFT} kill:rank=2,step=2,point=after_ship drain:rank=1,step=1",
    ),
    Named(
        24,
        "a second loss in a vote that is taken again",
        f"dp3 steps=6 {LEFT} "
        "kill:rank=2,step=2,point=before_vote kill:rank=1,step=2,point=before_vote,nth=2 drain:rank=0,step=1",
        may_lose=True,
    ),
    Named(
        25,
        "the only named copy is lost once another has come",
        f"dp2 steps=6 {LEFT} mirrors=0 kill:rank=1,step=5,point=before_vote drain:rank=1,step=1",
        may_lose=True,
    ),
    Named(
        26,
        "a second loss while missing copies are made",
        f"dp3 steps=2 {LEFT} kill:rank=0,step=1,point=before_reduce kill:rank=2,step=1,point=after_ship",
        may_lose=True,
    ),
    Named(
        27,
        "a second loss behind the vote that follows the first",
        f"dp3 steps=2 {LEFT} kill:rank=0,step=1,point=after_reduce kill:rank=1,step=1,point=mid_update",
        may_lose=True,
    ),
    Named(
        28,
        "a second loss once missing copies are named",
        f"dp3 steps=3 {LEFT} kill:rank=0,step=1,point=after_reduce kill:rank=1,step=2,point=before_reduce",
        may_lose=True,
    ),
    Named(
        29,
        "a loss finds one rank between steps, the others in one",
        f"pp2dp2 steps=6 {LEFT} heavy=on migrate_after=0 "
        "kill:rank=2,step=3,point=before_step delay:rank=1,step=2,point=between_steps",
    ),
)
