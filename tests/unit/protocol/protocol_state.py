"""Values of the bounded model: its settings, the rules that can be switched off, and a state of all ranks.

Every value is immutable and hashable, so that a state is visited once. What happens from a
state is :mod:`protocol_model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "ATTEMPTS",
    "Chain",
    "Decision",
    "Faults",
    "Gradient",
    "Layout",
    "Rank",
    "Setting",
    "State",
    "Violation",
    "initial_state",
]

Chain = tuple[int, ...]
Gradient = tuple[int, int, int]  # block, step, computation
ATTEMPTS = 2
"""A computation is ``ATTEMPTS * generation + attempt``."""
Layout = tuple[tuple[int, ...], ...]  # per block its ranks, the owner first


class Violation(AssertionError):
    """A reachable state breaks a claim; the text carries the interleaving that leads to it.

    ``way``: the same as (state, action) after (state, action), once it is known.
    """

    def __init__(self, text: str, way: tuple[tuple[State, str], ...] = ()) -> None:
        super().__init__(text)
        self.way = way


@dataclass(frozen=True)
class Faults:
    """Rules that can be switched off one by one."""

    gradient_does_not_count: bool = False
    """Rule 1 of docs/design.md §3.6 off: a copy at t with the gradient of t is not reported as able to reach t+1."""
    dropped_before_update: bool = False
    """Rule 2 off: mirrors drop the gradient when the vote is done, before replaying."""
    vote_before_mirrors: bool = False
    """A rank joins the vote without waiting for the gradients it mirrors."""
    no_back_pressure: bool = False
    """A rank joins the next vote before its replay of the last step is done."""
    generation_ignored: bool = False
    """Rule 5 off: gradients are taken and applied whatever generation they come from."""
    attempt_ignored: bool = False
    """Rule 6 off: a step computed again there gives its gradients the name of those refused."""
    versions_mixed: bool = False
    """Rule 7 off: recovery goes to the newest version that a record names, whatever versions the copies are at."""
    newest_copy_wins: bool = False
    """Rule 8 off: recovery goes to the newest version anybody has, and no vote is taken again."""
    torn_counts: bool = False
    """Rule 9 off: a copy whose update was interrupted inside the block is reported as not updated."""
    drain_not_recorded: bool = False
    """Rule 10 off: the end of the job, which a vote agreed on, is known to the ranks that saw the sum alone."""
    retired_before_vote: bool = False
    """Copies that leave are dropped when the step begins whose vote lets them go."""
    only_named_copies: bool = False
    """A copy that was taken counts for nothing until a vote has named it."""
    leaving_must_vote: bool = False
    """A rank reports gradients as complete only with those of copies that leave, which get none."""
    joining_need_not_vote: bool = False
    """A rank reports gradients as complete without those of copies it has yet to take."""
    leaving_carry_a_vote: bool = False
    """A vote is taken again where a block has only a copy that leaves."""
    retired_before_revote: bool = False
    """Copies that leave are dropped with the decision to take the vote again."""
    revote_under_the_record: bool = False
    """A vote is taken again under the placement of the newest record, not the one it was to name."""
    replenished_after_a_vote: bool = False
    """Missing copies are named by the second vote after a loss, however soon they could be there."""
    offered_without_gradient: bool = False
    """A copy that was taken counts like its rank's others, though it lacks a gradient that those have."""
    kept_at_any_version: bool = False
    """A copy that was taken counts whatever version it is at."""


@dataclass(frozen=True)
class Setting:
    """The bounds of an exploration. Block b is owned by rank b and mirrored by the next ``mirrors`` ranks.

    The last ``parked`` ranks compute nothing, and own nothing before a loss; they may mirror.
    """

    ranks: int = 2
    mirrors: int = 1
    steps: int = 2
    kills: int = 1
    migrate: bool = False
    refuse: bool = False
    """The first vote on step 0 is refused by all who learn it."""
    parked: int = 0
    replenish: bool = False
    state_mode: bool = False
    """Owners ship stepped blocks after the vote, not gradients before it; a copy can go back by one version."""
    tears: int = 0
    """Number of updates that are interrupted inside a block."""
    early: bool = False
    """Blocks are reduced and shipped one by one behind the backward."""
    drain: bool = False
    """Some vote agrees that the job ends with its step."""
    statistics_travel: bool = True
    """Token counts and losses travel with the reduce, so whoever has reduced knows them for all samples."""
    faults: Faults = Faults()

    @property
    def computing(self) -> int:
        """Number of ranks that compute, and of blocks."""
        return self.ranks - self.parked

    def __str__(self) -> str:
        words = {
            "migrate": self.migrate,
            "replenish": self.replenish,
            "refuse": self.refuse,
            f"parked{self.parked}": self.parked,
            "state": self.state_mode,
            f"tears{self.tears}": self.tears,
            "drain": self.drain,
            "early": self.early,
            "local_statistics": not self.statistics_travel,
        }
        bounds = f"ranks{self.ranks}-mirrors{self.mirrors}-steps{self.steps}-kills{self.kills}"
        return "-".join([bounds, *(word for word, holds in words.items() if holds)])


