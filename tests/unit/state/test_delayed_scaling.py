"""Scales that follow past steps: those of Transformer Engine from the same largest values, and the same on every rank.

Transformer Engine's own functions run here, taken from its wheel: they are plain torch.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.state.delayed_scaling import DelayedScaling, TensorScale
from megatron.elastic.state.record import ConstantSchedule, GradientKey, Hyper, Rate, StepRecord, Vote, advance
from tests.wheels import newest

UNITS, LARGEST = (1, 2, 5), (448.0, 448.0, 57344.0)
AMAX = st.one_of(
    st.floats(0.0, 2.0**127, width=32),
    st.sampled_from([0.0, math.inf, 1e-40, 2.0**-126]),
    st.floats(0.5, 2.0, width=32),
)
STEPS = st.lists(st.tuples(*[AMAX] * len(LARGEST)), min_size=1, max_size=24)


@cache
def vendor() -> Callable[..., None]:
    """``_amax_and_scale_update`` of Transformer Engine, with the functions that it calls."""
    with newest("transformer-engine") as archive:
        source = ast.parse(archive.read("transformer_engine/pytorch/quantization.py"))
    names = (
        *("_update_amax_history", "_default_get_amax_and_update_history", "_default_sf_compute"),
        *("_compute_amax_and_update_history", "_compute_scaling_factor", "_amax_and_scale_update"),
    )
    functions = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.name in names]
    for function in functions:
        function.decorator_list = []  # fused for a GPU
    future = ast.parse("from __future__ import annotations").body
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([*future, *functions], []), "quantization.py", "exec"), scope)
    found: Callable[..., None] = scope["_amax_and_scale_update"]
    return found


class Recipe:
    """The fields of Transformer Engine's ``DelayedScaling`` that its functions read."""

    scaling_factor_compute_algo = None

    def __init__(self, algorithm: str, margin: int) -> None:
        self.amax_compute_algo, self.margin = algorithm, margin


def vendors(steps: Sequence[Sequence[float]], length: int, algorithm: str, margin: int) -> tuple[list[float], Any]:
    """Scales and history after ``steps`` of one micro-batch each."""
    scales, histories = [], []
    for number, largest in enumerate(LARGEST):
        scale, history = torch.ones(1), torch.zeros(length, 1)
        for amaxes in steps:
            history[0] = amaxes[number]
            vendor()(history, scale, largest, Recipe(algorithm, margin))
        scales.append(float(scale))
        histories.append(history)
    return scales, torch.cat(histories, 1)


def ours(scaling: DelayedScaling, steps: Sequence[Sequence[float]], text: str | None = None) -> str:
    text = scaling.start if text is None else text
    for amaxes in steps:
        text = scaling.advanced(text, dict.fromkeys(UNITS, amaxes))
    return text


@given(STEPS, st.sampled_from([1, 2, 3, 8]), st.sampled_from(["max", "most_recent"]), st.sampled_from([0, 2]))
def test_scales_are_those_of_transformer_engine(
    steps: list[tuple[float, ...]], length: int, algorithm: str, margin: int
) -> None:
    """With one micro-batch a step. Its kernel rounds a scale once, as ours; this function of it twice."""
    scaling = DelayedScaling(UNITS, LARGEST, length if algorithm == "max" else 1, margin)
    text = ours(scaling, steps)
    expected, _ = vendors(steps, length, algorithm, margin)
    assert scaling.scales(text)[UNITS[-1]] == pytest.approx(expected, rel=2.0**-22)
    assert len(set(scaling.scales(text).values())) == 1
    assert scaling.text(scaling.tensors(text)) == text
    assert {unit: tuple(one.scale for one in found) for unit, found in scaling.tensors(text).items()} == scaling.scales(
        text
    )


@given(STEPS, STEPS, st.sampled_from([1, 2, 5]))
def test_a_history_goes_on_as_if_it_had_been_kept(
    before: list[tuple[float, ...]], after: list[tuple[float, ...]], length: int
) -> None:
    """That of Transformer Engine's checkpoint, newest value in its last row, and ours in its place."""
    scaling = DelayedScaling(UNITS, LARGEST, length)
    scales, history = vendors(before, length, "max", 0)
    tensors = [
        TensorScale.of(scale, history[1:, number].flip(0).tolist(), length) for number, scale in enumerate(scales)
    ]
    kept = scaling.tensors(ours(scaling, before))[UNITS[0]]
    assert [tensor.past for tensor in tensors] == [tensor.past for tensor in kept]
    text = scaling.text(dict.fromkeys(UNITS, kept))
    assert ours(scaling, after, text) == ours(scaling, [*before, *after])


@given(STEPS)
def test_few_values_are_kept(steps: list[tuple[float, ...]]) -> None:
    """Each falls below the one before it, and is of the window."""
    scaling = DelayedScaling(UNITS, LARGEST, 6)
    for tensor in scaling.tensors(ours(scaling, steps))[UNITS[0]]:
        values, ages = [value for _, value in tensor.past], [age for age, _ in tensor.past]
        assert values == sorted(set(values), reverse=True) and ages == sorted(set(ages), reverse=True)
        assert max(ages, default=0) < 5 and all(value > 0.0 for value in values)


def test_nan_counts_as_infinity() -> None:
    """Both leave the scale as it is."""
    tensor = TensorScale(2.0).updated(math.nan, window=3, margin=0, largest=448.0)
    assert tensor == TensorScale(2.0).updated(math.inf, window=3, margin=0, largest=448.0)
    assert tensor.scale == 2.0 and tensor.updated(1.0, 3, 0, 448.0).scale == 2.0


def test_units_with_another_number_of_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"units \[1, 2, 5\] have 3 tensors each: 8 are given"):
        DelayedScaling(UNITS, LARGEST).text({2: (TensorScale(),) * 2})


@settings(max_examples=20)
@given(STEPS)
def test_a_record_carries_the_scales_and_only_a_step_left_out_keeps_them(steps: list[tuple[float, ...]]) -> None:
    scaling = DelayedScaling(UNITS, LARGEST, 3)
    hyper = Hyper(ConstantSchedule(()), scaler="constant", scaling=scaling)
    record = StepRecord.initial(hyper)
    for number, amaxes in enumerate(steps):
        for left_out, not_finite in ((True, False), (False, number % 2 == 0)):
            vote = Vote(
                GradientKey(record.version, 0), {}, not_finite, 1.0, 1.0, 4,
                rates=(Rate(1.0, 0.0),), left_out=left_out, amaxes=dict.fromkeys(UNITS, amaxes),
            )  # fmt: skip
            before, record = record, advance(record, vote, hyper)
            assert record.skipped == (left_out or not_finite)
            assert (record.fp8_scales == before.fp8_scales) or not left_out
    assert record.fp8_scales == ours(scaling, steps)
    assert StepRecord.from_json(record.to_json()) == record
