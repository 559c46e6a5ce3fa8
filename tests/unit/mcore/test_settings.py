"""The engine's settings and the launch's cut follow from Megatron's arguments and Megatron's own partition."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.mcore.args.settings import engine_settings, expert_balance, nominal_topology, sample_grid
from megatron.elastic.plan.model import Grid
from megatron.elastic.state.lion import Lion
from megatron.elastic.state.record import ConstantSchedule, Rate

SCHEDULE = ConstantSchedule((Rate(1e-3, 0.1),))


def always(consumed: int) -> int:
    return 24


def arguments(**more: Any) -> SimpleNamespace:
    """Those of Megatron that the engine reads."""
    known: dict[str, Any] = {
        "global_batch_size": 24,
        "micro_batch_size": 2,
        "data_parallel_size": 3,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "num_layers": 4,
        "world_size": 3,
        "loss_scale": None,
        "fp16": False,
        "clip_grad": 1.0,
        "optimizer": "adam",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-8,
        "sgd_momentum": 0.9,
        "elastic_moments": ("fp32", "bf16"),
        "initial_loss_scale": 2.0**32,
        "min_loss_scale": 1.0,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "seed": 7,
        "calculate_per_token_loss": False,
        "use_tp_pp_dp_mapping": False,
        "num_experts": None,
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "expert_model_parallel_size": 1,
        "log_num_zeros_in_grad": False,
        "check_for_nan_in_loss_and_grad": True,
        "distributed_timeout_minutes": 10,
        "train_iters": 50,
    }
    return SimpleNamespace(**{**known, **more})


@settings(max_examples=60, deadline=None)
@given(
    tensor=st.integers(1, 3),
    stages=st.integers(1, 4),
    chunks=st.sampled_from([None, 2, 3]),
    each=st.integers(1, 3),
    data=st.integers(1, 3),
    more=st.integers(0, 7),
    tied=st.booleans(),
)
def test_the_chunks_of_the_launch_cover_every_unit_once(
    tensor: int, stages: int, chunks: int | None, each: int, data: int, more: int, tied: bool
) -> None:
    assume(chunks is None or stages > 1)
    depth = stages * (chunks or 1)
    layers, world = depth * each, tensor * stages * data
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=12,
        num_attention_heads=6,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_dtype=torch.float32,
    )
    args = arguments(
        num_layers=layers,
        tensor_model_parallel_size=tensor,
        context_parallel_size=1,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        data_parallel_size=data,
        world_size=world,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", 0)
        patch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", 1)
        found = nominal_topology(args, config, tied, slots=world + more, largest=24)
        assert parallel_state.get_pipeline_model_parallel_world_size() == 1, "the stage is set for a moment"
    assert found.chunks[0][0] == 0 and found.chunks[-1][1] == layers + 2
    assert all(end == begin for (_, end), (begin, _) in pairwise(found.chunks))
    assert [end - first for first, end in found.chunks] == [
        each + (number == 0) + (number == depth - 1) for number in range(depth)
    ]
    assert found.tied_unit == (layers + 2 if tied else None)
    assert found.extra == more - more % tensor, "only whole tensor-parallel groups are spares"
    assert (found.tensor, found.pipeline, found.data, found.grid) == (tensor, stages, data, sample_grid(args, 24))


@given(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)), st.booleans())
def test_cells_and_pipelines_are_megatrons_groups(sizes: tuple[int, int, int], replicas_last: bool) -> None:
    tensor, stages, data = sizes
    order = "tp-cp-ep-pp-dp" if replicas_last else "tp-cp-ep-dp-pp"  # those of initialize_megatron
    theirs = parallel_state.RankGenerator(tp=tensor, ep=1, dp=data, pp=stages, cp=1, order=order)
    launch = LaunchTopology(
        tensor, stages, data, tuple((n, n + 1) for n in range(stages)), Grid(data, 1, data), replicas_last=replicas_last
    )
    cells = {cell.ranks for cell in launch.cells}
    assert cells == {tuple(ranks) for ranks in theirs.get_ranks("tp")}
    for kind, held in (("pp", (0, 1)), ("dp", (0, 2))):
        for ranks in theirs.get_ranks(kind):
            places = [place for place in map(launch.place, ranks) if place is not None]
            assert len({tuple(place[n] for n in held) for place in places}) == 1
            assert [place[3 - sum(held)] for place in places] == list(range(len(ranks)))


@pytest.mark.parametrize(
    ("flags", "scaler", "initial", "finite"),
    [
        ({}, "none", 1.0, True),
        ({"fp16": True}, "dynamic", 2.0**32, False),
        ({"fp16": True, "loss_scale": 128.0}, "constant", 128.0, True),
        ({"fp16": True, "loss_scale": 128.0, "check_for_nan_in_loss_and_grad": False}, "constant", 128.0, False),
        ({"check_for_nan_in_loss_and_grad": False}, "none", 1.0, False),
    ],
)
def test_the_loss_scaler_is_the_one_megatron_would_make(
    flags: dict[str, Any], scaler: str, initial: float, finite: bool
) -> None:
    found = engine_settings(arguments(**flags), SCHEDULE, always)
    assert (found.hyper.scaler, found.hyper.initial_loss_scale, found.check_finite) == (scaler, initial, finite)


def test_lion_has_the_coefficients_that_megatron_gives_it() -> None:
    given = arguments(optimizer="lion", adam_beta1=0.8, adam_beta2=0.7, lion_beta1=0.95, lion_beta2=0.98)
    found = engine_settings(given, SCHEDULE, always).hyper
    assert found.optimizer == "adam" and found.matrices == Lion(0.8, 0.7)


def test_minutes_become_seconds_and_an_endless_run_has_no_last_step() -> None:
    found = engine_settings(arguments(train_iters=None), SCHEDULE, always)
    assert (found.communication_timeout, found.steps, found.seed) == (600.0, None, 7)
    assert engine_settings(arguments(), SCHEDULE, always).steps == 50


@pytest.mark.parametrize(
    ("routed", "repeated", "expected"),
    [
        ([1, 1, 0, 1], False, (1, 2, 4, 6, 7)),
        ([1, 1, 0, 1], True, (1, 2, 4, 6)),
        ([1, 1, 1, 0], False, (1, 2, 3)),
    ],
)
def test_layers_of_further_tokens_have_a_bias_like_the_last_layer(
    routed: list[int], repeated: bool, expected: tuple[int, ...]
) -> None:
    """Behind four layers and the head, at 5; two of them, or one that predicts both tokens."""
    args = arguments(moe_router_enable_expert_bias=True, num_experts=8, moe_router_bias_update_rate=1e-3)
    config = SimpleNamespace(
        num_layers=4, num_moe_experts=8, moe_layer_freq=routed, mtp_num_layers=2, mtp_use_repeated_layer=repeated
    )
    balance = expert_balance(args, config)
    assert balance is not None and balance.units == expected and balance.rate == 1e-3


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, False),
        ({"moe_aux_loss_coeff": 0.01}, False),
        ({"num_experts": 4}, False),
        ({"num_experts": 4, "moe_aux_loss_coeff": 0.01}, True),
        ({"num_experts": 4, "moe_z_loss_coeff": 1e-3}, True),
        ({"mtp_num_layers": 1}, True),
    ],
)
def test_layers_that_add_losses_are_known(flags: dict[str, Any], expected: bool) -> None:
    assert engine_settings(arguments(**flags), SCHEDULE, always).layer_losses == expected
