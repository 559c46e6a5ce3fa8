"""The size of a step is the one that Megatron's loop takes, whatever step is asked for and in which order."""

from __future__ import annotations

import types
import zipfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import num_microbatches_calculator as megatrons

from megatron.elastic.mcore.args.batch_sizes import BatchSizes
from megatron.elastic.mcore.patching.contract import fetch

NEWER = "0.19.2"
"""A release with ``--step-batch-size-schedule``."""


def loop_of(calculator: Any, steps: int) -> list[tuple[int, int]]:
    """(consumed samples, size) of each step, as Megatron's loop updates its calculator."""
    consumed, found = 0, []
    for _ in range(steps):
        calculator.update(consumed, True)
        size = calculator.get() * calculator.micro_batch_size * calculator.data_parallel_size
        found.append((consumed, size))
        consumed += size
    return found


@given(start=st.integers(1, 4), increments=st.integers(1, 5), samples=st.integers(1, 200), rounded=st.booleans())
def test_a_ramp_up_is_megatrons(start: int, increments: int, samples: int, rounded: bool) -> None:
    replicas, final = 5 if rounded else 3, 12 * (start + increments)  # 5 replicas of 2 do not divide the sizes
    make = megatrons.RampupBatchsizeNumMicroBatchesCalculator
    calculator = make(final, 2, replicas, rounded, 1, 12 * start, 12, samples)
    sizes = BatchSizes(calculator)
    for consumed, size in reversed(loop_of(calculator, 12)):
        assert sizes(consumed) == size, "asked in another order"
    assert sizes.largest == final - final % (2 * replicas)


def test_a_question_does_not_move_the_calculator_of_the_process() -> None:
    megatrons.init_num_microbatches_calculator(0, [4, 4, 24], 16, 2, 2)
    try:
        sizes = BatchSizes()
        assert [sizes(consumed) for consumed in (0, 8, 16, 28, 10_000)] == [4, 8, 12, 16, 16]
        assert megatrons.get_current_global_batch_size() == 4
    finally:
        megatrons.destroy_num_microbatches_calculator()


def test_a_constant_batch_has_one_size() -> None:
    sizes = BatchSizes(megatrons.ConstantNumMicroBatchesCalculator(16, 2, 2, False, 0))
    assert (sizes(0), sizes(10_000), sizes.largest) == (16, 16, 16)


def test_a_schedule_of_a_newer_release_need_not_grow() -> None:
    """Megatron's own calculator, from the release's wheel."""
    try:
        source = zipfile.ZipFile(fetch(NEWER)).read("megatron/core/num_microbatches_calculator.py").decode()
    except OSError as error:
        pytest.skip(f"the release cannot be downloaded here: {error}")
    module = types.ModuleType("newer_calculator")
    exec(compile(source, "num_microbatches_calculator.py", "exec"), vars(module))
    sizes = BatchSizes(module.StepBatchsizeNumMicroBatchesCalculator(2, 2, False, 0, "0:8 100:32 300:16"))
    assert [sizes(consumed) for consumed in (0, 99, 100, 300)] == [8, 8, 32, 16]
    assert sizes.largest == 32
