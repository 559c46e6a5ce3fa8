"""Numbers of the host for kernels of a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["on_device"]


def on_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return ``values`` on ``device``, int64.

    The host goes on launching work: ``torch.tensor(values, device=device)`` would wait until the device has done all
    that the stream has before, since it copies pageable memory.
    """
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type != "cpu")
    return host.to(device, non_blocking=True)
