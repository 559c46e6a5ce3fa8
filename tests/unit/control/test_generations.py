"""The generation state machine: the decision that follows from a few events."""

from __future__ import annotations

import itertools

import pytest

from megatron.elastic.control.events import (
    Abandoned,
    Decided,
    Lost,
    NodeBack,
    NodeLost,
    Reformed,
    Reported,
    Requested,
    Waiting,
    Wanted,
)
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.quarantine import Quarantine
from megatron.elastic.control.requests import Pending, Request, SaveCheckpoint
from tests.unit.control.generation_machines import entry, loss, machine, report_all, started


def test_the_start_waits_for_every_rank_in_any_order() -> None:
    for order in itertools.permutations(range(4)):
        state = machine(2, 2)
        for rank in order:
            assert not state.ready()
            state.apply(Decided(1, 0))
            assert state.decided == 0
            state.apply(Waiting((entry(rank),)))
        state.apply(Decided(1, 0))
        assert state.decision is not None
        assert list(state.decision.members) == [0, 1, 2, 3] and state.decision.reason == "start"


def test_a_loss_before_the_first_decision_is_replaced_without_a_new_generation() -> None:
    state = machine(3)
    for rank in range(3):
        state.apply(Waiting((entry(rank),)))
    state.apply(loss(1))
    assert not state.ready() and state.missing() == (1,)
    state.apply(Waiting((entry(1, 1),)))
    state.apply(Decided(1, 0))
    assert state.decision is not None and state.decision.members[1].incarnation == 1


def test_a_loss_frozen_before_decide_cannot_be_passed() -> None:
    state = started(4)
    state.apply(loss(2))
    assert state.frozen == 2 and state.members == (0, 1, 3)
    report_all(state)
    assert state.ready()
    state.apply(loss(0))
    state.apply(Decided(2, 0))
    assert state.decided == 1 and state.frozen == 3, "reports of generation 2 must not decide 3"
    assert state.missing() == (1, 3)
    state.apply(Reported(2, (entry(1), entry(3))))
    assert state.missing() == (1, 3), "a report for an older generation counts for nothing"
    report_all(state)
    state.apply(Decided(3, 0))
    assert state.decision is not None
    assert list(state.decision.members) == [1, 3]
    assert [(lost.rank, lost.incarnation) for lost in state.decision.lost] == [(2, 0), (0, 0)]


def test_a_newcomer_waits_until_every_member_has_asked_at_its_boundary() -> None:
    state = started(3)
    state.apply(loss(2))
    report_all(state)
    state.apply(Decided(2, 0))
    state.apply(Waiting((entry(2, 1),)))
    assert state.quiet and state.pending() == Pending(join=True)
    state.apply(Requested(Request.JOIN, (0,), 2))
    assert state.quiet
    state.apply(Requested(Request.JOIN, (0,), 2))
    state.apply(Requested(Request.JOIN, (1,), 1))
    assert state.quiet, "asked twice, and asked in another generation"
    state.apply(Requested(Request.JOIN, (1,), 2))
    assert state.frozen == 3 and state.missing() == (0, 1)
    report_all(state)
    state.apply(Decided(3, 0))
    assert state.decision is not None
    assert state.decision.joined == (2,) and set(state.decision.reports) == {0, 1}
    assert state.decision.reason == "join" and state.members == (0, 1, 2) and state.pending() == Pending()


def test_a_loss_while_admitting_sends_the_joiner_back_to_wait() -> None:
    state = started(3)
    state.apply(loss(2))
    report_all(state)
    state.apply(Decided(2, 0))
    state.apply(Waiting((entry(2, 1),)))
    for rank in (0, 1):
        state.apply(Requested(Request.JOIN, (rank,), 2))
    state.apply(loss(1))
    assert state.frozen == 4 and state.expected() == (0,)
    report_all(state)
    state.apply(Decided(4, 0))
    assert state.decision is not None and state.decision.joined == () and state.pending() == Pending(join=True)


def test_members_that_asked_are_answered_although_the_joiner_died() -> None:
    state = started(3)
    state.apply(loss(2))
    report_all(state)
    state.apply(Decided(2, 0))
    state.apply(Waiting((entry(2, 1),)))
    state.apply(Requested(Request.JOIN, (0,), 2))
    state.apply(loss(2, 1))
    assert state.pending().join, "those who have not asked must still do so"
    state.apply(Requested(Request.JOIN, (1,), 2))
    assert state.frozen == 3
    report_all(state)
    state.apply(Decided(3, 0))
    assert state.decision is not None and state.decision.joined == () and state.pending() == Pending()


