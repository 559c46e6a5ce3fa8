"""The scalars of a run are those of its parameter group."""

from __future__ import annotations

from megatron.elastic.state.adam import AdamScalars
from megatron.elastic.state.layout import Run
from megatron.elastic.state.record import ConstantSchedule, Hyper, Rate, StepRecord
from megatron.elastic.state.step_scalars import StepScalars

RATES = (Rate(1e-2, 0.1), Rate(1e-3, 0.0))


def scalars(hyper: Hyper, group: int) -> AdamScalars:
    found = StepScalars(StepRecord(1, rates=RATES), hyper).of(Run(0, 8, wd_mult=1.0, lr_mult=1.0, group=group))
    assert isinstance(found, AdamScalars)
    return found


def test_each_group_has_its_rate_and_its_epsilon() -> None:
    hyper = Hyper(ConstantSchedule(RATES), eps=1.0, eps_by_group=(1e-4, 1e-5))
    for group, eps in enumerate(hyper.eps_by_group):
        found = scalars(hyper, group)
        assert (found.lr, found.eps) == (RATES[group].lr, eps)
        assert scalars(Hyper(ConstantSchedule(RATES), eps=1.0), group).eps == 1.0
