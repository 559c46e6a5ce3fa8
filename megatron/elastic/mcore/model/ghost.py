"""The layers of a piece without rows: of each layer with experts only the exchange of tokens, and this rank's experts.

A rank whose crew computes a micro-batch more than it does takes part with such layers (docs/design.md §7.9). Megatron's
own layers do not compute without rows. Its block runs these layers in their place, so they are recomputed in backward
exactly when those of the other ranks are.

Invariant: the exchanges of a ghost, forward and backward, are in number and order those of the layers that it stands
for.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer

__all__ = ["GhostLayer", "GhostPrediction"]


class GhostLayer(torch.nn.Module):
    """Stands for ``layer`` in a block. Its input and output have no rows."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        mlp = getattr(layer, "mlp", None)
        self._experts = [mlp] if isinstance(mlp, MoELayer) else []  # a list: not a submodule, the layer owns it

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Exchange no tokens of this rank's, and compute those of other ranks. Returns (output, no context)."""
        for experts in self._experts:
            if experts.moe_layer_recompute and self.training:
                hidden_states = tensor_parallel.checkpoint(
                    lambda hidden, of=experts: _exchanged(of, hidden), False, hidden_states
                )
            else:
                hidden_states = _exchanged(experts, hidden_states)
        return hidden_states, None


class GhostPrediction(torch.nn.Module):
    """Stands for the layers that predict further tokens; Megatron may have them recomputed one by one."""

    def __init__(self, prediction: Any) -> None:
        super().__init__()
        config = prediction.config
        depths = range(config.mtp_num_layers)
        self._layers = [
            GhostLayer(prediction.layers[0 if prediction.mtp_use_repeated_layer else depth].mtp_model_layer)
            for depth in depths
        ]
        self._recomputed = config.recompute_granularity == "full" and config.recompute_method == "uniform"

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Take part in the exchanges of all of them. Returns what has no rows again."""
        for layer in self._layers:
            layer.training = self.training
            if self._recomputed and self.training:
                hidden_states = tensor_parallel.checkpoint(lambda hidden, of=layer: of(hidden)[0], False, hidden_states)
            else:
                hidden_states, _ = layer(hidden_states)
        return hidden_states


def _exchanged(experts: Any, hidden: torch.Tensor) -> torch.Tensor:
    at, count = experts.token_dispatcher, experts.config.num_moe_experts
    routed = torch.zeros((0, count), dtype=torch.bool, device=hidden.device)
    # Megatron's router computes in this type, and both ends of an exchange must have the same.
    kind = {"fp32": torch.float32, "fp64": torch.float64}.get(experts.config.moe_router_dtype, hidden.dtype)
    rows, probs = at.dispatch_preprocess(hidden, routed, torch.zeros((0, count), dtype=kind, device=hidden.device))
    rows, probs = at.token_dispatch(rows, probs)
    rows, tokens_per_expert, probs = at.dispatch_postprocess(rows, probs)
    output, _ = experts.experts(rows, tokens_per_expert, probs)
    combined: torch.Tensor = at.combine_postprocess(at.token_combine(at.combine_preprocess(output)))
    return combined
