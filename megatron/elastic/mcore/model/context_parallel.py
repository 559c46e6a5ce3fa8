"""Context parallelism on Megatron's own layers: functions of Megatron that need to know this rank's positions.

Megatron has context parallelism in the kernels of Transformer Engine only, and its cut needs a length that divides by
twice the number of ranks. Here Megatron's local attention gets all keys and values of the sequence
(:mod:`sequence_gather`), the queries of this rank's positions, and a mask of explicit positions. The batch of a script,
and rotary embeddings, are cut by the same positions (:mod:`~megatron.elastic.engine.compute.sequence_cut`), which are
Megatron's own while no rank is missing. A job may come to share the sequence while it runs: Megatron has then built
every module for a context-parallel size of one, and these functions alone know of the parts.

Attention of Transformer Engine keeps its own exchange of keys and values; only batch, embeddings and loss follow here.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnMaskType

from megatron.elastic.config import ConfigError
from megatron.elastic.engine.compute.model_interface import LossOutput
from megatron.elastic.engine.compute.sequence_cut import Run, taken
from megatron.elastic.mcore.model.sequence_gather import SequencePart, gathered
from megatron.elastic.mcore.parallel_state.stage import GroupStandIn
from megatron.elastic.mcore.patching.patches import Row, bound

__all__ = ["ContextParallel", "causal_mask", "of_the_cell", "unfused"]

_ALONE = GroupStandIn(0, 1)


@dataclass
class ContextParallel:
    """The part of the sequence that this process computes now; ``None``: all of it, in any cell."""

    part: SequencePart | None = None
    cuts_batches: bool = False
    """True once the script has called Megatron's function that cuts a batch, for any context-parallel size."""

    def rows(self) -> tuple[Row, ...]:
        """(symbol, reason, replacement) for the patch table."""
        core = "megatron.core.transformer.dot_product_attention.DotProductAttention."
        rotary = "megatron.core.models.common.embeddings."
        cut = "with context parallelism a rank has its positions of the sequence, in any number of parts"
        return (
            (core + "__init__", "context parallelism on Megatron's local attention", _buildable),
            (core + "forward", "all keys and values, and this rank's queries", self._attention),
            ("megatron.core.utils.get_batch_on_this_cp_rank", cut, self._batch),
            (rotary + "rotary_pos_embedding.RotaryEmbedding.get_rotary_seq_len", cut, self._rotary_length),
            (rotary + "rotary_pos_embedding.RotaryEmbedding.forward", cut, self._rotary),
            (rotary + "yarn_rotary_pos_embedding.YarnRotaryEmbedding.forward", cut, self._rotary),
        )

    def _attention(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
            part = self.part
            if part is None:
                return original(*args, **kwargs)
            call = bound(original, args, kwargs)
            core, key, value = call["self"], call["key"], call["value"]
            both = gathered(part, torch.cat([key, value], dim=-1))
            call["key"], call["value"] = (x.contiguous() for x in both.split([key.shape[-1], value.shape[-1]], dim=-1))
            if call["attention_mask"] is None and core.attn_mask_type == AttnMaskType.causal:
                call["attention_mask"] = causal_mask(part.runs, part.cut.length, key.device)
            with unfused(core.scale_mask_softmax):
                return original(**call)

        return attend

    def _batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def cut(*args: Any, **kwargs: Any) -> Any:
            self.cuts_batches = True
            if self.part is None:
                return original(*args, **kwargs)
            runs, batch = self.part.runs, bound(original, args, kwargs)["batch"]
            for name, values in batch.items():
                if isinstance(values, torch.Tensor) and values.dim() > 1:
                    batch[name] = taken(values, runs, 2 if name == "attention_mask" else 1).contiguous()
            return batch

        return cut

    def _rotary_length(self, original: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(original)
        def length(*args: Any, **kwargs: Any) -> int:
            return original(*args, **kwargs) if self.part is None else self.part.cut.length

        return length

    def _rotary(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def embedding(*args: Any, **kwargs: Any) -> Any:
            if self.part is None:
                return original(*args, **kwargs)
            found = original(**{**bound(original, args, kwargs), "cp_group": _ALONE})
            if isinstance(found, tuple):
                return taken(found[0], self.part.runs, 0), *found[1:]
            return taken(found, self.part.runs, 0)

        for name in ("cache_clear", "cache_info"):  # Megatron clears the cache of its own function
            if hasattr(original, name):
                setattr(embedding, name, getattr(original, name))
        return embedding


def _buildable(original: Callable[..., None]) -> Callable[..., None]:
    """Return a ``DotProductAttention.__init__`` for any context-parallel size."""

    @functools.wraps(original)
    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.context_parallel_size == 1:
            original(self, config, *args, **kwargs)
            return
        single = copy.copy(config)
        single.context_parallel_size = 1
        original(self, single, *args, **kwargs)
        self.config = config

    return build


@contextmanager
def unfused(softmax: Any) -> Iterator[None]:
    """Have Megatron compute this softmax without Apex's kernels, which mask by the place in the tensor."""
    fused, softmax.scaled_masked_softmax_fusion = softmax.scaled_masked_softmax_fusion, False
    try:
        yield
    finally:
        softmax.scaled_masked_softmax_fusion = fused


def causal_mask(runs: tuple[Run, ...], length: int, device: torch.device) -> torch.Tensor:
    """Return ``[1, 1, queries, length]``, true where a key is behind the query; ``runs``: positions of the queries."""
    keys = torch.arange(length, device=device)
    return (keys > taken(keys, runs, 0)[:, None])[None, None]


def of_the_cell(part: SequencePart, output: LossOutput) -> LossOutput:
    """Return the loss output of one part with tokens and report of all parts. Collective in the part's group.

    A reported mean becomes the mean over the parts. Raises ``ConfigError`` for a loss function that returns a mean:
    the parts may have different numbers of tokens.
    """
    if output.tokens is None:
        raise ConfigError(
            "--context-parallel-size needs a loss function that returns (sum, tokens, report), but this one returns a "
            "mean: return the sum over tokens and their number"
        )
    values = [output.tokens, *output.report.values()]
    sums = torch.cat([value.detach().reshape(-1).double() for value in values])
    dist.all_reduce(sums, group=part.group)
    totals = sums.split([value.numel() for value in values])
    report = {
        name: total / part.part.count if total.numel() == 1 else total
        for name, total in zip(output.report, totals[1:], strict=True)
    }
    return LossOutput(output.loss, totals[0].reshape(output.tokens.shape).to(output.tokens.dtype), report)
