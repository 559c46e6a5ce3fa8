"""The number of CUDA devices, for imports in a process that is to be forked.

Megatron's imports ask torch whether there is a GPU. To answer, torch loads NVML, which starts a thread and opens the
devices (seen on an H200); a process that has done so cannot be forked into workers. So a child of it
counts, and torch is told the number for the time of the imports. A worker counts for itself, with its own
``CUDA_VISIBLE_DEVICES``.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["counted_by_a_child"]

_DEVICES = "/dev/nvidiactl"
_SECONDS = 60.0
"""In which a child must have counted; a driver that is loaded for the first time takes seconds."""
_MOST = 254
"""Devices that an exit status can tell."""


@contextmanager
def counted_by_a_child() -> Iterator[None]:
    """Have torch know the number of CUDA devices within the block, without a thread or a device in this process.

    Where a child cannot tell the number, or there is no such device, nothing changes.
    """
    import torch

    count = _count() if torch.version.cuda is not None and os.path.exists(_DEVICES) else None
    torch.cuda._cached_device_count = count
    try:
        yield
    finally:
        torch.cuda._cached_device_count = None


def _count() -> int | None:
    """Return the number of devices that a child finds; None if it fails or takes too long."""
    pid = os.fork()
    if pid == 0:
        _tell_count()
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(_SECONDS * 1000.0):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(pidfd)
    code = os.waitstatus_to_exitcode(status)
    return code if 0 <= code <= _MOST else None


def _tell_count() -> None:
    """Body of the child: it ends with the number as its status."""
    try:
        import torch

        os._exit(min(torch.cuda.device_count(), _MOST))
    finally:
        os._exit(_MOST + 1)
