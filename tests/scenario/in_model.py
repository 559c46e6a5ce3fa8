"""A scenario in the bounded model: each kill strikes a rank in the state nearest to its point, and there only.

Every interleaving that is left is explored where there are at most :data:`STATES_EXPLORED` states, else :data:`WALKS`
are drawn by the seed. The model's ranks own a block each, whatever stage they belong to. No rank comes later: a lost
one does not return, also where a user lets it in, and there are no spares; ``losses=`` and ``rejoin=`` count those that
are lost. A gradient is not finite in the first computation of the first step alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

from megatron.elastic.engine.inject import Fault
from tests.scenario.points import finds
from tests.scenario.scenario import Scenario
from tests.unit.protocol.protocol_explore import TooManyStates, done, explore, found_by
from tests.unit.protocol.protocol_model import Model
from tests.unit.protocol.protocol_state import Faults, Setting, State, Violation, initial_state

__all__ = ["Ending", "NotInModel", "play", "setting_of"]

Ending = Literal["kept", "lost"]
STATES_EXPLORED, WALKS = 10_000, 20

BESIDE = ("freezes", "takes")
"""Actions of a rank that a ``delay`` holds back. Copies arrive on another thread, which goes on."""


class NotInModel(ValueError):
    """The model has nothing that is near to a part of the scenario."""


def setting_of(scenario: Scenario, rules_off: Faults = Faults()) -> Setting:  # noqa: B008 - immutable
    """The part of a scenario that the model knows. Raises :class:`NotInModel`."""
    if scenario.layout.tensor > 1:
        raise NotInModel("tensor-parallel groups")
    for fault in scenario.faults:
        if fault.missing and fault.kind == "delay":
            continue  # it gives a rank time to return
        if fault.kind not in ("kill", "delay", "nonfinite") or fault.incarnations - {0} or not fault.ranks:
            raise NotInModel(f"{fault.kind} of ranks {set(fault.ranks)}, lives {set(fault.incarnations)}")
        if fault.kind == "nonfinite" and fault.steps != {1}:
            raise NotInModel(f"a gradient that is not finite in steps {set(fault.steps)}")
        if max(fault.ranks) >= scenario.layout.ranks:
            raise NotInModel(f"ranks {set(fault.ranks)}, of which some are beyond the launch")
    struck = {rank for fault in scenario.kills() for rank in fault.ranks}
    moves = scenario.heavy or any(wish.what == "drain" and wish.ranks for wish in scenario.wishes)
    return Setting(
        ranks=scenario.layout.ranks,
        mirrors=min(scenario.mirrors, scenario.layout.ranks - 1),
        steps=scenario.steps,
        kills=len(struck),
        migrate=moves,
        refuse=any(fault.kind == "nonfinite" for fault in scenario.faults),
        replenish=len(struck) > 1 and not moves,
        state_mode=dict(scenario.settings).get("snapshot") == "state",
        drain=scenario.ends_early,
        faults=rules_off,
    )


class Scripted(Model):
    """The model with the kills of a scenario alone. A rank that is at the point of one does nothing but die.

    A rank that a ``delay`` finds at its point stays there until the loss written before it is noticed (else, until the
    first is), unless all others wait for it.
    """

    def __init__(self, setting: Setting, scenario: Scenario) -> None:
        super().__init__(setting)
        self._kills, self._delays = list[Fault](), list[tuple[Fault, int]]()
        for fault in scenario.faults:
            if fault.kind == "nonfinite" or fault.missing:
                continue
            if fault.kind == "delay":
                self._delays.append((fault, max(1, len(self._kills))))
            else:
                self._kills.append(fault)

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        held, others = [], False
        for action, following in super().successors(state):
            who, _, does = action.partition(" ")
            rank = int(does) if who == "kill" else int(who) if who.isdigit() else None
            if rank is not None and (who == "kill") != any(self._meets(fault, state, rank) for fault in self._kills):
                continue
            if who.isdigit() and does.split()[0] not in BESIDE and self._stays(state, int(who)):
                held.append((action, following))
                continue
            others = True
            yield action, following
        if not others:
            yield from held

    def is_progress(self, action: str) -> bool:
        return True

    def _stays(self, state: State, r: int) -> bool:
        return any(state.seen_dead < loss and self._meets(fault, state, r) for fault, loss in self._delays)

    @staticmethod
    def _meets(fault: Fault, state: State, r: int) -> bool:
        """Return True if rank ``r`` is where ``fault`` strikes."""
        rank = state.ranks[r]
        if not rank.alive or r not in fault.ranks:
            return False
        lost = sum(not each.alive for each in state.ranks)
        if any(after is not None and after != lost for after in (fault.losses, fault.rejoin)):
            return False
        return finds(fault, state, r)


def play(scenario: Scenario, rules_off: Faults = Faults()) -> Ending:  # noqa: B008 - immutable
    """Run ``scenario``. Raises :class:`Violation`; "lost" if state is lost in some interleaving and may be."""
    setting = setting_of(scenario, rules_off)
    model = Scripted(setting, scenario)
    try:
        decided = explore(setting, STATES_EXPLORED, model).keys()
    except TooManyStates:
        ends = {_walk(model, scenario.seed + number) for number in range(WALKS)}
        return "lost" if "lost" in ends else "kept"
    if setting.kills and not any(name.startswith("decide") for name in decided):
        raise NotInModel(f"no kill of {scenario} strikes")
    return "lost" if any(name.startswith("decide lost") for name in decided) else "kept"


def _walk(model: Model, seed: int) -> Ending:
    dice, state, way = random.Random(seed), initial_state(model.setting), list[tuple[State, str]]()
    while True:
        try:
            following = list(model.successors(state))
            if not following and not done(state):
                raise Violation("stuck: no rank can continue")
        except Violation as error:
            raise found_by(model.setting, error, tuple(way)) from None
        if not following:
            return "lost" if state.decision.kind == "lost" else "kept"
        action, after = dice.choice(following)
        way.append((state, action))
        state = after
