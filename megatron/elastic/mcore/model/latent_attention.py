"""Multi-latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1) on Megatron's local attention.

Megatron's latent attention passes the width of its keys and of its values to the core attention. Only Transformer
Engine's takes them; the local one takes one width for both and lays its output out by it. Its products work with two
widths, so it is enough to build it from the width of the values. The scale of the scores comes from latent
attention itself.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

__all__ = ["make_two_widths"]


def make_two_widths(original: Callable[..., None]) -> Callable[..., None]:
    """Return a ``DotProductAttention.__init__`` that also takes ``k_channels`` and ``v_channels``, in elements."""

    @functools.wraps(original)
    def build(
        self: Any,
        config: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        if v_channels is None:
            original(self, config, *args, **kwargs)
            return
        laid_out = copy.copy(config)
        laid_out.kv_channels = v_channels
        original(self, laid_out, *args, **kwargs)
        self.config = config

    return build
