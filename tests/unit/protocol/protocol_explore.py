"""The exploration of the bounded model: every reachable state, and the way to the first that breaks a claim."""

from __future__ import annotations

from tests.scenario.points import scenario_of
from tests.unit.protocol.protocol_model import Model
from tests.unit.protocol.protocol_state import Setting, State, Violation, initial_state

__all__ = ["TooManyStates", "done", "explore", "found_by"]


def done(state: State) -> bool:
    """Return whether it is right that nothing more can happen here."""
    alive = [rank for rank in state.ranks if rank.alive]
    return state.decision.kind == "lost" or all(rank.phase == "E" for rank in alive)


class TooManyStates(RuntimeError):
    """There are more states to explore than was allowed."""


def explore(setting: Setting, limit: int = 3_000_000, model: Model | None = None) -> dict[str, int]:
    """Visit every reachable state, depth first. Returns counts.

    ``model``: one of ``setting`` that leaves some interleavings out. Raises :class:`Violation` with the way there, and
    :class:`TooManyStates`.
    """
    model, start = model or Model(setting), initial_state(setting)
    came: dict[State, tuple[State, str] | None] = {start: None}
    stack, kinds, edges = [start], dict[str, int](), 0
    while stack:
        state = stack.pop()
        progress = False
        try:
            for action, following in model.successors(state):
                edges += 1
                progress = progress or model.is_progress(action)
                if following not in came:
                    came[following] = (state, action)
                    stack.append(following)
                    if action.startswith("decide") or action.endswith("switches"):
                        kinds[action] = kinds.get(action, 0) + 1
            if not progress and not done(state):
                raise Violation("stuck: no rank can continue")
        except Violation as error:
            raise found_by(setting, error, _way(came, state)) from None
        if len(came) > limit:
            raise TooManyStates(f"more than {limit} states")
    return {"states": len(came), "edges": edges, **dict(sorted(kinds.items()))}


def found_by(setting: Setting, error: Violation, way: tuple[tuple[State, str], ...]) -> Violation:
    """``error`` with the way to it, as actions and as a scenario."""
    actions = " | ".join(action for _, action in way)
    return Violation(f"{error}; scenario: {scenario_of(setting, way)}; after: {actions}", way)


def _way(came: dict[State, tuple[State, str] | None], state: State) -> tuple[tuple[State, str], ...]:
    way = []
    while (step := came[state]) is not None:
        state = step[0]
        way.append(step)
    return tuple(way[::-1])
