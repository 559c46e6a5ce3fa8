"""The work of an agent for the entries of a loss, a start and a return, by the number of nodes."""

from __future__ import annotations

from megatron.elastic.control.events import (
    Decided,
    Event,
    Reported,
    Requested,
    Waiting,
)
from megatron.elastic.control.requests import Request
from tests.unit.calls import calls_in
from tests.unit.control.generation_machines import entry, loss, machine, report_all, started


def test_an_agent_takes_in_a_loss_and_a_return_by_as_much_more_work_as_there_are_more_nodes() -> None:
    """Each node's agent appends an entry, and each agent asks after each entry what follows from it."""

    def taken_in(nodes: int) -> int:
        state = started(*[8] * nodes)

        def one(event: Event) -> None:
            state.apply(event)
            assert not state.over()
            state.pending(), state.ready(), state.coordinator(), state.preparing

        def by_node(generation: int) -> None:
            for node in state.nodes.values():
                members = [rank for rank in node.ranks if state.ranks[rank].standing == "member"]
                one(Reported(generation, tuple(entry(rank, state.ranks[rank].incarnation) for rank in members)))
            one(Decided(generation, 0))
            assert state.decided == generation

        def a_loss_and_a_return() -> None:
            one(loss(9))
            by_node(2)
            one(Waiting((entry(9, 1),)))
            for node in state.nodes.values():
                members = tuple(rank for rank in node.ranks if state.ranks[rank].standing == "member")
                one(Requested(Request.JOIN, members, 2))
            by_node(3)

        return calls_in(a_loss_and_a_return)

    few, many = taken_in(8), taken_in(32)
    print(f"{few} calls with 8 nodes, {many} with 32")
    assert many < 6 * few


def test_what_a_start_and_the_return_of_many_ranks_cost_grows_with_their_number_and_not_faster() -> None:
    """Each agent takes in an entry of each rank that starts, on the thread that renews its lease."""

    def a_start(nodes: int) -> int:
        state = machine(*[8] * nodes)

        def start() -> None:
            for rank in state.ranks:
                state.apply(Waiting((entry(rank),)))
                assert not state.over() and state.ready() == (rank == 8 * nodes - 1)

        return calls_in(start)

    def returns(nodes: int) -> int:
        """The calls of one question while half of the ranks come again."""
        state = started(*[8] * nodes)
        state.quarantine.after = 0
        for node in range(nodes // 2, nodes):
            for rank in state.nodes[node].ranks:
                state.apply(loss(rank))
        report_all(state)
        state.apply(Decided(state.frozen, 0))
        assert state.quiet and len(state.returning()) == 4 * nodes
        return calls_in(state.pending)

    for measured in (a_start, returns):
        few, many = measured(8), measured(32)
        assert many < 6 * few, f"{measured.__name__}: {few} calls with 8 nodes, {many} with 32"
