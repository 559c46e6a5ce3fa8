"""Multi-token prediction: layers behind the last one that predict further tokens (DeepSeek-V3, arXiv 2412.19437, §2.2).

They are part of the head's unit. Each of them takes the output of the one before it and the embeddings of later
tokens, and its own output goes through the same output layer. So both ends of the model look tokens up: the weight of
the word embeddings is a state-only unit, like that of an output layer tied to it, whether the two are tied or not.

They read what the model's last layer makes, behind the final norm. So that norm is part of the last layer's unit, where
Megatron has it too: with a layout the head may be in another chunk.

Invariant: the layers draw dropout masks, and count the tokens of experts, under numbers that no layer of the model has.
The embedding draws the masks of its use at the first layer, with whatever copy of it a rank computes, and those of
further tokens under the number of the token (``DropoutKey.use``).
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

from megatron.elastic.mcore.parallel_state.stage import as_stage

__all__ = ["build_prediction", "final_norm_unit", "further_unit", "further_units", "prediction_spec", "predicts"]


def predicts(config: Any) -> int:
    """Return how many further tokens the model predicts."""
    return int(getattr(config, "mtp_num_layers", None) or 0)


def final_norm_unit(config: Any, units: int) -> int:
    """Return which of the model's ``units`` compute units has the final norm: the head, or the last layer."""
    return units - 2 if predicts(config) else units - 1


def prediction_spec(config: Any, layer: Any, fused: bool) -> Any:
    """Return the specification that Megatron gives the last chunk of the model; ``None`` if it predicts one token.

    ``layer``: specification of the last layer; ``fused``: of Transformer Engine.
    """
    if not predicts(config):
        return None
    stages, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    with as_stage(stages - 1, stages, chunks):
        return get_gpt_mtp_block_spec(config, layer, fused, vp_stage=_last(chunks), pp_rank=stages - 1)


def build_prediction(spec: Any, config: Any, groups: Any) -> MultiTokenPredictionBlock:
    """Build the layers as those of the last chunk."""
    last = _last(config.virtual_pipeline_model_parallel_size)
    return MultiTokenPredictionBlock(config, spec, vp_stage=last, pg_collection=groups)


def further_unit(config: Any, number: int) -> int:
    """Return the number of layer ``number`` (from 1) among the model's units, where it draws masks and counts tokens.

    It is behind those of the model's layers and head. In the state these layers have no unit of their own: they are
    part of the head's.
    """
    return int(config.num_layers) + 1 + number


def further_units(config: Any) -> tuple[int, ...]:
    """Return :func:`further_unit` of each layer; one layer may predict all further tokens."""
    layers = 1 if predicts(config) and config.mtp_use_repeated_layer else predicts(config)
    return tuple(further_unit(config, number) for number in range(1, layers + 1))


def _last(chunks: int | None) -> int | None:
    return None if chunks is None else chunks - 1
