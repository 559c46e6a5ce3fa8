"""A vendor operation on a stream beside the one that computes: the wait orders the two on the device.

The host never blocks in it. What is enqueued on one such stream runs in that order, so all ranks must enqueue in one
order of all their groups (``plan/schedule/finishing.py``). It has not run on several GPUs.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megatron.elastic import _comm

__all__ = ["EnqueuedBeside"]


class EnqueuedBeside(dist.Work):
    """``done`` is recorded behind the operation; None: it is over (a library that computes on the host)."""

    def __init__(self, done: _comm.DeviceEvent | None) -> None:
        super().__init__()
        self._done = done

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Have the current stream wait for the operation."""
        if self._done is not None:
            self._done.block()
        return True

    def is_completed(self) -> bool:
        return self._done is None or self._done.query()

    def is_success(self) -> bool:
        return self.is_completed()
