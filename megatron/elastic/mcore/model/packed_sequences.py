"""Packed sequences (``--sft``) on Megatron's local attention.

A row holds several sequences, one behind the other. Megatron begins rotary embeddings anew with each, but keeps their
attention apart in the kernels of Transformer Engine only. Here the local attention gets a mask in which a position sees
those before it in its own sequence.

Source: the ``thd`` format of ``megatron/core/packed_seq_params.py`` (0.17.1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron.elastic.engine.compute.model_interface import LossOutput
from megatron.elastic.mcore.model.context_parallel import unfused
from megatron.elastic.mcore.patching.patches import bound

__all__ = ["make_packed", "mean_of_rows", "packed_mask"]


def make_packed(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a ``DotProductAttention.forward`` that also takes ``packed_seq_params``.

    With these, queries, keys and values are [positions, heads, width], and the result is [positions, 1, width of all].
    """

    @functools.wraps(original)
    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = bound(original, args, kwargs)
        packed = call["packed_seq_params"]
        if packed is None:
            return original(*args, **kwargs)
        mask = packed_mask(packed.cu_seqlens_q, call["query"].shape[0])
        rows = {name: call[name].unsqueeze(1) for name in ("query", "key", "value")}
        with unfused(call["self"].scale_mask_softmax):
            return original(**{**call, **rows, "attention_mask": mask, "packed_seq_params": None})

    return attend


def packed_mask(ends: torch.Tensor, length: int) -> torch.Tensor:
    """Return ``[1, 1, length, length]``, true where a query (third dimension) does not see a key (fourth).

    ``ends``: [sequences + 1], where each sequence begins and ends; positions behind the last end are one more.
    """
    positions = torch.arange(length, device=ends.device)
    number = torch.searchsorted(ends[1:].contiguous(), positions, right=True)
    behind = positions > positions[:, None]
    return (behind | (number != number[:, None]))[None, None]


def mean_of_rows(output: LossOutput) -> LossOutput:
    """Return the output of a micro-batch with its losses as means: with ``--sft`` Megatron evaluates to their mean.

    ``output``: of a loss function that reports [sum, tokens].
    """
    means = {
        key: torch.stack([value[0] / value[1].clamp(min=1), torch.ones_like(value[1])]) if value.numel() == 2 else value
        for key, value in output.report.items()
    }
    return LossOutput(output.loss, output.tokens, means)
