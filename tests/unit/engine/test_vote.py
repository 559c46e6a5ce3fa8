"""The vote's values and counts: every rank reads the sums of what all ranks added."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.control.requests import OpenReshape, Pending
from megatron.elastic.engine.compute.ledger import Ledger
from megatron.elastic.engine.compute.vote import Tally, VoteLayout, agreed_by, mean_of, wishes
from megatron.elastic.state.record import Agreed, Rate, StepRecord

BLOCKS = tuple((unit, shard, index) for unit in range(3) for shard in range(2) for index in range(2))
LAYOUT = VoteLayout(BLOCKS, ("aux loss", "lm loss"))


Packed = tuple[list[float], list[int]]


def summed(votes: Sequence[Packed]) -> Packed:
    """Return the sums, of values in fp64 and in this order, as the all-reduce makes them."""
    values, counts = ([sum(each) for each in zip(*part, strict=True)] for part in zip(*votes, strict=True))
    return values, counts


@given(st.lists(st.integers(0, len(BLOCKS) - 1), unique=True), st.integers(0, 1 << 20), st.floats(0, 1e6))
def test_a_tally_survives_the_vector(owned: list[int], samples: int, loss: float) -> None:
    ledger = Ledger(samples, samples << 43, samples << 60, 3, 5 << 61, 2.5)
    tally = Tally(
        norms={BLOCKS[i]: float(i) + 0.5 for i in owned},
        tokens=12.0,
        overflows=1,
        zeros=3,
        ledger=ledger,
        plan=5,
        joins=1,
        drains=0,
        leaves=1 << 63,
        report={"lm loss": (loss, 4.0)},
    )
    back = LAYOUT.unpack(*LAYOUT.pack(tally))
    squares = dict(zip(BLOCKS, back.squares, strict=True))
    assert {key: square for key, square in squares.items() if square} == tally.norms
    assert (back.tokens, back.overflows, back.zeros, back.plan, back.joins, back.drains, back.leaves) == (
        12.0,
        1,
        3,
        5,
        1,
        0,
        1 << 63,
    )
    assert back.ledger == ledger
    assert back.report["lm loss"] == (loss, 4.0)


def test_a_report_key_that_appears_later_is_counted_and_costs_the_vote_nothing_else():
    votes = [Tally(report={"moe loss": (1.0, 1.0)}), Tally(report={"lm loss": (2.0, 1.0)})]
    total = LAYOUT.unpack(*summed([LAYOUT.pack(vote) for vote in votes]))
    assert (total.unannounced, total.voters) == (1, 2)
    assert total.report["lm loss"] == (2.0, 1.0)


@given(st.lists(st.builds(Rate, st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=5), st.integers(1, 50))
def test_rates_are_to_the_bit_those_of_the_one_rank_that_tells_them(rates: list[Rate], others: int) -> None:
    layout = VoteLayout(LAYOUT.blocks, ("lm loss",), ((0, 0, 3),), (0, 1), groups=len(rates))
    votes = [Tally(rates=tuple(rates)), *(Tally(clocks={1: (1, 1, 5, 5)}) for _ in range(others))]
    total = layout.unpack(*summed([layout.pack(vote) for vote in votes]))
    assert total.rates == tuple(rates) and total.clocks[1] == (others, others, 5 * others, 5 * others)


@given(
    st.lists(st.tuples(st.integers(0, 1 << 50), st.integers(0, 1 << 50)), min_size=4, max_size=4),
    st.integers(1, 3_000_000),
)
def test_measured_times_and_clocks_arrive_on_every_rank_to_the_nanosecond(
    times: list[tuple[int, int]], khz: int
) -> None:
    """Each cell speaks for itself; a cell's ranks add up their devices."""
    ranges = ((0, 0, 3), (1, 3, 6), (2, 0, 3), (3, 3, 6))
    layout = VoteLayout(LAYOUT.blocks, ("lm loss",), ranges, (0, 1, 2, 3))
    votes = [Tally(times={ranges[cell]: times[cell]}, clocks={cell: (1, 1, khz, khz)}, steady=1) for cell in range(4)]
    packed = [layout.pack(vote) for vote in (*votes, Tally(clocks={3: (1, 1, khz, khz)}))]
    total = layout.unpack(*summed(packed))
    assert total.times == dict(zip(ranges, times, strict=True))
    assert total.clocks == {**dict.fromkeys(range(3), (1, 1, khz, khz)), 3: (2, 2, 2 * khz, 2 * khz)}
    assert (total.voters, total.steady) == (5, 4)


REQUESTS = st.builds(
    Pending,
    join=st.booleans(),
    drain=st.booleans(),
    leave=st.sampled_from([(), (3,), (1, 3), (13,)]),
    reshape=st.sampled_from(
        [None, OpenReshape(1, 2, 2, 1), OpenReshape(2, 2, 2, 1), OpenReshape(1, 2, 2, 1, hopeless=True)]
    ),
)


@given(st.lists(st.tuples(REQUESTS, st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_a_request_is_agreed_when_every_voter_knows_it_and_a_save_when_one_needs_it(
    voters: list[tuple[Pending, bool, bool]],
) -> None:
    """Ranks learn of requests at different instants; what they agree on is the same on all."""
    tallies = []
    for requests, save, written in voters:
        tally = Tally(saves=save, written=written)
        wishes(tally, requests)
        tallies.append(LAYOUT.pack(tally))
    total = LAYOUT.unpack(*summed(tallies))
    known = [requests for requests, _, _ in voters]
    numbers = [(one.reshape and (one.reshape.number, *one.reshape.sizes)) or () for one in known]
    asked = set(numbers)
    expected = Agreed(
        join=all(requests.join for requests in known),
        drain=all(requests.drain for requests in known),
        save=any(save for _, save, _ in voters),
        written=all(written for _, _, written in voters),
        leave=known[0].leave if len({requests.leave for requests in known}) == 1 else (),
        reshape=asked.pop() if len(asked) == 1 else (),
    )
    assert [agreed_by(total, requests) for requests in known] == [expected] * len(voters)
    record = StepRecord(1, agreed=expected)
    assert StepRecord.from_json(record.to_json()).agreed == expected
    assert (record == StepRecord(1)) == (expected == Agreed()), "a rank that missed the vote learns it from the record"


def test_what_has_no_slot_is_refused() -> None:
    with pytest.raises(KeyError, match=r"norms of blocks without a slot: \[\(9, 0, 0\)\]"):
        LAYOUT.pack(Tally(norms={(9, 0, 0): 1.0}))
    with pytest.raises(ValueError, match=r"of 22 values does not fit into 20 slots"):
        LAYOUT.pack(Tally(rates=(Rate(1.0, 0.0),)))


def test_a_name_that_is_not_reported_has_no_mean_and_a_loss_of_no_tokens_is_nan():
    """Only an evaluation may report a name; all tokens of a batch may be masked."""
    layout = VoteLayout((), ("accuracy", "lm loss"))
    total = layout.unpack(*layout.pack(Tally(report={"lm loss": (0.0, 0.0)})))
    assert total.report == {"lm loss": (0.0, 0.0)}
    assert math.isnan(mean_of(*total.report["lm loss"])) and mean_of(3.0, 2.0) == 1.5
