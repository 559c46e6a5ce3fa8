"""HCCL is stopped and made anew through names torch-npu has. Nothing here runs on an NPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from megatron.elastic.comm.vendor.hccl import BACKEND_NAMES, HcclCommunicator
from megatron.elastic.comm.vendor.library import VendorHang
from tests.wheels import newest


class Backend:
    """Records what the adapter asks of torch_npu."""

    def __init__(self, hang: float = 0.0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._hang = hang

    def make(self, members: Sequence[int], name: str) -> Backend:
        assert ("make", tuple(members), name) not in self.calls, "a name is used once"
        self.calls.append(("make", tuple(members), name))
        return self

    def abort_hccl_comm(self, why: str) -> None:
        time.sleep(self._hang)
        self.calls.append(("abort", why))


def share(value: bytes | None) -> bytes:
    assert value is not None, "rank 0 is the first survivor"
    return value


def test_a_change_of_members_is_a_stop_and_a_new_group_under_a_new_name() -> None:
    backend = Backend()
    communicator = HcclCommunicator(0, backend.make, limit=5.0)
    communicator.start((0, 1, 2), communicator.new_identity())
    assert communicator.edit((0, 2), share) == "rebuilt"
    assert communicator.order == (0, 2)
    assert communicator.edit((0, 2), share) == "kept"
    communicator.revoke()
    assert communicator.revoked
    assert communicator.edit((0, 2), share, damaged=True) == "rebuilt"
    communicator.close()
    communicator.close()
    seen = [call[:2] for call in backend.calls]
    assert seen == [
        ("make", (0, 1, 2)),
        ("abort", "edit"),
        ("make", (0, 2)),
        ("abort", "edit"),
        ("make", (0, 2)),
        ("abort", "edit"),
    ]


def test_a_hanging_abort_is_bounded() -> None:
    backend = Backend(hang=5.0)
    communicator = HcclCommunicator(0, backend.make, limit=0.1)
    communicator.start((0, 1), b"name")
    with pytest.raises(VendorHang, match="abort_hccl_comm"):
        communicator.edit((0,), share)


@pytest.mark.slow
def test_the_names_exist_in_torch_npu() -> None:
    """Of a wheel of 44 MB."""
    with newest("torch-npu") as archive:
        source = archive.read("torch_npu/distributed/distributed_c10d.py").decode()
        registry = archive.read("torch_npu/_init/registry/distributed.py").decode()
    for name in BACKEND_NAMES:
        assert f".{name}(" in source
    for used in ("ProcessGroupHCCL(", "ProcessGroupHCCL.Options()", ".global_ranks_in_group =", ".group_id ="):
        assert used in registry, f"torch_npu makes its groups without {used}"
    assert "store, group_rank, group_size, pg_options" in registry
