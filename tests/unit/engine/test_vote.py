"""The vote's vector: what ranks add is what everybody reads, whoever added it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.source import StepAddress
from megatron.elastic.engine.vote import Tally, VoteLayout, check_ledger, ledger_digest, plan_digest

BLOCKS = tuple((unit, shard, index) for unit in range(3) for shard in range(2) for index in range(2))
LAYOUT = VoteLayout(BLOCKS, ("aux loss", "lm loss"))


@given(st.lists(st.integers(0, len(BLOCKS) - 1), unique=True), st.integers(0, 1 << 20), st.floats(0, 1e6))
def test_a_tally_survives_the_vector(owned: list[int], samples: int, loss: float) -> None:
    tally = Tally(
        norms={BLOCKS[i]: float(i) + 0.5 for i in owned}, tokens=12.0, overflows=1, zeros=3, samples=samples,
        ledger=samples * 7, plan=5, joins=1, drains=0, report={"lm loss": (loss, 4.0)},
    )  # fmt: skip
    back = LAYOUT.unpack(LAYOUT.pack(tally))
    assert {key: norm for key, norm in back.norms.items() if norm} == tally.norms
    assert (back.tokens, back.overflows, back.zeros, back.samples, back.ledger, back.plan, back.joins, back.drains) == (
        12.0, 1, 3, samples, samples * 7, 5, 1, 0,
    )  # fmt: skip
    assert back.report["lm loss"] == (loss, 4.0)


@given(st.permutations(range(16)), st.integers(1, 15))
def test_the_sum_does_not_depend_on_who_computed_which_sample(order: list[int], cut: int) -> None:
    halves = [Tally(samples=len(part), ledger=ledger_digest(part)) for part in (order[:cut], order[cut:])]
    total = LAYOUT.unpack(LAYOUT.pack(halves[0]) + LAYOUT.pack(halves[1]))
    check_ledger(total, StepAddress(0, 16), step=1)


@pytest.mark.parametrize("computed", [[*range(15)], [*range(16), 3], [*range(15), 3]])
def test_a_missing_or_doubled_sample_stops_the_step(computed: list[int]) -> None:
    total = Tally(samples=len(computed), ledger=ledger_digest(computed))
    with pytest.raises(RuntimeError, match="exactly once"):
        check_ledger(total, StepAddress(0, 16), step=1)


def test_an_unannounced_report_key_is_an_error_not_a_silent_loss() -> None:
    with pytest.raises(KeyError):
        LAYOUT.pack(Tally(report={"moe loss": (1.0, 1.0)}))


@given(st.text("0123456789abcdef", min_size=64, max_size=64), st.integers(1, 1 << 12))
def test_plan_digests_stay_exact_when_summed(plan: str, voters: int) -> None:
    assert int(float(plan_digest(plan, plan[::-1]) * voters)) == plan_digest(plan, plan[::-1]) * voters


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
    votes = [
        Tally(times={ranges[cell]: times[cell]}, clocks={cell: (1, 1, khz, khz)}, steady=1) for cell in range(4)
    ]
    packed = [layout.pack(vote) for vote in (*votes, Tally(clocks={3: (1, 1, khz, khz)}))]
    total = layout.unpack(torch.stack(packed).sum(0))
    assert total.times == dict(zip(ranges, times, strict=True))
    assert total.clocks == {**dict.fromkeys(range(3), (1, 1, khz, khz)), 3: (2, 2, 2 * khz, 2 * khz)}
    assert (total.voters, total.steady) == (5, 4)
