"""A newcomer's loop begins with the members' newest step; its arguments then equal theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    get_num_microbatches,
    init_num_microbatches_calculator,
)
from megatron.training import global_vars

from megatron.elastic.mcore.loop.counters import Counters


def arguments(iteration: int, operations: float) -> SimpleNamespace:
    """Arguments at the start of a job that resumes from ``iteration``."""
    return SimpleNamespace(
        iteration=iteration,
        num_floating_point_operations_so_far=operations,
        curr_iteration=None,
        consumed_train_samples=8 * iteration,
        skipped_train_samples=0,
        consumed_valid_samples=0,
        do_train=True,
        do_valid=False,
        do_test=False,
    )


class Loop:
    """The counters of Megatron's ``train``: some in arguments, some read once into variables."""

    def __init__(self, args: SimpleNamespace, counters: Counters) -> None:
        self.args, self.counters = args, counters
        self.iteration: int = args.iteration
        self.operations: float = args.num_floating_point_operations_so_far

    def begin_step(self) -> None:
        self.args.curr_iteration = self.iteration
        self.counters.step()

    def end_step(self) -> None:
        self.iteration += 1
        self.operations += 1e15
        self.args.consumed_train_samples += 8
        self.counters.boundary(self.operations)


@pytest.fixture(autouse=True, scope="module")
def batches_that_grow() -> Iterator[None]:
    """From 8 samples to 16 within the first 32."""
    init_num_microbatches_calculator(1, [8, 8, 32], 16, 4, 2)
    yield
    destroy_num_microbatches_calculator()


@given(resumed=st.integers(0, 1000), steps=st.integers(0, 5), own=st.integers(0, 1000), more=st.integers(1, 4))
def test_a_newcomer_counts_on_where_the_members_are(resumed: int, steps: int, own: int, more: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        member, newcomer = arguments(resumed, 5.0), arguments(own, 0.0)
        patch.setattr(global_vars, "_GLOBAL_ARGS", member)
        counters = Counters()
        counters.begin()
        loop = Loop(member, counters)
        for _ in range(steps):
            loop.begin_step()
            loop.end_step()
        loop.begin_step()
        told = json.loads(json.dumps(counters.for_newcomer()))

        patch.setattr(global_vars, "_GLOBAL_ARGS", newcomer)
        joined = Counters()
        joined.take(told)
        assert get_num_microbatches() == 1 + (newcomer.consumed_train_samples >= 32), (
            "its loop saves where this changes"
        )
        assert joined.for_newcomer() == told, "another newcomer may be told by this one"
        late = Loop(newcomer, joined)
        assert (late.iteration, late.operations) == (loop.iteration, loop.operations)
        for step in range(more):
            for each, args in ((loop, member), (late, newcomer)):
                patch.setattr(global_vars, "_GLOBAL_ARGS", args)
                if step or each is late:  # the member has begun the step in which it tells the newcomer
                    each.begin_step()
                each.end_step()
        assert vars(newcomer) == vars(member), "checkpoints contain the arguments"
        assert joined.for_newcomer() == counters.for_newcomer()
        assert newcomer.iteration == resumed, "the arguments keep the job's start"
