"""A wait for one message that can be given up, for threads beside the step.

Most works show their end to those that look. Those of gloo's messages show it to a thread that waits for them alone:
they have a ``wait_unless`` of their own (:class:`~megatron.elastic.comm.gloo.work.GlooWork`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

__all__ = ["wait_unless"]

_LOOK_SECONDS = 0.001
"""Time between two looks at a message under way."""


def wait_unless(work: dist.Work, void: Callable[[], bool]) -> bool:
    """Return True when ``work`` is done, False once ``void()`` says that it cannot be. Raises ``CommError``."""
    own: Callable[[Callable[[], bool]], bool] | None = getattr(work, "wait_unless", None)
    if own is not None:
        return own(void)
    while not void():
        if work.is_completed():
            work.wait()
            return True
        time.sleep(_LOOK_SECONDS)
    return False
