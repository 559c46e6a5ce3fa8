"""A node that loses ranks more often than the others is left out, longer each time; even losses change nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.comm.address import Address
from megatron.elastic.control.events import Decided, Entry, Lifted, Lost, NodeLost, Readmitted, Reported, Waiting
from megatron.elastic.control.exits import Ending
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.membership import Loss
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.quarantine import Quarantine

HOUR, FIRST = 3600.0, 60.0


@given(after=st.integers(1, 5), others=st.integers(1, 8), pauses=st.lists(st.floats(2, 600), min_size=8, max_size=24))
def test_the_only_sick_node_is_out_twice_as_long_each_time_up_to_an_hour(
    after: int, others: int, pauses: list[float]
) -> None:
    """``pauses``: seconds from its return (or its last loss) to its next loss."""
    quarantine, healthy = Quarantine(after, FIRST), range(1, 1 + others)
    now, losses, spans = 1e9, 0, []
    for pause in pauses:
        now += pause
        losses += 1
        if quarantine.lost(0, healthy, now):
            record = quarantine.nodes[0]
            spans.append(record.until - now)
            assert quarantine.out() == {0} and quarantine.due(record.until - 1) == ()
            assert quarantine.due(record.until) == (0,)
            now = record.until
            quarantine.lift(0, record.level)
            assert quarantine.out() == frozenset()
    assert spans == [min(HOUR, FIRST * 2.0**level) for level in range(len(spans))]
    if sum(pauses) < HOUR:
        assert len(spans) == losses - after + 1, "the first ones are borne, then each puts it out"


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 6), after=st.integers(0, 4))
def test_no_node_is_out_that_lost_no_more_than_the_others(seed: int, nodes: int, after: int) -> None:
    print(f"seed {seed}")
    draw, quarantine, now = random.Random(seed), Quarantine(after, FIRST), 0.0
    counted: dict[int, list[float]] = {node: [] for node in range(nodes)}
    for _ in range(60):
        now += draw.choice([0.1, 5.0, 400.0])
        node = draw.randrange(nodes)
        others = [other for other in range(nodes) if other != node]
        was_out = node in quarantine.out()
        out = quarantine.lost(node, others, now)
        if not was_out and not (counted[node] and now - counted[node][-1] < 1.0):
            counted[node].append(now)
        mine = sum(now - at < HOUR for at in counted[node])
        theirs = sorted(sum(now - at < HOUR for at in counted[other]) for other in others)
        if out:
            assert after > 0 and theirs and mine > theirs[len(theirs) // 2]
        for due in quarantine.due(now):
            quarantine.lift(due)


def test_an_hour_without_a_loss_ends_the_parole() -> None:
    quarantine = Quarantine(2, FIRST)
    assert [quarantine.lost(0, [1], at) for at in (0.0, 10.0)] == [False, True]
    quarantine.lift(0, 1)
    assert quarantine.lost(0, [1], 80.0) and quarantine.nodes[0].until == 80.0 + 2 * FIRST
    quarantine.lift(0, 1)
    assert quarantine.out() == {0}, "late news of the first time"
    quarantine.lift(0, 2)
    assert [quarantine.lost(0, [1], 200.0 + HOUR + at) for at in (0.0, 10.0)] == [False, True]
    assert quarantine.nodes[0].until == 210.0 + HOUR + FIRST


def test_ranks_that_die_together_count_once() -> None:
    quarantine = Quarantine(2, FIRST)
    assert not any(quarantine.lost(0, [1], at) for at in (5.0, 5.1, 5.5, 5.9))
    assert quarantine.lost(0, [1], 20.0)


# -- as part of the generations -----------------------------------------------------------


def started(after: int = 2) -> Generations:
    nodes = {n: Node(f"h{n}", (2 * n, 2 * n + 1)) for n in range(3)}
    state = Generations(nodes, quarantine=Quarantine(after, FIRST))
    for rank in state.ranks:
        state.apply(Waiting((Entry(Address(rank, 0, "h"), ""),)))
    state.apply(Decided(1, 0))
    return state


def lose(state: Generations, rank: int, at: float, ending: Ending = Ending.KILLED) -> None:
    state.apply(Lost((Loss(rank, state.ranks[rank].incarnation, "h", "…", ending=ending),), (3,), at))
    for missing in state.missing():
        state.apply(Reported(state.frozen, (Entry(Address(missing, state.ranks[missing].incarnation, "h"), ""),)))
    state.apply(Decided(state.frozen, 0))


def come_back(state: Generations, rank: int) -> None:
    state.apply(Waiting((Entry(Address(rank, state.ranks[rank].incarnation + 1, "h"), ""),)))
    state.ranks[rank].standing = "member"


def test_the_decision_after_the_loss_says_who_is_left_out_and_the_time_brings_it_back() -> None:
    state = started()
    lose(state, 4, 10.0)
    assert state.returns(4) and state.decision is not None and state.decision.left_out == ()
    come_back(state, 4)
    lose(state, 5, 20.0)
    assert not state.returns(5) and state.returns(0) and state.decision.left_out == (2,)
    assert state.members == (0, 1, 2, 3, 4), "those of its ranks that live go on"
    state.apply(Lifted(2, 1, "over"))
    assert state.returns(5) and state.quarantine.out() == frozenset()


@pytest.mark.parametrize("ending", Ending)
def test_what_follows_from_a_loss_elsewhere_is_not_held_against_the_node(ending: Ending) -> None:
    state = started()
    for at in (10.0, 20.0, 30.0):
        lose(state, 4, at, ending)
        come_back(state, 4)
    assert (state.quarantine.nodes != {}) == (ending in (Ending.KILLED, Ending.ERROR))


def test_a_node_that_is_lost_as_a_whole_counts_too() -> None:
    state = started()
    lose(state, 4, 10.0)
    come_back(state, 4)
    state.apply(NodeLost(2, 0, "gone", 20.0))
    assert not state.returns(4) and state.quarantine.out() == {2}


def test_no_node_is_out_of_a_job_that_has_no_member_left() -> None:
    state = started()
    for at in (10.0, 20.0):
        lose(state, 4, at)
        come_back(state, 4)
    assert state.quarantine.out() == {2}
    for rank in (0, 1, 2, 3, 4, 5):
        lose(state, rank, 30.0 + 2 * rank)
    assert state.fresh and state.quarantine.out() == frozenset() and not state.over()
    assert state.expected() == (0, 1, 2, 3, 4, 5)


def test_an_operator_starts_them_at_once() -> None:
    state = started()
    for at in (10.0, 20.0):
        lose(state, 4, at)
        state.ranks[4].incarnation += 1
        state.ranks[4].standing = "member"
    lose(state, 5, 40.0)
    state.apply(Readmitted((5,)))
    assert state.returns(5)
