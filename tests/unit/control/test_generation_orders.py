"""The invariants of the generation state machine: in every order of a few events, and after any sequence of many."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.elastic.control.events import (
    Abandoned,
    Announced,
    Decided,
    Event,
    Finished,
    Lifted,
    Lost,
    NodeBack,
    NodeLost,
    Part,
    Readmitted,
    Reformed,
    Reported,
    Requested,
    Reshaped,
    Together,
    Waiting,
    Wanted,
)
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.requests import Drain, Request, Reshape, SaveCheckpoint, Stop
from tests.unit.control.generation_machines import entry, loss, machine, started


def interleavings(*threads: list[Event]) -> Iterator[list[Event]]:
    """Every merge of the given sequences."""
    if not any(threads):
        yield []
        return
    for index, thread in enumerate(threads):
        if thread:
            rest = [*threads[:index], thread[1:], *threads[index + 1 :]]
            for tail in interleavings(*rest):
                yield [thread[0], *tail]


def check_step(before: tuple[int, int], state: Generations, dead: set[tuple[int, int]]) -> None:
    frozen, decided = before
    assert state.frozen >= frozen and state.decided >= decided, "generations only grow"
    assert state.decided <= state.frozen
    if state.decided > decided:
        decision = state.decision
        assert decision is not None and decision.generation == state.decided
        named = {(rank, address.incarnation) for rank, address in decision.members.items()}
        assert not named & dead, "a decision names an incarnation whose loss came first"
        assert set(decision.reports) == set(decision.members) - set(decision.joined)
        for rank, report in decision.reports.items():
            assert decision.reason == "start" or report == f"{rank}@{decision.generation}"


def apply_checked(state: Generations, event: Event, dead: set[tuple[int, int]]) -> None:
    if isinstance(event, Together):
        for one in state.events_of(event):
            apply_checked(state, one, dead)
        return
    before = (state.frozen, state.decided)
    state.apply(event)
    assert not (state.fresh and state.quarantine.out()), "it would wait for whom it does not start"
    if isinstance(event, Lost):
        dead |= {(item.rank, item.incarnation) for item in event.losses}
    check_step(before, state, dead)


def test_every_order_of_two_losses_a_join_and_their_reports_keeps_the_invariants() -> None:
    """Threads: two losses with a respawn, reports for generations 2 and 3, decisions tried at any time."""
    walked = 0
    threads: list[list[Event]] = [
        [loss(2), Waiting((entry(2, 1),))],
        [loss(1)],
        [Reported(2, (entry(0, report="0@2"), entry(1, report="1@2"))), Reported(3, (entry(0, report="0@3"),))],
        [Decided(2, 0), Decided(3, 0), Decided(4, 0)],
    ]
    for order in interleavings(*threads):
        state, dead = started(3), set[tuple[int, int]]()
        for event in order:
            apply_checked(state, event, dead)
        walked += 1
        assert state.members == (0,)
    assert walked == 1680


OWN_EVENTS = st.one_of(
    st.builds(loss, st.integers(0, 3), st.integers(0, 2)),
    st.builds(lambda r, i: Waiting((entry(r, i),)), st.integers(0, 4), st.integers(0, 3)),
    st.builds(
        lambda g, ranks: Reported(g, tuple(entry(r, i, f"{r}@{g}") for r, i in ranks)),
        st.integers(0, 8),
        st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=4),
    ),
    st.builds(
        lambda w, r, g: Requested(w, tuple(r), g),
        st.sampled_from([r for r in Request if r is not Request.SETUP and r is not Request.BEGIN]),
        st.lists(st.integers(0, 4), max_size=4),
        st.integers(0, 8),
    ),
    st.builds(Finished, st.integers(0, 4), st.integers(0, 2), st.integers(0, 5), st.booleans()),
)
PARTS = st.builds(Part, st.integers(0, 2), st.integers(0, 2), st.integers(1, 4), OWN_EVENTS)
EVENTS = st.one_of(
    OWN_EVENTS,
    st.builds(lambda parts: Together(tuple(parts)), st.lists(PARTS, max_size=3)),
    st.builds(Decided, st.integers(0, 8), st.integers(0, 1)),
    st.builds(NodeLost, st.integers(0, 2), st.integers(0, 2), st.just("gone")),
    st.builds(NodeBack, st.integers(0, 2), st.integers(0, 3), st.just("h")),
    st.builds(Reformed, st.integers(0, 8), st.just("why")),
    st.builds(Announced, st.integers(0, 8), st.just("any 1 rank")),
    st.builds(lambda r: Abandoned(tuple(r), "why"), st.lists(st.integers(0, 4), max_size=2)),
    st.builds(Lifted, st.integers(0, 2), st.integers(0, 3), st.just("why")),
    st.builds(lambda r: Readmitted(tuple(r)), st.lists(st.integers(0, 4), max_size=2)),
    st.builds(lambda r: Wanted(Drain(tuple(r))), st.lists(st.integers(0, 3))),
    st.builds(Wanted, st.sampled_from([SaveCheckpoint(), Stop(), Reshape(1, 2, 2), Reshape(5, 1, 1)])),
    st.builds(
        Reshaped, st.integers(0, 3), st.sampled_from(["under way", "in force", "refused"]), st.just("in one line")
    ),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(EVENTS, max_size=40), st.booleans())
@example([loss(0, 0), NodeLost(1, 0, "gone"), loss(1, 1)], True)  # who is left is known by a life that is over
def test_no_sequence_of_events_breaks_the_invariants_or_two_agents_apart(events: list[Event], start: bool) -> None:
    left, right = (started(2, 2), started(2, 2)) if start else (machine(2, 2), machine(2, 2))
    dead: set[tuple[int, int]] = set()
    for event in events:
        apply_checked(left, event, dead)
        right.apply(event)
        assert (left.decision, left.frozen, left.pending()) == (right.decision, right.frozen, right.pending())


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENTS, max_size=30))
def test_once_quiet_again_survivors_can_always_decide(events: list[Event]) -> None:
    """Whatever happened, if every expected rank reports, DECIDE succeeds: no state is a dead end."""
    state = started(2, 2)
    for event in events:
        state.apply(event)
    if state.over() or state.quiet:
        return
    for rank in state.missing():
        waiting = state.ranks[rank]
        if state.fresh:
            state.apply(Waiting((entry(rank, waiting.incarnation + 1),)))
        else:
            state.apply(Reported(state.frozen, (entry(rank, waiting.incarnation),)))
    assert state.ready(), state
    state.apply(Decided(state.frozen, 0))
    assert state.quiet
