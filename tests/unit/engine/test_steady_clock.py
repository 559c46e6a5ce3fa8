"""Times of pieces change plans only where they measure the rank that took them."""

from __future__ import annotations

import os

import pytest

from megatron.elastic.config import ElasticConfig
from megatron.elastic.engine.generation.hardware import Hardware
from megatron.elastic.platform.base import Platform
from megatron.elastic.platform.cpu import CpuPlatform
from megatron.elastic.platform.cuda import CudaPlatform
from megatron.elastic.runtime import assembly


@pytest.mark.parametrize(
    ("kind", "ranks", "sharing", "asked", "steady"),
    [
        (CpuPlatform, 2, 1, "auto", True),
        (CpuPlatform, 8, 1, "auto", False),
        (CudaPlatform, 8, 1, "auto", True),
        (CudaPlatform, 8, 2, "auto", False),
        (CudaPlatform, 8, 2, "on", True),
        (CpuPlatform, 8, 1, "on", True),
        (CpuPlatform, 1, 1, "off", False),
    ],
)
def test_times_count_where_a_rank_has_a_processor_or_a_device_of_its_own(
    monkeypatch: pytest.MonkeyPatch, kind: type[Platform], ranks: int, sharing: int, asked: str, steady: bool
) -> None:
    """A process may see one device of its own, so the number that it sees tells nothing about others."""
    monkeypatch.setattr(assembly, "select", kind)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    monkeypatch.setattr(CudaPlatform, "device_count", lambda self: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    hardware = Hardware(1 << 30, 1 << 30, sharing=sharing)
    assert assembly._has_steady_clock(ElasticConfig(fail_slow=asked), hardware) is steady  # type: ignore[arg-type]
