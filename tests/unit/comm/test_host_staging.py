"""Tensors travel over host links by way of staging copies (here from CPU memory, unpinned)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.elastic.comm.gloo.fabric import GlooFabric
from megatron.elastic.comm.vendor.host_staging import through_host
from tests.unit.comm.fabric_checks import edit
from tools.bench._common import Here, Ranks


def staged(here: Here) -> None:
    fabric = GlooFabric(here.rank, 2, 0, here.store(), timeout=20.0)
    edit(here, fabric, (0, 1), 1)
    group = fabric.group("staged", (0, 1))
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = torch.arange(6).view(2, 3).to(dtype).t()  # not contiguous
        through_host([tensor], [tensor], lambda _, written: dist.all_reduce(written[0], group=group))
        assert torch.equal(tensor, (2 * torch.arange(6)).view(2, 3).to(dtype).t())
        source, output = torch.full((5,), here.rank + 1).to(dtype), torch.zeros(2, 5, dtype=dtype)
        through_host(
            [source], [output], lambda read, written: dist.all_gather_into_tensor(written[0], read[0], group=group)
        )
        assert output[:, 0].tolist() == [1, 2]
        kept = torch.full((4,), 9).to(dtype)
        through_host([], [kept], lambda _, written: written[0][:2].zero_())
        assert kept.tolist() == [0, 0, 9, 9], "what is not written keeps what was there"
    fabric.close()


def test_staged_transfers_give_the_same_results() -> None:
    with Ranks(2, staged) as ranks:
        ranks.results(range(2))
