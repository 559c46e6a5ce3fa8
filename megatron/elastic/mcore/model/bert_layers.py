"""Layers of Megatron's BERT without Transformer Engine.

``pretrain_bert.py`` imports the layer specification of Transformer Engine by name whatever its flags are, and
Megatron raises ``ImportError`` where that package is missing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.models.bert import bert_layer_specs

__all__ = ["make_layer_spec"]


def make_layer_spec(original: Callable[[], Any]) -> Callable[[], Any]:
    """Return the specification of Transformer Engine, or that of Megatron's own layers where it is missing."""

    @functools.wraps(original)
    def get_bert_layer_with_transformer_engine_spec() -> Any:
        return original() if bert_layer_specs.HAVE_TE else bert_layer_specs.bert_layer_local_spec

    return get_bert_layer_with_transformer_engine_spec
