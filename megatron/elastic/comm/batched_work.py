"""One work for several, as the end of a batch returns it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

__all__ = ["BatchedWork"]


class BatchedWork(dist.Work):
    """Done when all of ``works`` are; raises the first exception of them."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = tuple(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        completed = [work.is_completed() for work in self._works]  # asked of each: that drives a message, too
        return all(completed)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)