class Rank(NamedTuple):
    alive: bool
    generation: int
    frozen: int
    phase: str  # R computed, S reduced and shipped, V voting, U update and gather, E ended
    step: int
    key: int  # computation whose gradients this step uses
    chain: Chain  # records known: the newest has version len(chain)
    copies: tuple[tuple[int, Chain], ...]
    gradients: frozenset[Gradient]
    layout: Layout  # of its newest record
    stands: Layout  # what it works under
    names: Layout  # what the vote is to name for which this step's gradients are shipped
    moving: bool  # the newest vote said that the next one may name another placement
    ends: int = 0  # version with which the job ends, as far as this rank knows; 0: not agreed
    torn: frozenset[int] = frozenset()  # blocks whose update was interrupted inside
    given: frozenset[int] = frozenset()  # in phase R with ``early``: blocks that it has contributed to

    @property
    def voted_for(self) -> Layout:
        """The layout that the record of the vote under way names. One taken again goes on with the copies left."""
        return self.names if self.key // ATTEMPTS == self.generation else self.stands


class Decision(NamedTuple):
    kind: str
    chain: Chain
    key: int
    members: frozenset[int]
    named: Layout  # by the newest record
    base: Layout  # surviving copies to go on with
    refused: bool  # the gradients of the vote that is taken again are not finite
    wanted: Layout  # with the copies that are missing
    fits: bool  # they can be there before the next vote
    first: int  # the first step of its own: version it starts from
    ends: int = 0  # version with which the job ends, by the records in the reports; 0: not agreed
    torn: frozenset[tuple[int, int]] = frozenset()  # (block, rank) of copies that no vote names any more
    missing: tuple[int, ...] = ()  # blocks that are lost


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    network: frozenset[tuple[int, int, int, int]]  # destination, block, step, computation
    freeze: int  # newest generation frozen
    seen_dead: int  # losses that the newest FREEZE covers
    decision: Decision  # newest decided
    decided: int  # its generation
    kills: int
    committed: Chain  # the newest vote result anybody ever had
    migrations: int  # how often another placement may still be agreed on
    ready: tuple[int, int]  # (generation, step) of the vote in which all are ready to switch
    owed: int  # further losses that may not cost a block; negative: one may be lost
    tears: int = 0  # how often an update may still be interrupted
    drains: int = 0  # how often the end of the job may still be agreed on
    drained: tuple[int, int] = (0, 0)  # (generation, step) of the vote that agrees on it


def initial_state(setting: Setting) -> State:
    """Everybody at version 0 in generation 1."""
    n = setting.ranks
    layout = tuple(tuple((b + d) % n for d in range(setting.mirrors + 1)) for b in range(setting.computing))
    ranks = []
    for r in range(n):
        copies = tuple((b, ()) for b, ranks_of in enumerate(layout) if r in ranks_of)
        phase = "R" if r < setting.computing else "S"
        ranks.append(Rank(True, 1, 1, phase, 0, ATTEMPTS, (), copies, frozenset(), layout, layout, layout, False))
    first = Decision("start", (), ATTEMPTS, frozenset(range(n)), layout, layout, False, layout, True, 0)
    return State(
        tuple(ranks),
        frozenset(),
        freeze=1,
        seen_dead=0,
        decision=first,
        decided=1,
        kills=setting.kills,
        committed=(),
        migrations=int(setting.migrate),
        ready=(0, 0),
        owed=setting.mirrors,
        tears=setting.tears,
        drains=int(setting.drain),
    )
