"""Waiting for gloo by looks: what ends between two looks has ended, whatever the look said."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.elastic.comm.gloo.wait import await_collective

SECONDS = timedelta(seconds=20)


def pair() -> list[Any]:
    """torch's own gloo groups of ranks 0 and 1, in one process; its stubs leave out their collectives."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, SECONDS), range(2)))


class EndsAfterTheLook(dist.Work):
    """A work of rank 0 that rank 1 joins when a look at it has run out of time, and before that is told."""

    def __init__(self, inner: dist.Work, other: Any) -> None:
        super().__init__()
        self._inner, self._other = inner, other
        self.looks = 0

    def wait(self, timeout: timedelta = SECONDS) -> bool:
        try:
            return self._inner.wait(timeout)
        except RuntimeError:
            self.looks += 1
            self._other.allreduce([torch.ones(3)]).wait(SECONDS)
            assert self._inner.wait(SECONDS)
            raise

    def is_completed(self) -> bool:
        return self._inner.is_completed()


def test_a_collective_that_ends_while_a_look_at_it_times_out_is_done() -> None:
    zero, one = pair()
    tensor = torch.ones(3)
    work = EndsAfterTheLook(zero.allreduce([tensor]), one)
    await_collective(work, SECONDS, void=lambda: False)
    assert work.looks == 1
    assert torch.equal(tensor, torch.full((3,), 2.0))


def test_a_collective_that_no_rank_joins_runs_out_of_time() -> None:
    zero, _one = pair()
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=3)  # the group's end waits for it
    with pytest.raises(TimeoutError):
        await_collective(zero.allreduce([torch.ones(3)], options), timedelta(seconds=0.2), void=lambda: False)
