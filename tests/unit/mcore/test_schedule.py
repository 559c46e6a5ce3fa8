"""Learning rates and weight decay are Megatron's, and a rank that joins has those of the members."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.optimizer.optimizer_config import AdamOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.elastic.mcore.model.optimizer import EngineOptimizer, MegatronSchedule
from megatron.elastic.mcore.model.param_groups import GroupKeys, adopt, settings_of


def made(peak: float, style: str, warm_up: int, decay: int, decay_style: str = "linear") -> MegatronSchedule:
    """As a rank makes it of its arguments."""
    config = AdamOptimizerConfig(lr=peak, min_lr=peak / 10, decoupled_lr=peak / 3)
    optimizer: Any = EngineOptimizer(GroupKeys(config, None), lambda: 1.0)
    return MegatronSchedule(
        OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=peak,
            min_lr=peak / 10,
            lr_warmup_steps=warm_up,
            lr_decay_steps=decay,
            lr_decay_style=style,
            start_wd=0.01,
            end_wd=0.1,
            wd_incr_steps=decay,
            wd_incr_style=decay_style,
            wsd_decay_steps=decay // 2,
            lr_wsd_decay_style="minus_sqrt",
        )
    )


SCHEDULES = st.builds(
    made,
    st.floats(1e-5, 1.0),
    st.sampled_from(["cosine", "linear", "inverse-square-root", "WSD", "constant"]),
    st.integers(0, 50),
    st.integers(51, 400),
    st.sampled_from(["linear", "cosine"]),
)


@settings(max_examples=50, deadline=None)
@given(SCHEDULES, SCHEDULES, st.integers(0, 500), st.integers(0, 500))
def test_whatever_its_arguments_a_newcomer_goes_on_with_the_schedule_it_is_told(
    members: MegatronSchedule, newcomer: MegatronSchedule, at: int, later: int
) -> None:
    adopt(members._groups, [{"max_lr": 0.5, "min_lr": 0.25}] * len(members._groups))  # as of a checkpoint
    newcomer.take(json.loads(json.dumps(members.for_newcomer())), at)
    assert newcomer.rates(later) == members.rates(later)
    assert [settings_of(group) for group in newcomer._groups] == [settings_of(group) for group in members._groups]
    assert [group["lr"] for group in newcomer._groups] == [rate.lr for rate in members.rates(at)], "what is printed"
