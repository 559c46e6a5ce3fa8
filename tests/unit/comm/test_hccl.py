"""HCCL is stopped and made anew through names torch-npu has. Nothing here runs on an NPU."""

from __future__ import annotations

import os
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.elastic.comm.hccl import GROUP_NAMES, MODULE_NAMES, HcclCommunicator
from megatron.elastic.comm.vendor import VendorHang


class Vendor:
    """Records what the adapter asks of torch_npu and of a group's backend."""

    def __init__(self, hang: float = 0.0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._hang = hang

    def make_group(self, members: Sequence[int]) -> Vendor:
        self.calls.append(("make", tuple(members)))
        return self

    def reinit_process_group(self, group: Any, rebuild_link: bool) -> None:
        self.calls.append(("reinit", rebuild_link))

    def _get_backend(self, device: Any) -> Vendor:
        return self

    def abort_hccl_comm(self, why: str) -> None:
        time.sleep(self._hang)
        self.calls.append(("abort", why))


def share(value: bytes | None) -> bytes:
    raise AssertionError("HCCL meets through the store")


def test_other_members_mean_a_new_group_and_the_same_ones_new_links() -> None:
    vendor = Vendor()
    communicator = HcclCommunicator(vendor, "npu", (0, 1, 2), vendor.make_group, limit=5.0)
    assert communicator.edit((0, 2), share) == "rebuilt"
    assert communicator.order == (0, 2)
    assert communicator.edit((0, 2), share) == "rebuilt"
    communicator.close()
    communicator.close()
    assert vendor.calls == [
        ("make", (0, 1, 2)),
        ("abort", "edit"),
        ("make", (0, 2)),
        ("reinit", True),
        ("abort", "edit"),
    ]


def test_a_hanging_abort_is_bounded() -> None:
    vendor = Vendor(hang=5.0)
    communicator = HcclCommunicator(vendor, "npu", (0, 1), vendor.make_group, limit=0.1)
    with pytest.raises(VendorHang, match="abort_hccl_comm"):
        communicator.edit((0,), share)


def test_the_names_exist_in_torch_npu() -> None:
    wheels = sorted(Path(os.environ.get("ELASTIC_WHEELS", "/nonexistent")).glob("torch_npu-*.whl"))
    if not wheels:
        pytest.skip("ELASTIC_WHEELS holds no torch_npu wheel")
    with zipfile.ZipFile(wheels[-1]) as archive:
        source = archive.read("torch_npu/distributed/distributed_c10d.py").decode()
    for name in MODULE_NAMES:
        assert f"def {name}(group=None, rebuild_link=True)" in source
    for name in GROUP_NAMES:
        assert f".{name}(" in source