def test_losing_all_ranks_starts_anew_with_those_that_come() -> None:
    state = started(2)
    state.apply(loss(0))
    state.apply(Waiting((entry(0, 1),)))
    state.apply(loss(1))
    assert state.fresh and state.missing() == (1,)
    state.apply(Waiting((entry(1, 1),)))
    state.apply(Decided(state.frozen, 0))
    assert state.decision is not None and state.decision.reason == "start" and state.members == (0, 1)


def test_until_every_member_has_begun_a_loss_finds_the_others_preparing() -> None:
    state = machine(3)
    for rank in state.ranks:
        state.apply(Requested(Request.SETUP, (rank,), 0))
        state.apply(Waiting((entry(rank),)))
    assert not state.preparing, "nobody is a member yet: a loss is simply replaced"
    state.apply(Decided(1, 0))
    assert state.preparing
    for rank in (0, 1):
        state.apply(Requested(Request.BEGIN, (rank,), 1))
        assert state.preparing
    state.apply(loss(2))
    assert state.preparing and not state.quiet
    state.apply(loss(0))
    state.apply(loss(1))
    assert state.fresh and not state.preparing
    for rank in state.ranks:
        state.apply(Requested(Request.SETUP, (rank,), 0))
        state.apply(Waiting((entry(rank, 1),)))
    state.apply(Decided(state.frozen, 0))
    for rank in state.ranks:
        state.apply(Requested(Request.BEGIN, (rank,), state.decided))
    assert not state.preparing
    state.apply(loss(2, 1))
    assert not state.preparing and not state.quiet, "now the others go on"


def test_who_has_begun_has_whatever_is_agreed_in_between() -> None:
    """Each rank says it once; a generation that is agreed anew before the last one does must not forget the others."""
    state = machine(3)
    for rank in state.ranks:
        state.apply(Requested(Request.SETUP, (rank,), 0))
        state.apply(Waiting((entry(rank),)))
    state.apply(Decided(1, 0))
    state.apply(Requested(Request.BEGIN, (0,), 1))
    state.apply(Reformed(1, "link"))
    state.apply(Requested(Request.BEGIN, (1,), 1))
    report_all(state)
    state.apply(Decided(2, 0))
    assert state.preparing, "rank 2 has nothing yet"
    state.apply(Requested(Request.BEGIN, (2,), 2))
    assert not state.preparing


def test_without_respawn_losing_all_ranks_is_the_end() -> None:
    state = started(2, respawn=False)
    state.apply(loss(0))
    state.apply(loss(1))
    assert state.over()


def test_a_lost_node_takes_its_ranks_and_gives_them_back() -> None:
    state = started(2, 2)
    state.apply(NodeLost(1, 0, "node unreachable"))
    state.apply(NodeLost(1, 0, "node unreachable"))
    assert state.frozen == 2 and state.members == (0, 1) and state.coordinator() == 0
    state.apply(NodeBack(1, 1, "h1"))
    state.apply(NodeLost(1, 0, "late news of its former life"))
    assert state.nodes[1].alive
    report_all(state)
    state.apply(Decided(2, 0))
    state.apply(Waiting((entry(2, 1), entry(3, 1))))
    assert state.pending() == Pending(join=True)


def test_the_lowest_living_node_decides() -> None:
    state = started(1, 1, 1)
    for node, deciding in ((0, 1), (1, 2), (2, None)):
        state.apply(NodeLost(node, 0, "node unreachable"))
        assert state.coordinator() == deciding


def test_old_news_of_one_rank_does_not_hide_the_loss_of_another() -> None:
    state = started(3)
    state.apply(loss(0))
    state.apply(Waiting((entry(0, 1),)))
    both = Lost((*loss(0).losses, *loss(2).losses), (0,), 20.0)
    state.apply(both)
    assert state.ranks[0].standing == "waiting" and state.members == (1,)


