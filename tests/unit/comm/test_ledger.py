"""The ledgers of a communicator's members add up to zero if, and only if, all have begun the same operations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.comm.vendor.ledger import Ledger, balanced

MEMBERS = (2, 3, 5, 7)
WAYS = st.tuples(st.sampled_from(MEMBERS), st.sampled_from(MEMBERS)).filter(lambda way: way[0] != way[1])
OPERATIONS = st.lists(st.one_of(st.none(), WAYS), max_size=30)
"""Collectives (None) and messages (from, to), in the order in which they were begun."""


def parts(operations: list[tuple[int, int] | None]) -> list[tuple[int, int | None, tuple[int, int] | None]]:
    """Return each operation's parts: (member, its peer or None, the operation)."""
    return [
        (member, None if one is None else one[1 - one.index(member)], one)
        for one in operations
        for member in (MEMBERS if one is None else one)
    ]


def begun(done: list[tuple[int, int | None, tuple[int, int] | None]]) -> bool:
    ledgers = {member: Ledger(member) for member in MEMBERS}
    for member, peer, one in done:
        if one is None or peer is None:
            ledgers[member].collective(MEMBERS)
        elif one[0] == member:
            ledgers[member].sent(peer)
        else:
            ledgers[member].received(peer)
    return balanced(ledger.to_bytes() for ledger in ledgers.values())


@given(OPERATIONS, st.randoms())
def test_what_all_have_begun_balances_in_whatever_order_they_came_to_it(
    operations: list[tuple[int, int] | None], order: object
) -> None:
    done = parts(operations)
    order.shuffle(done)  # type: ignore[attr-defined]
    assert begun(done)


@given(OPERATIONS.filter(bool), st.data())
def test_one_part_that_was_not_begun_is_noticed(operations: list[tuple[int, int] | None], data: st.DataObject) -> None:
    done = parts(operations)
    done.pop(data.draw(st.integers(0, len(done) - 1)))
    assert not begun(done)


@given(OPERATIONS.filter(bool), st.integers(1, len(MEMBERS) - 1))
def test_an_interruption_between_the_members_is_noticed(operations: list[tuple[int, int] | None], first: int) -> None:
    """The first of them have begun one operation more."""
    last = parts([None])[:first]
    assert not begun([*parts(operations), *last])
