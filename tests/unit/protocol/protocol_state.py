"""What the bounded model explores: its settings, the rules that can be switched off, and a state of all ranks.

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
    newest_copy_wins: bool = False
    """Rule 8 off: recovery goes to the newest version anybody has, and no vote is taken again."""
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
    """What is explored. Block b is owned by rank b and mirrored by the next ``mirrors`` ranks.

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
    statistics_travel: bool = True
    """Token counts and losses travel with the reduce, so whoever has reduced knows them for all samples."""
    faults: Faults = Faults()

    @property
    def computing(self) -> int:
        """How many ranks compute; as many blocks there are."""
        return self.ranks - self.parked

    def __str__(self) -> str:
        migrate = ("-migrate" if self.migrate else "") + ("-replenish" if self.replenish else "")
        travel = "" if self.statistics_travel else "-local_statistics"
        refuse = ("-refuse" if self.refuse else "") + (f"-parked{self.parked}" if self.parked else "")
        return f"ranks{self.ranks}-mirrors{self.mirrors}-steps{self.steps}-kills{self.kills}{migrate}{refuse}{travel}"


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

    @property
    def voted_for(self) -> Layout:
        """What the record of the vote under way names: one taken again goes on with the copies left of it."""
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
    migrations = int(setting.migrate)
    return State(tuple(ranks), frozenset(), 1, 0, first, 1, setting.kills, (), migrations, (0, 0), setting.mirrors)