def test_a_link_that_broke_in_an_older_generation_asks_for_no_new_one() -> None:
    state = started(3)
    state.apply(Reformed(1, "link"))
    state.apply(Reformed(1, "the other end of the same link"))
    assert state.frozen == 2, "it is being agreed already"
    report_all(state)
    state.apply(Decided(2, 0))
    state.apply(Reformed(1, "link"))
    assert state.quiet and state.frozen == 2


def test_of_two_agents_that_ask_for_a_place_the_first_in_the_journal_has_it() -> None:
    state = started(2, 2)
    state.apply(NodeLost(1, 0, "node unreachable"))
    state.apply(NodeBack(1, 1, "h1", "first"))
    state.apply(NodeBack(1, 1, "h2", "second"))
    state.apply(NodeBack(1, 2, "h2", "second"))
    assert (state.nodes[1].agent, state.nodes[1].host, state.nodes[1].epoch) == ("first", "h1", 1)
    state.apply(NodeLost(1, 1, "node unreachable"))
    state.apply(NodeBack(1, 2, "h2", "second"))
    assert (state.nodes[1].agent, state.nodes[1].epoch) == ("second", 2)


def decided_without(state: Generations) -> tuple[int, ...]:
    """Agree on the change under way; the ranks that need be waited for from then on."""
    report_all(state)
    state.apply(Decided(state.frozen, 0))
    assert state.decision is not None
    return state.decision.returning


def test_a_decision_says_which_lost_ranks_come_back() -> None:
    state = started(2, 2)
    state.quarantine = Quarantine()
    state.apply(loss(1))
    assert decided_without(state) == (1,)
    state.apply(NodeLost(1, 0, "node unreachable"))
    assert decided_without(state) == (1,), "not those of a node whose agent is gone"
    state.apply(NodeBack(1, 1, "h1"))
    assert state.returning() == (1, 2, 3)
    state.apply(Waiting((entry(1, 1),)))
    state.apply(Requested(Request.REFORM, (0,), state.decided))
    assert decided_without(state) == (1, 2, 3), "whoever waits to be let in is coming, too"


def test_no_rank_waits_for_those_of_a_node_that_is_left_out() -> None:
    state = started(2, 2)
    state.apply(loss(1))
    assert state.quarantine.out() == {0} and decided_without(state) == ()


def test_no_lost_rank_comes_back_without_respawn() -> None:
    state = started(3, respawn=False)
    state.apply(loss(1))
    assert decided_without(state) == ()


def test_where_more_nodes_may_come_the_ranks_of_a_lost_one_are_waited_for() -> None:
    state = started(2, 2)
    state.quarantine, state.expects_nodes = Quarantine(), True
    state.apply(NodeLost(1, 0, "node unreachable"))
    assert decided_without(state) == (2, 3)


@pytest.mark.parametrize(
    "broken", [Abandoned((2,), "it ended several times before it took part"), NodeLost(1, 0, "node unreachable")]
)
def test_a_wait_for_a_rank_that_was_to_come_back_is_told_when_it_will_not(broken: Abandoned | NodeLost) -> None:
    state = started(2, 1)
    state.quarantine = Quarantine()
    state.apply(loss(2))
    assert decided_without(state) == (2,) and not state.pending().reform
    state.apply(broken)
    assert state.quiet and state.pending().reform, "nobody who does not wait is disturbed"
    state.apply(Requested(Request.REFORM, (0,), state.decided))
    assert not state.quiet and decided_without(state) == () and not state.pending().reform


def test_one_member_is_enough_to_have_all_report_anew() -> None:
    state = started(3)
    state.apply(Requested(Request.REFORM, (1,), 1))
    assert state.frozen == 2 and state.missing() == (0, 1, 2)
    report_all(state)
    state.apply(Decided(2, 0))
    assert state.decision is not None and state.decision.reason == "reform" and len(state.members) == 3


def test_a_checkpoint_is_pending_until_every_member_took_note() -> None:
    state = started(2)
    state.apply(Wanted(SaveCheckpoint()))
    assert state.pending() == Pending(checkpoint=True)
    state.apply(Requested(Request.CHECKPOINT, (0,), 1))
    assert state.pending() == Pending(checkpoint=True)
    state.apply(Requested(Request.CHECKPOINT, (1,), 1))
    assert state.pending() == Pending() and state.quiet


def test_ranks_must_be_numbered_without_holes() -> None:
    with pytest.raises(ValueError, match="once each"):
        Generations({0: Node("h", (0, 2))})
