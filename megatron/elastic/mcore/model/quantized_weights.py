"""The copies of weights in 8 bits that layers of Transformer Engine keep while parameters do not change.

Such a layer quantizes a weight in its first forward after ``is_first_microbatch`` was set, and uses that copy until it
is set again. Megatron's schedules set it with the first micro-batch of each pass; the engine has its own schedules.

Source: ``megatron/core/extensions/transformer_engine.py`` (0.17.1) and ``transformer_engine/pytorch/module/linear.py``
(2.20).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.elastic.state.layout import ParamSpec

__all__ = ["kept_bytes", "quantize_anew"]

_COPIES = 2
"""Of one byte an element: by rows for the forward, by columns for the backward."""


def kept_bytes(spec: ParamSpec) -> int:
    """Return the bytes of the copies of a parameter: of matrices of linear layers, which are named ``linear_*``."""
    return _COPIES * spec.numel if len(spec.shape) > 1 and ".linear_" in f".{spec.name}" else 0


def quantize_anew(modules: Iterable[torch.nn.Module]) -> None:
    """Make each layer in ``modules`` quantize its weights in its next forward. Other layers are left alone."""
    for module in modules:
        for layer in module.modules():
            if hasattr(layer, "is_first_microbatch"):
                layer.is_first_microbatch = True  # type: ignore[assignment]
