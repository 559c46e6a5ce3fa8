"""Ranks beyond the launch: who is admitted, when, and who just waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.comm.address import Address
from megatron.elastic.control.events import Decided, Entry, Lost, NodeBack, NodeLost, Readmitted, Reported, Requested
from megatron.elastic.control.events import Waiting as Arrived
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.membership import Loss
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.requests import Pending, Request


def entry(rank: int, incarnation: int = 0) -> Entry:
    return Entry(Address(rank, incarnation, "h"), "")


def loss(rank: int, incarnation: int = 0) -> Lost:
    return Lost((Loss(rank, incarnation, "h", "signal SIGKILL"),), (0,))


def started(nominal: int, spares: int, cell: int = 1, later: int = 0, respawn: bool = True) -> Generations:
    """A job of ``nominal`` ranks that run, with ``spares`` launched beside them and a node of ``later`` to come."""
    nodes = {0: Node("a", tuple(range(nominal + spares)))}
    if later:
        nodes[1] = Node("", tuple(range(nominal + spares, nominal + spares + later)), alive=False)
    state = Generations(nodes, respawn, nominal, cell)
    for rank in range(nominal):
        state.apply(Arrived((entry(rank),)))
    state.apply(Decided(1, 0))
    assert state.decided == 1 and state.members == tuple(range(nominal))
    return state


def settle(state: Generations) -> None:
    """Members report for the frozen generation, and it is decided."""
    for rank in state.missing():
        state.apply(Reported(state.frozen, (entry(rank, state.ranks[rank].incarnation),)))
    state.apply(Decided(state.frozen, 0))
    assert state.quiet


def at_boundary(state: Generations) -> None:
    """All members honour a wish to join, if there is one."""
    if state.pending().join:
        state.apply(Requested(Request.JOIN, state.members, state.decided))
        settle(state)


def test_a_start_waits_for_no_spare_and_lets_none_in() -> None:
    state = started(4, 2)
    state.apply(Arrived((entry(4),)))
    assert state.quiet and state.pending() == Pending() and state.ranks[4].standing == "waiting"


def test_a_spare_comes_with_the_very_generation_of_the_loss() -> None:
    state = started(4, 1)
    state.apply(Arrived((entry(4),)))
    state.apply(loss(1))
    assert state.joiners == (4,) and state.missing() == (0, 2, 3), "its report is here already"
    settle(state)
    assert state.decision is not None
    assert state.decision.reason == "loss" and state.decision.joined == (4,) and state.members == (0, 2, 3, 4)


def test_whose_place_is_taken_waits_when_it_is_back_and_is_the_next_spare() -> None:
    state = started(4, 1)
    state.apply(Arrived((entry(4),)))
    state.apply(loss(1))
    settle(state)
    state.apply(Arrived((entry(1, 1),)))
    assert state.pending() == Pending() and state.ranks[1].standing == "waiting"
    state.apply(loss(4))
    assert state.joiners == (1,)
    settle(state)
    assert state.members == (0, 1, 2, 3)


def test_a_spare_that_is_ready_late_joins_at_a_boundary() -> None:
    state = started(2, 1)
    state.apply(loss(0))
    settle(state)
    state.apply(Arrived((entry(2),)))
    assert state.pending() == Pending(join=True)
    at_boundary(state)
    assert state.members == (1, 2) and state.pending() == Pending()


def test_only_whole_tensor_parallel_groups_come() -> None:
    state = started(4, 2, cell=2)
    state.apply(Arrived((entry(4),)))
    state.apply(loss(1))
    assert state.joiners == (), "half a group would compute nothing"
    settle(state)
    state.apply(Arrived((entry(5),)))
    at_boundary(state)
    assert state.members == (0, 2, 3, 4, 5), "rank 0 is parked"
    state.apply(Arrived((entry(1, 1),)))
    assert state.pending() == Pending(), "two groups compute, as at launch"
    state.apply(loss(2))
    assert state.joiners == (1,), "with the parked rank 0 it makes a group"


def test_a_spare_lost_while_it_waits_or_while_it_is_let_in_disturbs_no_rank_for_long() -> None:
    state = started(3, 2)
    for rank in (3, 4):
        state.apply(Arrived((entry(rank),)))
    state.apply(loss(3))
    assert state.quiet
    state.apply(loss(0))
    assert state.joiners == (4,)
    state.apply(loss(4))
    assert state.joiners == () and not state.quiet
    settle(state)
    assert state.members == (1, 2)


def test_a_node_beyond_the_launch_makes_the_job_wider_and_a_spare_does_not_until_asked() -> None:
    state = started(2, 1, later=2)
    state.apply(Arrived((entry(2),)))
    assert state.pending() == Pending()
    state.apply(NodeBack(1, 1, "b"))
    for rank in (3, 4):
        state.apply(Arrived((entry(rank),)))
        at_boundary(state)
    assert len(state.members) == 4 and len([r for r in state.ranks if state.ranks[r].standing == "waiting"]) == 1
    state.apply(Readmitted((2,)))
    at_boundary(state)
    assert state.members == (0, 1, 2, 3, 4)
    state.apply(NodeLost(1, 1, "node unreachable"))
    settle(state)
    assert state.members == (0, 1, 2)


def test_a_further_node_comes_also_where_lost_ranks_do_not() -> None:
    state = started(2, 0, later=1, respawn=False)
    state.apply(NodeBack(1, 1, "b"))
    assert state.ranks[2].may_return
    state.apply(Arrived((entry(2),)))
    at_boundary(state)
    assert state.members == (0, 1, 2)


def test_spares_alone_do_not_keep_a_job_alive() -> None:
    state = started(2, 1, respawn=False)
    state.apply(Arrived((entry(2),)))
    state.apply(loss(0))
    settle(state)
    state.apply(loss(2))
    state.apply(loss(1))
    assert state.over()


@given(
    cell=st.integers(1, 2),
    cells=st.integers(1, 3),
    spare_cells=st.integers(1, 2),
    order=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=30),
)
def test_there_are_never_more_whole_groups_than_at_launch_and_never_fewer_than_could_be(
    cell: int, cells: int, spare_cells: int, order: list[tuple[bool, int]]
) -> None:
    nominal, spares = cell * cells, cell * spare_cells
    state = started(nominal, spares, cell)
    for comes, number in order:
        rank = number % (nominal + spares)
        known = state.ranks[rank]
        if comes and known.standing in ("starting", "lost"):
            state.apply(Arrived((entry(rank, known.incarnation + (known.standing == "lost")),)))
        elif not comes and known.standing in ("member", "waiting"):
            state.apply(loss(rank, known.incarnation))
        if state.fresh:
            return  # everybody starts anew
        if not state.quiet:
            settle(state)
        at_boundary(state)
        groups = [range(first, first + cell) for first in range(0, nominal + spares, cell)]
        present = [all(state.ranks[r].standing == "member" for r in group) for group in groups]
        possible = [all(state.ranks[r].standing in ("member", "waiting") for r in group) for group in groups]
        assert sum(present) == min(cells, sum(possible))
        assert state.pending() == Pending()
