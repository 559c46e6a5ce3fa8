"""One interface, three platforms: the CPU runs here, the others keep the contract with torch's own names."""

from __future__ import annotations

import ast
import inspect
import sys
import types
from typing import Any

import pytest
import torch

from megatron.elastic.platform import npu
from megatron.elastic.platform.base import Platform, PlatformUnavailable
from megatron.elastic.platform.cpu import CpuPlatform
from megatron.elastic.platform.cuda import CudaPlatform
from megatron.elastic.platform.npu import NpuPlatform
from megatron.elastic.platform.own_device import own_device, use_own_device
from megatron.elastic.platform.select import ENVIRONMENT_NAME, PLATFORMS, select
from megatron.elastic.platform.vendor import VendorPlatform
from tests.wheels import newest


def test_without_a_device_the_cpu_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_NAME, raising=False)
    if CudaPlatform.available() or NpuPlatform.available():
        pytest.skip("this machine has a device")
    assert isinstance(select(), CpuPlatform)


def test_a_platform_asked_for_by_name_is_never_replaced_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_NAME, "cpu")
    assert isinstance(select(), CpuPlatform)
    monkeypatch.setattr(CudaPlatform, "available", classmethod(lambda cls: False))
    monkeypatch.setenv(ENVIRONMENT_NAME, "cuda")
    with pytest.raises(PlatformUnavailable, match="cuda"):
        select()
    with pytest.raises(PlatformUnavailable, match="one of cuda, npu, cpu"):
        select("tpu")


class OutsidePlatform(CpuPlatform):
    """A platform of another package."""

    present = True

    @classmethod
    def available(cls) -> bool:
        return cls.present


def test_a_platform_of_another_package_is_named_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_NAME, f"{__name__}:OutsidePlatform")
    assert type(select()).__name__ == "OutsidePlatform"
    for name, why in (("no.such.module:Kind", "no such class"), (f"{__name__}:Gone", "no such class")):
        with pytest.raises(PlatformUnavailable, match=why):
            select(name)
    with pytest.raises(PlatformUnavailable, match="this is no Platform"):
        select(f"{__name__}:Calls")
    monkeypatch.setattr(sys.modules[__name__].OutsidePlatform, "present", False)
    with pytest.raises(PlatformUnavailable, match="sees no such device"):
        select()


@pytest.mark.parametrize(("local", "devices", "own"), [(0, 1, 0), (3, 1, 0), (3, 4, 3), (5, 4, 1), (7, 8, 7)])
def test_a_rank_uses_the_device_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, local: int, devices: int, own: int
) -> None:
    calls = Calls()
    monkeypatch.setattr(CudaPlatform, "module", lambda self: calls)
    monkeypatch.setattr(CudaPlatform, "device_count", lambda self: devices)
    use_own_device(CudaPlatform(), {"LOCAL_RANK": str(local)})
    assert calls.made == [("set_device", (own,))]
    with pytest.raises(PlatformUnavailable, match="no device is visible"):
        monkeypatch.setattr(CudaPlatform, "device_count", lambda self: 0)
        own_device(CudaPlatform(), {})


def test_devices_are_preferred_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_NAME, raising=False)
    monkeypatch.setattr(CudaPlatform, "available", classmethod(lambda cls: True))
    assert isinstance(select(), CudaPlatform)


@pytest.mark.parametrize("kind", PLATFORMS.values(), ids=PLATFORMS)
def test_every_platform_implements_the_whole_interface(kind: type[Platform]) -> None:
    assert not inspect.isabstract(kind)
    assert kind().name in PLATFORMS and kind.default_backend in ("gloo", "nccl", "hccl")


def test_cpu_memory_and_streams() -> None:
    cpu = CpuPlatform()
    memory = cpu.memory()
    assert 0 < memory.used <= memory.peak < memory.total and memory.free < memory.total
    stream = cpu.new_stream()
    with cpu.use_stream(stream):
        event = cpu.new_event(timing=True)
        event.record(stream)
    stream.wait_event(event)
    stream.wait_stream(cpu.current_stream())
    cpu.synchronize()
    assert event.query() and cpu.device(3) == torch.device("cpu") and cpu.device_count() == 1


def test_cpu_seeds_and_state_round_trip() -> None:
    cpu = CpuPlatform()
    cpu.seed(11)
    first = torch.rand(2)
    state = cpu.rng_state()
    second = torch.rand(2)
    cpu.set_rng_state(state)
    assert torch.equal(second, torch.rand(2))
    cpu.seed(11)
    assert torch.equal(first, torch.rand(2))


VENDOR_NAMES = (
    "device_count",
    "get_device_name",
    "set_device",
    "synchronize",
    "Stream",
    "current_stream",
    "stream",
    "Event",
    "mem_get_info",
    "memory_allocated",
    "max_memory_allocated",
    "empty_cache",
    "manual_seed",
    "get_rng_state",
    "set_rng_state",
    "is_available",
)


@pytest.mark.parametrize("name", VENDOR_NAMES)
def test_torch_cuda_has_every_name_the_vendor_platforms_call(name: str) -> None:
    assert callable(getattr(torch.cuda, name))


@pytest.mark.slow
def test_torch_npu_has_every_name_the_vendor_platforms_call() -> None:
    """Of a wheel of 44 MB: its newest release. ``torch.npu`` is its package ``npu``."""
    with newest("torch-npu") as archive:
        module = ast.parse(archive.read("torch_npu/npu/__init__.py"))
        assert "torch_npu/contrib/transfer_to_npu.py" in archive.namelist()
    (public,) = (
        ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert set(VENDOR_NAMES) <= set(public)


class Calls:
    """A device module that records what is called on it."""

    def __init__(self) -> None:
        self.made: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        if name not in VENDOR_NAMES:
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.made.append((name, args))
            return (5, 9) if name == "mem_get_info" else 3

        return call


def test_the_vendor_platforms_call_only_names_that_torch_gives_both(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (CudaPlatform, NpuPlatform):
        calls = Calls()
        monkeypatch.setattr(kind, "module", lambda self, calls=calls: calls)
        platform = kind()
        platform.set_device(1)
        platform.synchronize()
        platform.new_stream(), platform.current_stream(), platform.use_stream(platform.new_stream())
        platform.new_event(timing=True)
        memory = platform.memory(1)
        platform.release_cached_memory()
        platform.seed(4)
        platform.set_rng_state(platform.rng_state())
        assert (memory.free, memory.total, memory.used, memory.peak) == (5, 9, 3, 3)
        assert ("set_device", (1,)) in calls.made and ("memory_allocated", (1,)) in calls.made
        assert platform.device_count() == 3 and "3 × 3" in platform.describe()
        assert isinstance(platform, VendorPlatform) and not platform.synchronous
        on_device = torch.empty(2, device="meta")
        assert platform.pin(on_device) is on_device, "only host memory is pinned"


def test_ascend_is_available_only_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not NpuPlatform.available()
    with pytest.raises(PlatformUnavailable, match="torch_npu"):
        NpuPlatform().prepare()


def test_ascend_is_readied_by_its_own_redirection(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []

    def import_module(name: str) -> types.ModuleType:
        imported.append(name)
        return types.ModuleType(name)

    monkeypatch.setattr(NpuPlatform, "available", classmethod(lambda cls: True))
    named: list[str] = []
    monkeypatch.setattr("importlib.import_module", import_module)
    monkeypatch.setattr(npu, "named_as_cuda", named.append)
    NpuPlatform().prepare()
    assert imported == ["torch_npu.contrib.transfer_to_npu"] and named == ["npu"]
