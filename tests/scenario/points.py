"""The state of the bounded model at each kill point, and the scenario that an interleaving of the model shows.

The model has fewer states than the engine has points: a point belongs to the nearest state, which every other rank
would take it for. :data:`STATES` is that mapping, both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.elastic.engine.inject import Fault, default
from tests.scenario.scenario import NEVER, Layout, Scenario, Wish
from tests.unit.protocol.protocol_state import ATTEMPTS, Rank, Setting, State

__all__ = ["STATES", "Stand", "at", "finds", "scenario_of", "stand_of"]

HELD_SECONDS = 1.0
"""Seconds for which a rank waits at the point where a loss is to find it: dozens of steps of a cluster."""

MANIFOLD = frozenset(
    {
        "in_setup",
        "mid_forward",
        "mid_backward",
        "mid_reduce",
        "mid_gather",
        "mid_overlap_reduce",
        "mid_overlap_gather",
        "in_evaluate",
    }
)
"""Points that one computation of a step may pass several times."""


def _under_way(rank: Rank) -> int:
    """The step that is computed; step n leads to version n."""
    return rank.step + 1


def _newest(rank: Rank) -> int:
    """The newest step that this rank knows to be committed."""
    return len(rank.chain)


@dataclass(frozen=True)
class Stand:
    """A state of a rank in the model. ``step`` is the engine's number of a step at these points.

    ``written``: the point that stands for the state in a scenario's text.
    """

    name: str
    holds: Callable[[State, int], bool]
    points: tuple[str, ...]
    written: str
    step: Callable[[Rank], int] = _newest


def _in_step(phases: str, also: Callable[[Rank, int], bool] = lambda rank, r: True) -> Callable[[State, int], bool]:
    def holds(state: State, r: int) -> bool:
        rank = state.ranks[r]
        return rank.frozen == rank.generation and rank.phase in phases and also(rank, r)

    return holds


def _has_stopped(state: State, r: int) -> bool:
    return state.ranks[r].frozen > state.ranks[r].generation


def _may_vote(rank: Rank, r: int) -> bool:
    """Every copy that the vote is to name here has come, and its gradient."""
    held = {b for b, step, key in rank.gradients if (step, key) == (rank.step, rank.key)} & {b for b, _ in rank.copies}
    return all(block in held for block, ranks in enumerate(rank.names) if r in ranks)


def _updated(rank: Rank) -> int:
    return sum(len(chain) == len(rank.chain) for _, chain in rank.copies)


STATES: tuple[Stand, ...] = (
    Stand(
        "has stopped, nothing is decided",
        lambda state, r: _has_stopped(state, r) and state.decided < state.ranks[r].frozen,
        ("in_recovery_freeze",),
        "in_recovery_freeze",
    ),
    Stand(
        "the decision is made, this rank has not acted on it",
        lambda state, r: _has_stopped(state, r) and state.decided == state.ranks[r].frozen,
        ("in_recovery_decide", "in_recovery_edit", "in_recovery_promote"),
        "in_recovery_decide",
    ),
    Stand(
        "computes",
        _in_step("R"),
        # A rank that has settled after a loss, or was let in, is next seen at its reduce.
        (
            "in_setup",
            "before_step",
            "after_prepare",
            "mid_forward",
            "mid_backward",
            "mid_overlap_reduce",
            "mid_overlap_gather",
            "before_reduce",
            "mid_reduce",
            "in_relay_to_owner",
            "in_recovery_resume",
            "in_migration_begin",
            "in_join",
        ),
        "before_reduce",
        _under_way,
    ),
    Stand(
        "has reduced and shipped, waits for copies or gradients of others",
        _in_step("S", lambda rank, r: not _may_vote(rank, r)),
        ("after_reduce", "in_migration_finish"),
        "after_reduce",
        _under_way,
    ),
    Stand(
        "has all that it votes with", _in_step("S", _may_vote), ("after_ship", "before_vote"), "after_ship", _under_way
    ),
    # No point lies between a rank's summand and the sum (see _fault).
    Stand("has joined the vote", _in_step("V"), (), "after_vote", _under_way),
    Stand(
        "knows the vote, has updated nothing",
        _in_step("U", lambda rank, r: not _updated(rank) and bool(rank.copies)),
        ("after_vote", "in_migration_switch"),
        "after_vote",
    ),
    Stand(
        "has updated some copies",
        _in_step("U", lambda rank, r: 0 < _updated(rank) < len(rank.copies)),
        ("mid_update",),
        "mid_update",
    ),
    Stand(
        "has updated all copies",
        _in_step("U", lambda rank, r: _updated(rank) == len(rank.copies)),
        ("after_update", "in_relay_to_delegate", "mid_gather"),
        "after_update",
    ),
    Stand(
        "has gathered",
        _in_step("RE"),
        # The model gathers and computes in one action: whatever lies between looks to the others as what follows it.
        (
            "after_gather",
            "after_step",
            "between_steps",
            "in_evaluate",
            "in_save",
            "save_writing",
            "save_finish",
            "save_whole",
            "save_named",
            "save_tracked",
        ),
        "after_step",
    ),
)
"""In the order in which they are asked: the first that holds."""


def at(point: str) -> Stand:
    """The state nearest to ``point``."""
    return next(stand for stand in STATES if point in stand.points)


def stand_of(state: State, r: int) -> Stand:
    """The entry of the table that holds for rank ``r``."""
    return next(stand for stand in STATES if stand.holds(state, r))


def finds(fault: Fault, state: State, r: int) -> bool:
    """Return whether rank ``r`` is at a point of ``fault``. ``nth``: in that computation of a step at the earliest."""
    rank = state.ranks[r]
    if fault.nth > rank.generation + rank.key % ATTEMPTS and not MANIFOLD.issuperset(fault.points):
        return False
    return any(at(p).holds(state, r) and (not fault.steps or at(p).step(rank) in fault.steps) for p in fault.points)


def scenario_of(setting: Setting, way: Sequence[tuple[State, str]]) -> Scenario:
    """The losses in a ``way`` of (state, action), and where each loss finds the others."""
    faults, wishes = list[Fault](), list[Wish]()
    if setting.refuse:
        faults.append(replace(default("nonfinite"), ranks=frozenset({0}), steps=frozenset({1})))
    for number, (state, action) in enumerate(way):
        if action == "all know of the end":
            wishes.append(Wish(max(rank.step for rank in state.ranks)))
        who, _, does = action.partition(" ")
        if who == "kill":
            faults.append(_fault("kill", way, number, int(does)))
        elif does == "freezes":
            held, voting = _fault("delay", way, number, int(who)), state.ranks[int(who)].phase == "V"
            # No point holds a rank that has sent its summand and lacks a sum that others know: left to chance.
            if held.steps and not (voting and held.points == ("after_vote",)):
                faults.append(held)
    settings: dict[str, Any] = {"mirrors": setting.mirrors, "migrate_after": 0 if setting.migrate else -1}
    if setting.state_mode:
        settings["snapshot"] = "state"
    return Scenario(
        Layout(1, 1, setting.ranks),
        setting.steps,
        back=NEVER,
        evaluate=0,
        heavy=setting.migrate,
        settings=tuple(sorted(settings.items())),
        faults=tuple(faults),
        wishes=tuple(wishes),
    )


def _fault(kind: str, way: Sequence[tuple[State, str]], number: int, r: int) -> Fault:
    """A fault that finds rank ``r`` where it stands before action ``number`` of ``way``."""
    state = way[number][0]
    stand, rank = stand_of(state, r), state.ranks[r]
    point, steps = stand.written, frozenset({stand.step(rank)})
    if stand.written.startswith("in_recovery"):
        steps = frozenset()
    elif stand.name == "has joined the vote" and not any(
        len(other.chain) > rank.step for later, _ in way[number:] for other in later.ranks
    ):
        point = "before_vote"  # a rank that had the sum later would tell that it was sent
    fault = Fault(kind, frozenset({r}), steps, (point,), seconds=HELD_SECONDS)
    passes = {_pass(earlier.ranks[r]) for earlier, _ in way[:number] if finds(fault, earlier, r)}
    return replace(fault, nth=1 + len(passes - {_pass(rank)}))


def _pass(rank: Rank) -> tuple[int, int]:
    """Return what tells one computation of a step from the next: the generation, and the attempt in it."""
    return rank.generation, rank.key % ATTEMPTS
