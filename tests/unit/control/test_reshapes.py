"""A request for other sizes: one at a time, open until a member says how it ended, whatever is lost meanwhile."""

from __future__ import annotations

from megatron.elastic.control.events import Decided, NodeBack, Requested, Reshaped, Wanted
from megatron.elastic.control.events import Waiting as Arrived
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.requests import OpenReshape, Pending, Request, Reshape
from megatron.elastic.control.reshapes import Reshapes
from tests.unit.control.test_spares import at_boundary, entry, loss, settle, started

WIDE, LONG = Reshape(4, 1, 1), Reshape(1, 4, 1)


def reshape(state: Generations) -> OpenReshape | None:
    return state.pending().reshape


def test_a_request_is_open_until_the_sizes_are_in_force() -> None:
    state = started(4, 0)
    state.apply(Wanted(LONG))
    assert state.pending() == Pending(reshape=OpenReshape(1, 1, 4, 1))
    assert state.pending().words() == ["reshape:tp1,pp4,dp1"]
    state.apply(Reshaped(1, "under way", "moving"))
    state.apply(Wanted(WIDE))
    assert reshape(state) == OpenReshape(1, 1, 4, 1), "one at a time: ctl refuses the second"
    state.apply(Reshaped(1, "in force", "since step 5"))
    assert state.pending() == Pending() and state.reshapes.in_force == LONG
    state.apply(Reshaped(1, "refused", "told twice"))
    assert (state.reshapes.state, state.reshapes.text) == ("in force", "since step 5")


def test_an_answer_to_an_earlier_request_ends_nothing() -> None:
    state = started(4, 0)
    state.apply(Wanted(LONG))
    state.apply(Reshaped(1, "refused", "no"))
    state.apply(Wanted(WIDE))
    state.apply(Reshaped(1, "refused", "no"))
    assert reshape(state) == OpenReshape(2, 4, 1, 1) and state.reshapes.in_force is None


def test_a_loss_leaves_it_open_and_it_is_hopeless_when_no_rank_returns() -> None:
    for respawn in (True, False):
        state = started(4, 0, respawn=respawn)
        state.apply(Wanted(LONG))
        state.apply(loss(2))
        assert reshape(state) == OpenReshape(1, 1, 4, 1, hopeless=not respawn)


def test_waiting_spares_are_admitted_for_sizes_that_need_them() -> None:
    state = started(4, 4, cell=2)
    for rank in range(4, 8):
        state.apply(Arrived((entry(rank),)))
    assert not state.pending().join
    state.apply(Wanted(Reshape(2, 2, 2)))
    at_boundary(state)
    assert state.members == tuple(range(8)) and not state.pending().join


def test_spares_are_admitted_one_by_one_where_no_cell_of_the_launch_is_to_be() -> None:
    state = started(4, 2, cell=2)
    state.apply(Arrived((entry(4),)))
    state.apply(Wanted(Reshape(5, 1, 1)))
    at_boundary(state)
    assert state.members == (0, 1, 2, 3, 4)
    state.apply(Reshaped(1, "in force", ""))
    state.apply(Arrived((entry(5),)))
    assert not state.pending().join, "five ranks are enough"
    state.apply(loss(1))
    settle(state)
    assert state.members == (0, 2, 3, 4, 5), "the spare comes without the other rank of its pair"


def test_ranks_of_a_node_to_come_are_no_hope_before_it_is_there() -> None:
    state = started(2, 0, later=2)
    state.apply(Wanted(Reshape(4, 1, 1)))
    assert reshape(state) == OpenReshape(1, 4, 1, 1, hopeless=True)
    state.apply(NodeBack(1, 1, "b"))
    assert reshape(state) == OpenReshape(1, 4, 1, 1)


def test_a_job_that_begins_anew_is_reshaped_again() -> None:
    state = started(2, 0)
    state.apply(Wanted(Reshape(1, 2, 1)))
    state.apply(Reshaped(1, "in force", ""))
    state.apply(loss(0))
    state.apply(loss(1))
    assert state.fresh and reshape(state) == OpenReshape(2, 1, 2, 1)


def test_the_sizes_that_are_left_count_until_the_new_ones_are_in_force() -> None:
    """A rank lost on the way from eight to six is admitted again."""
    reshapes = Reshapes()
    reshapes.ask(Reshape(2, 2, 2))
    reshapes.told(1, "in force", "")
    reshapes.ask(Reshape(2, 3, 1))
    assert reshapes.ranks == 8 and reshapes.group(2) == 2 and reshapes.group(1) == 1
    reshapes.told(2, "in force", "")
    assert reshapes.ranks == 6


def test_news_of_members_that_are_all_lost_end_nothing() -> None:
    """The job begins at the launch's sizes, so the request has to be carried out again."""
    state = started(2, 0)
    state.apply(Wanted(Reshape(1, 2, 1)))
    state.apply(loss(0))
    state.apply(loss(1))
    state.apply(Reshaped(1, "in force", "since step 5"))
    assert state.fresh and reshape(state) == OpenReshape(1, 1, 2, 1) and state.reshapes.in_force is None


def test_a_request_before_the_job_has_begun_outlives_a_start_anew() -> None:
    state = Generations({0: Node("h", (0, 1))})
    for incarnation in (0, 1):
        for rank in (0, 1):
            state.apply(Requested(Request.SETUP, (rank,), 0))
            state.apply(Arrived((entry(rank, incarnation),)))
        state.apply(Decided(state.frozen, 0))
        assert state.preparing
        if not incarnation:
            state.apply(Wanted(Reshape(1, 2, 1)))
            state.apply(loss(0))
            state.apply(loss(1))
        assert reshape(state) == OpenReshape(1, 1, 2, 1)
    for rank in (0, 1):
        state.apply(Requested(Request.BEGIN, (rank,), state.decided))
    assert not state.preparing and reshape(state) == OpenReshape(1, 1, 2, 1)
