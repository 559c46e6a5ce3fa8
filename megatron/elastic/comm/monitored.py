"""Monitored barriers: after the time-out, rank 0 of the group names the ranks that did not come.

``torch.distributed.monitored_barrier`` asks for the backend name gloo and refuses all others. :func:`for_our_groups`
makes it take groups of ours too. The errors have the words of gloo's, since programs look for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron.elastic.comm import registry
from megatron.elastic.comm.errors import BarrierTimeout, CommTimeout

__all__ = ["MonitoredBarrier", "for_our_groups", "in_gloos_words"]

MonitoredBarrier = Callable[[dist.ProcessGroup | None, timedelta | float | None, bool], None]
"""The signature of ``torch.distributed.monitored_barrier``."""


def for_our_groups(original: MonitoredBarrier) -> MonitoredBarrier:
    """Return ``original`` that takes groups of backend ``elastic`` too."""

    def monitored_barrier(
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        if c10d._rank_not_in_group(group) or dist.get_backend(group) != registry.BACKEND_NAME:
            original(group, timeout, wait_all_ranks)
            return
        ours: Any = c10d._get_default_group() if group is None else group
        if isinstance(timeout, (int, float)):
            timeout = timedelta(seconds=timeout)
        ours.monitored_barrier(timeout, wait_all_ranks)

    return monitored_barrier


@contextmanager
def in_gloos_words(rank: int, leader: int) -> Iterator[None]:
    """Turn a time-out of the barrier of ``rank``, whose group is led by ``leader``, into :class:`BarrierTimeout`."""
    try:
        yield
    except CommTimeout as error:
        raise BarrierTimeout(rank, leader, error.seconds, error.waiting_for) from None
