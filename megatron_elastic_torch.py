"""The function that ``import torch`` calls (entry point ``torch.backends``), outside of the namespace ``megatron``.

A program may have a package ``megatron`` of its own that hides ours, such as an older fork of Megatron-LM. An entry
point that fails keeps torch from being imported at all. So a hidden package costs the backend's name and one warning.
"""

from __future__ import annotations

import warnings

__all__ = ["register"]


def register() -> None:
    """Teach torch the backend name ``elastic``, or warn that it is not there."""
    try:
        from megatron.elastic.comm import entry_point
    except ImportError as error:
        warnings.warn(f"torch's backend 'elastic' is not available: {error}", RuntimeWarning, stacklevel=2)
    else:
        entry_point.register()
