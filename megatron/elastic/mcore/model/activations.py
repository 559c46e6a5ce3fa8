"""The bytes that a unit's forward keeps for its backward, estimated from the model's sizes.

The estimate counts the tensors that autograd holds between a micro-batch's forward and its backward, as Korthikanti
et al. do for Megatron's layer (arXiv 2205.05198, §4). Two terms differ here. Keyed dropout recomputes its masks, so
none is kept. Scores, and keys and values repeated for every head, are kept only by Megatron's own
``DotProductAttention``; fused and flash kernels do not keep them.

In elements of one row (a sequence of length ``s``), sizes of one tensor-parallel rank:

    embedding   s h
    layer       s (4 h + 2 q + kv) + s f + 2 a s^2        4 h: both norms, both residuals; q, kv: attention's
                                                          inputs and output; f: tensors of the MLP
    head        2 s h + s v, the latter in fp32           its input, its norm, softmax of the cross entropy

A further token that is predicted takes another layer, another head, and 5 s h where two inputs become one.
A layer that is recomputed keeps its input. With context parallelism s is this rank's part, and a layer keeps keys,
values and scores of the whole sequence.

``tests/unit/mcore/test_memory_model.py`` compares the estimate with real allocations.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron.elastic.mcore.model.prediction import predicts

__all__ = ["held_bytes"]

_FP32 = 4
_JOINED = 5
"""Tensors kept at a layer of multi-token prediction: both inputs, both norms side by side, the projection's output."""


def held_bytes(
    model: torch.nn.Module,
    config: Any,
    sequence: int,
    vocabulary: int,
    unit: int,
    last: int,
    routed: bool = False,
    *,
    local: bool = False,
    keys: int | None = None,
) -> int:
    """Return the bytes of one row of ``unit`` (0: embedding, ``last``: head); ``sequence``: positions of a row.

    ``routed``: the unit is a layer with experts.
    ``local``: heads, MLP columns and vocabulary are this rank's already, as in a cell that deals them unevenly.
    ``keys``: positions of which a layer has keys; None: ``sequence``.
    """
    keys = sequence if keys is None else keys
    own = sequence // config.tensor_model_parallel_size if config.sequence_parallel else sequence
    tensor = 1 if local else config.tensor_model_parallel_size
    size: int = torch.finfo(config.params_dtype).bits // 8
    boundary: int = own * config.hidden_size * (_FP32 if config.fp32_residual_connection else size)
    if unit == 0:
        return boundary
    if unit < last and config.recompute_granularity == "full" and config.recompute_method == "uniform":
        return boundary // tensor if config.distribute_saved_activations else boundary
    whole = any(isinstance(module, DotProductAttention) for module in model.modules())
    layer = 4 * boundary + _inside(config, size, sequence, keys, routed, whole) // tensor
    if unit < last:
        return int(layer)
    head = 2 * boundary + sequence * vocabulary // tensor * _FP32
    return int(head + predicts(config) * (head + layer + _JOINED * boundary))


def _inside(config: Any, size: int, sequence: int, keys: int, routed: bool, whole: bool) -> int:
    """Return the bytes of what tensor-parallel ranks share of a layer; ``whole``: attention keeps its scores."""
    query: int = config.kv_channels * config.num_attention_heads
    pairs: int = 2 * (query if whole else config.kv_channels * (config.num_query_groups or config.num_attention_heads))
    inside = (sequence * (2 * query + _feed_forward(config, routed)) + (keys if whole else sequence) * pairs) * size
    if whole:
        inside += _scores(config, size) * config.num_attention_heads * sequence * keys
    return int(inside)


def _feed_forward(config: Any, routed: bool) -> int:
    """Return the elements a position of the activation function's input and output."""
    if not config.gated_linear_unit:
        each = 2 * config.ffn_hidden_size
    else:
        each = (3 if config.bias_activation_fusion else 5) * config.ffn_hidden_size
    if routed:
        width = config.moe_ffn_hidden_size or config.ffn_hidden_size
        each = each * width * config.moe_router_topk // config.ffn_hidden_size
    return int(each)


def _scores(config: Any, size: int) -> int:
    """Return the bytes a head and pair of positions: softmax output, and its copy that multiplies the values."""
    if config.recompute_granularity == "selective" and "core_attn" in (config.recompute_modules or ()):
        return 0
    softmax = _FP32 if config.attention_softmax_in_fp32 and not config.masked_softmax_fusion else size
    return softmax + (size if config.attention_dropout > 0 or softmax != size else 0)
