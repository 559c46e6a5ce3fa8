"""The measured load of experts: a mean over the last steps, the same on every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.elastic.state.expert_bias import ExpertBalance
from megatron.elastic.state.expert_layers import ExpertLayers
from megatron.elastic.state.expert_load import SPAN, ExpertLoad
from megatron.elastic.state.record import ConstantSchedule, GradientKey, Hyper, Rate, StepRecord, Vote, advance

UNITS, EXPERTS = (1, 4), 3
LOAD = ExpertLoad(UNITS, EXPERTS)
COUNTS = st.lists(st.integers(0, 1 << 20), min_size=EXPERTS, max_size=EXPERTS)
TOKENS = st.fixed_dictionaries(dict.fromkeys(UNITS, COUNTS))


@given(st.lists(TOKENS, min_size=1, max_size=40))
def test_a_mean_is_between_the_least_and_the_most_of_the_steps(steps: list[dict[int, list[int]]]) -> None:
    text = ""
    for counts in steps:
        text = LOAD.advanced(text, counts)
    for unit, found in LOAD.tokens(text).items():
        for expert, tokens in enumerate(found):
            seen = [counts[unit][expert] for counts in steps]
            assert min(seen) <= tokens <= max(seen)


def test_a_lasting_change_of_the_load_is_known_after_a_few_spans() -> None:
    text = LOAD.advanced("", dict.fromkeys(UNITS, (300, 0, 0)))
    assert LOAD.tokens(text) == dict.fromkeys(UNITS, (300, 0, 0)), "the first step counts as it is"
    for _ in range(3 * SPAN):
        text = LOAD.advanced(text, dict.fromkeys(UNITS, (0, 0, 300)))
    first, middle, last = LOAD.tokens(text)[UNITS[0]]
    assert first < 20 and middle == 0 and last > 280


def test_a_record_carries_the_load_and_only_a_step_left_out_keeps_it() -> None:
    hyper = Hyper(ConstantSchedule(()), scaler="constant", load=LOAD)
    counts = dict.fromkeys(UNITS, (9, 1, 2))

    def after(record: StepRecord, left_out: bool = False, found_nonfinite: bool = False) -> StepRecord:
        gradient, rates = GradientKey(record.version, 0), (Rate(1.0, 0.0),)
        vote = Vote(gradient, {}, found_nonfinite, 1.0, 1.0, 4, rates=rates, left_out=left_out, expert_tokens=counts)
        return advance(record, vote, hyper)

    first = StepRecord.initial(hyper)
    assert first.expert_load == "" and LOAD.tokens("") == {}
    one = after(first)
    assert LOAD.tokens(one.expert_load) == counts
    assert after(one, left_out=True).expert_load == one.expert_load
    assert LOAD.tokens(after(first, found_nonfinite=True).expert_load) == counts, "its tokens were routed"
    assert StepRecord.from_json(one.to_json()) == one


def test_the_vote_counts_the_layers_that_either_needs() -> None:
    balance, hyper = ExpertBalance(UNITS, EXPERTS, 1e-3), Hyper(ConstantSchedule(()))
    assert hyper.counted is None
    assert replace(hyper, load=LOAD).counted == LOAD
    assert replace(hyper, load=LOAD, balance=balance).counted == balance


@given(st.fixed_dictionaries(dict.fromkeys(UNITS, st.tuples(*[st.floats(width=32, allow_nan=False)] * EXPERTS))))
def test_numbers_survive_as_text(numbers: dict[int, tuple[float, ...]]) -> None:
    layers = ExpertLayers(UNITS, EXPERTS)
    assert layers.size == len(UNITS) * EXPERTS
    assert layers.by_unit(layers.text(numbers)) == numbers


def test_a_layer_without_counts_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"layers \[1, 4\] have 3 experts each"):
        LOAD.advanced("", {1: (1, 2, 3)})
