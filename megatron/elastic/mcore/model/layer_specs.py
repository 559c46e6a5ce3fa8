"""The specification from which Megatron builds each layer of a model, also those of other stages.

Layers may be of different kinds (``--moe-layer-freq``) or shapes (``--heterogeneous-layers-config-path``). Megatron
gives a rank the specifications of its own stage alone; a rank that takes over a layer of another stage needs that
layer's.

Invariant: the specifications of this rank's own layers, which the script's model provider chose, are those that
Megatron's builder gives these layers. So both agree about the other stages too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.elastic.config import ConfigError
from megatron.elastic.mcore.model.prediction import prediction_spec, predicts
from megatron.elastic.mcore.parallel_state.stage import as_stage

__all__ = ["LayerSpecs", "config_of_layer", "of_many_shapes", "routed_layers", "sized_as_layer", "without_references"]

_REFERENCES = (
    *("grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func"),
    "timers",
)


def of_many_shapes(config: Any) -> bool:
    """Return whether each layer has sizes of its own (Megatron's ``HeterogeneousTransformerConfig``)."""
    return bool(getattr(config, "heterogeneous_block_specs", False))


def config_of_layer(config: Any, unit: int) -> Any:
    """Return the configuration from which Megatron builds the layer that is compute unit ``unit``."""
    return config.get_config_for_layer(unit) if of_many_shapes(config) else config


def without_references(config: Any) -> Any:
    """Return a copy of a configuration without what Megatron's loop puts there for its schedules.

    Modules of experts copy their configuration in depth, as Megatron does for a layer of its own shape, and these
    functions and timers refer to the whole engine.
    """
    mine = copy.copy(config)
    for name in _REFERENCES:
        setattr(mine, name, None)
    return mine


def sized_as_layer(config: Any, unit: int) -> Any:
    """Return a configuration with the sizes of one layer, for estimates: a part that it lacks has no elements.

    A part that is one linear layer counts as lacking.
    """
    if not of_many_shapes(config):
        return config
    mine, block = copy.copy(config), config.per_block_parameters[unit - 1]
    mine.num_query_groups, mine.ffn_hidden_size = block.attention.num_query_groups, block.mlp.ffn_hidden_size or 0
    if block.attention.no_op or block.attention.replace_with_linear:
        mine.num_attention_heads = 0
    return mine


def routed_layers(config: Any) -> tuple[bool, ...]:
    """Return whether each layer of the model has experts, as ``--moe-layer-freq`` says."""
    layers, every = int(config.num_layers), getattr(config, "moe_layer_freq", 1)
    if not config.num_moe_experts:
        return (False,) * layers
    if isinstance(every, int):
        return tuple(layer % every == 0 for layer in range(layers))
    return tuple(bool(routed) for routed in every)


@dataclass(frozen=True)
class LayerSpecs:
    """Specifications by layer of the whole model, counted from 0."""

    specs: tuple[Any, ...]
    prediction: Any = None
    """Specification of the layers that predict further tokens; None: the model has none."""

    @classmethod
    def of(cls, chunks: Sequence[Any], args: Any) -> LayerSpecs:
        """Return those of the model of which ``chunks`` (``GPTModel``) are this rank's part.

        Raises :class:`ConfigError` if the layers differ and those of this rank are not Megatron's own.
        """
        found, config = cls._of_layers(chunks, args), chunks[0].config
        if not predicts(config):
            return found
        prediction = prediction_spec(config, found.specs[-1], args.transformer_impl == "transformer_engine")
        mine = [chunk.mtp_block_spec for chunk in chunks if chunk.mtp_process]
        if not all(_alike(prediction, spec) for spec in mine):
            raise ConfigError(
                "--mtp-num-layers with --elastic needs layers of Megatron's own specification: leave out --spec"
            )
        return replace(found, prediction=prediction)

    @classmethod
    def _of_layers(cls, chunks: Sequence[Any], args: Any) -> LayerSpecs:
        config, known = chunks[0].config, _own(chunks)
        if of_many_shapes(config):
            _refuse_linear(config)
            return cls._of_flag("--heterogeneous-layers-config-path", _many_shapes, known, config, args)
        kinds = routed_layers(config)
        if len(set(kinds)) == 1 and known:
            spec = next(iter(known.values()))
            if not all(_alike(other, spec) for other in known.values()):
                raise ConfigError("--elastic: the script's layers differ, and no flag says how: run without --elastic")
            return cls((spec,) * len(kinds))
        if isinstance(chunks[0].transformer_layer_spec, ModuleSpec):
            return cls((chunks[0].transformer_layer_spec,) * len(kinds))
        return cls._of_flag("--moe-layer-freq", _two_kinds, known, config, args)

    @classmethod
    def _of_flag(
        cls, flag: str, block: Callable[..., Any], known: Mapping[int, Any], config: Any, args: Any
    ) -> LayerSpecs:
        """Return those that Megatron's builder ``block`` makes of a flag. Raises if ``known`` ones are others."""
        specs = tuple(_of_all_stages(block, config, args))
        if not all(_alike(specs[layer], spec) for layer, spec in known.items()):
            raise ConfigError(f"{flag} with --elastic needs layers of Megatron's own specification: leave out --spec")
        return cls(specs)

    def of_unit(self, unit: int) -> Any:
        """Return the specification of a compute unit that is a layer."""
        return self.specs[unit - 1]


def _own(chunks: Sequence[Any]) -> Mapping[int, Any]:
    """Return layer → specification of the layers that Megatron built here."""
    found: dict[int, Any] = {}
    for chunk in chunks:
        numbers = [int(layer.layer_number) - 1 for layer in chunk.decoder.layers]
        found |= dict(zip(numbers, chunk.decoder.submodules.layer_specs or (), strict=True))
    return found


def _alike(one: Any, other: Any) -> bool:
    """Return whether two specifications build equal layers; Megatron makes new ``partial`` objects at each call."""
    if type(one) is not type(other):
        return False
    if isinstance(one, partial):
        return _alike((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
    if is_dataclass(one) and not isinstance(one, type):
        return all(_alike(getattr(one, item.name), getattr(other, item.name)) for item in fields(one))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(value, other[key]) for key, value in one.items())
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def _of_all_stages(block: Callable[..., Any], config: Any, args: Any) -> list[Any]:
    """Return the specifications that Megatron's builder ``block`` gives the chunks of all stages, in their order."""
    stages, depth = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    found: list[Any] = []
    for number in range(stages * (depth or 1)):
        stage, chunk = number % stages, None if depth is None else number // stages
        with as_stage(stage, stages, depth):
            found += block(config, args, vp_stage=chunk, pp_rank=stage).layer_specs
    return found


def _two_kinds(config: Any, args: Any, **stage: int | None) -> Any:
    fused = args.transformer_impl == "transformer_engine"
    return get_gpt_decoder_block_spec(
        config, fused, normalization=args.normalization, qk_l2_norm=args.qk_l2_norm, **stage
    )


def _many_shapes(config: Any, args: Any, **stage: int | None) -> Any:
    return get_gpt_heterogeneous_layer_spec(config, args.transformer_impl == "transformer_engine", **stage)


def _refuse_linear(config: Any) -> None:
    """Raise :class:`ConfigError` for linear layers in place of others where they are cut over ranks."""
    replaced = any(b.attention.replace_with_linear or b.mlp.replace_with_linear for b in config.per_block_parameters)
    if replaced and config.tensor_model_parallel_size > 1:
        raise ConfigError(
            "--heterogeneous-layers-config-path: with --elastic a linear layer in place of attention or MLP "
            "(replace_with_linear) is not cut over ranks: use --tensor-model-parallel-size 1"
        )
