"""Barriers that name missing ranks: our groups answer them, groups of others go where torch sends them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatron.elastic.comm.errors import BarrierTimeout, CommTimeout, PeerLost
from megatron.elastic.comm.monitored import for_our_groups, in_gloos_words


@pytest.fixture
def gloo_alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_group_of_another_backend_goes_to_torch_unchanged(gloo_alone: None) -> None:
    asked: list[tuple[Any, ...]] = []
    ours = for_our_groups(lambda *arguments: asked.append(arguments))
    for arguments in ((None, timedelta(seconds=2), True), (dist.GroupMember.NON_GROUP_MEMBER, 3.0, False)):
        ours(*arguments)
        assert asked.pop() == arguments


def test_only_a_time_out_becomes_the_barriers_error() -> None:
    with pytest.raises(BarrierTimeout, match="Rank 1 failed to pass monitoredBarrier in 500 ms"), in_gloos_words(0, 0):
        raise CommTimeout(0.5, (1,))
    with pytest.raises(PeerLost), in_gloos_words(0, 0):
        raise PeerLost(1, "connection reset")
