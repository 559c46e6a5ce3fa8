"""The device of a rank: LOCAL_RANK modulo the number of devices that its process sees.

So ranks share devices where a node has more ranks than devices, and a process that sees one device alone
(``--virtual-local-rank``, or CUDA_VISIBLE_DEVICES set for each rank) uses that one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial

from megatron.elastic.platform.base import Platform, PlatformUnavailable
from megatron.elastic.platform.threads import OsThreads

__all__ = ["own_device", "threads_on", "use_own_device"]


def own_device(platform: Platform, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of this rank's device. Raises :class:`PlatformUnavailable` if the process sees none."""
    devices = platform.device_count()
    if devices < 1:
        raise PlatformUnavailable(f"{platform.name}: no device is visible to this process (CUDA_VISIBLE_DEVICES)")
    return int(environ.get("LOCAL_RANK", "0")) % devices


def use_own_device(platform: Platform, environ: Mapping[str, str] = os.environ) -> None:
    """Make this rank's device current in the calling thread. Until then it is device 0 on every rank."""
    platform.set_device(own_device(platform, environ))


def threads_on(platform: Platform) -> OsThreads:
    """Return threads that begin on this rank's device. Any other thread begins on device 0."""
    return OsThreads(partial(use_own_device, platform))
