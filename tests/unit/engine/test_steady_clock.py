"""Times of pieces change plans only where they measure the rank that took them."""

from __future__ import annotations

import os

import pytest

from megatron.elastic.config import ElasticConfig
from megatron.elastic.platform.base import Platform
from megatron.elastic.platform.cpu import CpuPlatform
from megatron.elastic.platform.cuda import CudaPlatform
from megatron.elastic.runtime import assembly


@pytest.mark.parametrize(
    ("kind", "ranks", "places", "asked", "steady"),
    [
        (CpuPlatform, 2, 4, "auto", True),
        (CpuPlatform, 8, 4, "auto", False),
        (CudaPlatform, 4, 4, "auto", True),
        (CudaPlatform, 8, 4, "auto", False),
        (CudaPlatform, 8, 4, "on", True),
        (CpuPlatform, 8, 4, "on", True),
        (CpuPlatform, 1, 4, "off", False),
    ],
)
def test_times_count_where_a_rank_has_a_processor_or_a_device_of_its_own(
    monkeypatch: pytest.MonkeyPatch, kind: type[Platform], ranks: int, places: int, asked: str, steady: bool
) -> None:
    monkeypatch.setattr(assembly, "select", kind)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(places)))
    monkeypatch.setattr(CudaPlatform, "device_count", lambda self: places)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert assembly._has_steady_clock(ElasticConfig(fail_slow=asked)) is steady  # type: ignore[arg-type]
