"""The bias of routers: Megatron's bits from the same counts, and the same on every rank."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.engine.compute.vote import Tally, VoteLayout
from megatron.elastic.state.expert_bias import ExpertBalance
from megatron.elastic.state.record import ConstantSchedule, GradientKey, Hyper, Rate, StepRecord, Vote, advance

UNITS, EXPERTS = (2, 3, 5), 4
COUNTS = st.lists(st.integers(0, 1 << 20), min_size=EXPERTS, max_size=EXPERTS)
TOKENS = st.fixed_dictionaries(dict.fromkeys(UNITS, COUNTS))


@given(st.lists(TOKENS, min_size=1, max_size=6), st.floats(1e-6, 1.0))
def test_each_step_gives_the_bits_of_an_update_in_fp32(steps: list[dict[int, list[int]]], rate: float) -> None:
    """The update is that of ``get_updated_expert_bias``, with counts that fp32 holds exactly."""
    balance = ExpertBalance(UNITS, EXPERTS, rate)
    text, bias = balance.start, torch.zeros(len(UNITS), EXPERTS)
    for counts in steps:
        text = balance.advanced(text, counts)
        tokens = torch.tensor([counts[unit] for unit in UNITS], dtype=torch.float64)
        offset = tokens.sum(dim=-1, keepdim=True) / EXPERTS - tokens
        bias = bias + torch.sign(offset).float() * rate
    assert list(balance.by_unit(text).values()) == [tuple(row) for row in bias.tolist()]
    assert balance.text(balance.by_unit(text)) == text


@given(st.lists(TOKENS, min_size=1, max_size=5))
def test_counts_of_all_ranks_add_up_in_the_vote(ranks: list[dict[int, list[int]]]) -> None:
    balance = ExpertBalance(UNITS, EXPERTS, 1e-3)
    layout = VoteLayout((), (), groups=1, counted=balance)
    votes = [*(Tally(expert_tokens=mine) for mine in ranks), Tally()]
    values, counts = zip(*map(layout.pack, votes), strict=True)
    total = layout.unpack(*([sum(each) for each in zip(*part, strict=True)] for part in (values, counts)))
    assert total.voters == len(votes)
    assert total.expert_tokens == {
        unit: tuple(sum(mine[unit][expert] for mine in ranks) for expert in range(EXPERTS)) for unit in UNITS
    }


def test_a_record_carries_the_bias_and_only_a_step_left_out_keeps_it() -> None:
    balance = ExpertBalance(UNITS, EXPERTS, 0.5)
    hyper = Hyper(ConstantSchedule(()), scaler="constant", balance=balance)
    first = StepRecord.initial(hyper)
    counts = dict.fromkeys(UNITS, (9, 1, 1, 1))

    def after(found_nonfinite: bool, left_out: bool) -> StepRecord:
        gradient, rates = GradientKey(0, 0), (Rate(1.0, 0.0),)
        vote = Vote(gradient, {}, found_nonfinite, 1.0, 1.0, 4, rates=rates, left_out=left_out, expert_tokens=counts)
        return advance(first, vote, hyper)

    moved = balance.text(dict.fromkeys(UNITS, (-0.5, 0.5, 0.5, 0.5)))
    assert (after(False, False).expert_bias, after(True, False).expert_bias) == (moved, moved)
    assert after(False, True).expert_bias == first.expert_bias
    assert StepRecord.from_json(after(False, False).to_json()) == after(False, False)
