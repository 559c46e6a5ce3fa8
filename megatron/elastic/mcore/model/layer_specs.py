"""The specification from which Megatron builds each layer of a model, also those of other stages.

Layers may be of different kinds (``--moe-layer-freq``). Megatron gives a rank the specifications of its own stage
alone; a rank that takes over a layer of another stage needs that layer's.

Invariant: the specifications of this rank's own layers, which the script's model provider chose, are those that
Megatron's builder gives these layers. So both agree about the other stages too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.elastic.config import ConfigError
from megatron.elastic.mcore.parallel_state.stage import as_stage

__all__ = ["LayerSpecs", "routed_layers"]


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

    @classmethod
    def of(cls, chunks: Sequence[Any], args: Any) -> LayerSpecs:
        """Return those of the model of which ``chunks`` (``GPTModel``) are this rank's part.

        Raises :class:`ConfigError` if the layers differ and those of this rank are not Megatron's own.
        """
        config, known = chunks[0].config, _own(chunks)
        kinds = routed_layers(config)
        if len(set(kinds)) == 1 and known:
            spec = next(iter(known.values()))
            if not all(_alike(other, spec) for other in known.values()):
                raise ConfigError("--elastic: the script's layers differ, and no flag says how: run without --elastic")
            return cls((spec,) * len(kinds))
        if isinstance(chunks[0].transformer_layer_spec, ModuleSpec):
            return cls((chunks[0].transformer_layer_spec,) * len(kinds))
        specs = tuple(_of_all_stages(config, args))
        if not all(_alike(specs[layer], spec) for layer, spec in known.items()):
            raise ConfigError(
                "--moe-layer-freq with --elastic needs layers of Megatron's own specification: leave out --spec"
            )
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


def _of_all_stages(config: Any, args: Any) -> list[Any]:
    """Return the specifications that Megatron gives the chunks of all stages, in the model's order."""
    stages, depth = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    found: list[Any] = []
    for number in range(stages * (depth or 1)):
        stage, chunk = number % stages, None if depth is None else number // stages
        with as_stage(stage, stages, depth):
            block = get_gpt_decoder_block_spec(
                config,
                args.transformer_impl == "transformer_engine",
                normalization=args.normalization,
                qk_l2_norm=args.qk_l2_norm,
                vp_stage=chunk,
                pp_rank=stage,
            )
        found += block.layer_specs
    return found
