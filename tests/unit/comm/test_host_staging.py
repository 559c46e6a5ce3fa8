"""Tensors travel over host links by way of staging buffers (here from CPU memory, unpinned)."""

from __future__ import annotations

import torch

from megatron.elastic.comm.gloo import GlooFabric
from megatron.elastic.comm.host_staging import SMALLEST, HostStaging
from tests.unit.comm.fabric_checks import edit
from tools.bench._common import Here, Ranks


def staged(here: Here) -> int:
    fabric = GlooFabric(here.rank, 2, 0, here.store(), timeout=20.0)
    edit(here, fabric, (0, 1), 1)
    group, staging, other = fabric.group("staged", (0, 1)), HostStaging(most=1 << 16), 1 - here.rank
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = torch.arange(6).view(2, 3).to(dtype).t()  # not contiguous
        staging.all_reduce(group, tensor)
        assert torch.equal(tensor, (2 * torch.arange(6)).view(2, 3).to(dtype).t())
        tensor = torch.full((5,), here.rank).to(dtype)
        staging.broadcast(group, tensor, src=1)
        assert torch.equal(tensor, torch.full((5,), 1).to(dtype))
        output = torch.zeros(2, 5, dtype=dtype)
        staging.all_gather(group, output, torch.full((5,), here.rank + 1).to(dtype))
        assert output[:, 0].tolist() == [1, 2]
        if here.rank == 0:
            staging.send(group, torch.full((3, 2), 7).to(dtype), dst=other, tag=3)
        else:
            received = torch.zeros(3, 2, dtype=dtype)
            staging.recv(group, received, src=other, tag=3)
            assert bool((received == 7).all())
    large = torch.ones(1 << 16)
    staging.all_reduce(group, large)  # larger than what may be kept
    assert bool((large == 2).all())
    fabric.close()
    return staging.kept_bytes()


def test_staged_transfers_give_the_same_results_and_keep_few_buffers() -> None:
    with Ranks(2, staged) as ranks:
        assert set(ranks.results(range(2)).values()) == {SMALLEST}
