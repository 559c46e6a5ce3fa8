"""The translation of Megatron's arguments into the engine's settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron.elastic.config import ConfigError
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.settings import Settings
from megatron.elastic.mcore.args.muon import muon_of
from megatron.elastic.mcore.args.optimizers import OF_MATRICES, lion_of
from megatron.elastic.mcore.model.layer_specs import routed_layers
from megatron.elastic.mcore.model.prediction import further_units, predicts
from megatron.elastic.mcore.parallel_state.stage import as_stage
from megatron.elastic.plan.model import Grid
from megatron.elastic.state.delayed_scaling import DelayedScaling
from megatron.elastic.state.expert_bias import ExpertBalance
from megatron.elastic.state.expert_load import ExpertLoad
from megatron.elastic.state.record import Hyper, Schedule

__all__ = ["engine_settings", "expert_balance", "expert_load", "nominal_topology", "sample_grid"]


def sample_grid(args: Any, largest: int) -> Grid:
    """Return the launch's grid of a training step of ``largest`` samples; batches may begin smaller."""
    return Grid(largest, args.micro_batch_size, args.data_parallel_size)


def nominal_topology(args: Any, config: Any, tied: bool, slots: int, largest: int, replicas: int = 0) -> LaunchTopology:
    """Return sizes and cuts at launch, for every model chunk, from arguments alone (no communication).

    ``slots``: number of possible ranks, including those of the launch. ``largest``: most samples of a step.
    ``replicas``: experts that a rank may have beyond its share. Raises :class:`ConfigError` for an empty chunk.
    """
    stages, depth = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    last = stages * (depth or 1) - 1
    chunks = []
    for number in range(last + 1):
        stage, chunk = number % stages, None if depth is None else number // stages
        # A pipeline layout makes Megatron ignore the pp_rank argument, so the stage is set globally too.
        with as_stage(stage, stages, depth):
            first = get_transformer_layer_offset(config, chunk, pp_rank=stage)
            count = get_num_layers_to_build(config, chunk, pp_rank=stage)
        chunks.append((first + (number > 0), args.num_layers + 2 if number == last else first + count + 1))
    empty = [number for number, (first, end) in enumerate(chunks) if first == end]
    if empty:
        raise ConfigError(f"--pipeline-model-parallel-layout leaves stages {empty} without a layer: give each one")
    cell = args.tensor_model_parallel_size * args.context_parallel_size
    shared = args.expert_model_parallel_size > 1
    return LaunchTopology(
        tensor=args.tensor_model_parallel_size,
        pipeline=stages,
        data=args.data_parallel_size,
        chunks=tuple(chunks),
        grid=sample_grid(args, largest),
        tied_unit=args.num_layers + 2 if tied else None,
        experts=args.num_experts if shared else 0,
        expert_homes=args.expert_model_parallel_size,
        expert_parts=args.expert_tensor_parallel_size if shared else 1,
        expert_replicas=replicas if shared else 0,
        replicas_last=bool(args.use_tp_pp_dp_mapping),
        extra=(slots - args.world_size) // cell * cell,
        context=args.context_parallel_size,
    )


def expert_balance(args: Any, config: Any) -> ExpertBalance | None:
    """Return the layers whose routers have a bias in place of an auxiliary loss."""
    if not args.moe_router_enable_expert_bias:
        return None
    routed = _routed_units(config)
    if routed_layers(config)[-1]:  # layers that predict further tokens are like the last one
        routed += further_units(config)
    return ExpertBalance(routed, int(args.num_experts), float(args.moe_router_bias_update_rate))


def expert_load(args: Any, config: Any) -> ExpertLoad | None:
    """Return the layers whose experts ranks share."""
    if args.expert_model_parallel_size == 1:
        return None
    return ExpertLoad(_routed_units(config), int(args.num_experts))


def _routed_units(config: Any) -> tuple[int, ...]:
    return tuple(layer + 1 for layer, routed in enumerate(routed_layers(config)) if routed)


def engine_settings(
    args: Any,
    schedule: Schedule,
    batch_size: Callable[[int], int],
    balance: ExpertBalance | None = None,
    load: ExpertLoad | None = None,
    scaling: DelayedScaling | None = None,
    eps_by_group: tuple[float, ...] = (),
) -> Settings:
    """Return the numerics of the run. ``batch_size``: consumed samples → samples of the step that follows."""
    scaler: Literal["none", "constant", "dynamic"] = "none"
    if args.loss_scale:
        scaler = "constant"
    elif args.fp16:
        scaler = "dynamic"
    hyper = Hyper(
        schedule=schedule,
        clip_grad=float(args.clip_grad),
        optimizer="adam" if args.optimizer in OF_MATRICES else args.optimizer,
        decoupled_weight_decay=bool(getattr(args, "decoupled_weight_decay", True)),
        beta1=args.adam_beta1,
        beta2=args.adam_beta2,
        eps=args.adam_eps,
        eps_by_group=eps_by_group,
        sgd_momentum=args.sgd_momentum,
        matrices=muon_of(args) or lion_of(args),
        moments=args.elastic_moments,
        scaler=scaler,
        initial_loss_scale={"none": 1.0, "constant": args.loss_scale, "dynamic": args.initial_loss_scale}[scaler],
        min_loss_scale=float(args.min_loss_scale),
        growth_interval=int(args.loss_scale_window),
        hysteresis=int(args.hysteresis),
        balance=balance,
        load=load,
        scaling=scaling,
    )
    return Settings(
        seed=args.seed,
        hyper=hyper,
        per_token_loss=bool(args.calculate_per_token_loss),
        whole_microbatches=bool(args.num_experts or predicts(args)),
        layer_losses=bool(predicts(args) or (args.num_experts and (args.moe_aux_loss_coeff or args.moe_z_loss_coeff))),
        count_zeros=bool(args.log_num_zeros_in_grad),
        check_finite=bool(args.check_for_nan_in_loss_and_grad) and scaler != "dynamic",
        communication_timeout=60.0 * float(args.distributed_timeout_minutes),
        batch_size=batch_size,
        steps=int(args.train_iters) if args.train_iters else None,
    )
