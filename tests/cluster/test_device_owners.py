"""Owners in memory of another place than mirrors': losses, admissions and moves of blocks in any order of events.

The place is a device's, with its own kernels, staged copies and moves, over tensors of the CPU: what the scheduler
varies is the order of moves and steps. Memory that the host cannot read is the stand-in's (``tests/unit/standin``).
"""

from __future__ import annotations

import pytest
import torch

from megatron.elastic.platform.base import Platform
from megatron.elastic.platform.cpu import CpuPlatform
from megatron.elastic.runtime import assembly, owner_memory, start
from megatron.elastic.state.device_place import DevicePlace, tensor_kernels
from tests.cluster.checks import check
from tests.cluster.cluster import Cluster, run


@pytest.fixture(autouse=True)
def owners_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(platform: Platform) -> DevicePlace:
        return DevicePlace(CpuPlatform(), torch.device("cpu"), tensor_kernels())

    for module in (assembly, owner_memory, start):
        monkeypatch.setattr(module, "device_place", place)


def misplaced(cluster: Cluster) -> int:
    """Copies that are not where their roles put them, and that no thread is about to move."""
    count = 0
    for process in cluster.finished:
        assert process.engine is not None
        tools, view = process.engine.tools, process.engine.view
        assert tools.relocation is not None and tools.relocation.error is None
        if tools.relocation.pending or tools.relocation.moving:
            continue
        owned = {block.key for block in view.owned}
        count += sum(tools.pool.get(key).place.on_device != (key in owned) for key in tools.pool)
    return count


@pytest.mark.parametrize(
    "faults",
    [
        "",
        "mirrors=2 kill:rank=0,step=2,point=after_reduce kill:rank=1,step=3,point=mid_forward",
        "mirrors=2 kill:rank=3,step=2,point=mid_update kill:rank=2,point=in_recovery_promote",
        "kill:rank=1,step=3,point=after_vote",
    ],
)
def test_no_order_of_losses_and_moves_changes_the_state(faults: str) -> None:
    for seed in (1, 2):
        cluster = run(f"steps=7 seed={seed} {faults}")
        check(cluster)
        assert misplaced(cluster) == 0, f"seed {seed}"
