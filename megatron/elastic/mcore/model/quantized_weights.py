"""The copies of weights in 8 bits that layers of Transformer Engine keep while parameters do not change.

Such a layer quantizes a weight in its first forward after ``is_first_microbatch`` was set, and uses that copy until it
is set again. Megatron's schedules set it with the first micro-batch of each pass; the engine has its own schedules.

Source: ``megatron/core/extensions/transformer_engine.py`` (0.17.1) and ``transformer_engine/pytorch/module/linear.py``
(2.20).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["quantize_anew"]


def quantize_anew(modules: Iterable[torch.nn.Module]) -> None:
    """Make each layer in ``modules`` quantize its weights in its next forward. Other layers are left alone."""
    for module in modules:
        for layer in module.modules():
            if hasattr(layer, "is_first_microbatch"):
                layer.is_first_microbatch = True  # type: ignore[assignment]
