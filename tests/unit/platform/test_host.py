"""The host as a device: streams have nothing pending, events read the clock, memory is the machine's."""

from __future__ import annotations

import mmap
import time

import pytest
import torch

from megatron.elastic.platform.host_memory import machine_memory, process_memory
from megatron.elastic.platform.streams import HostEvent, HostStream, use_stream

MIB = 1 << 20


def test_an_event_measures_the_time_between_two_records() -> None:
    begin, end = HostEvent(enable_timing=True), HostStream().record_event()
    before = time.perf_counter_ns()
    begin.record()
    inside = time.perf_counter_ns()
    end.record(HostStream())
    after = time.perf_counter_ns()
    assert 0 <= begin.elapsed_time(end) <= (after - before) / 1e6
    assert begin.elapsed_time(end) == -end.elapsed_time(begin)
    assert (end._recorded_ns - inside) >= 0 and begin.query()


def test_an_event_of_another_device_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a HostEvent, got Event"):
        HostEvent().elapsed_time(torch.Event("cpu"))


def test_work_on_a_stream_has_ended_when_the_call_returns() -> None:
    stream, given = HostStream(priority=-1), HostEvent()
    with use_stream(stream) as entered:
        total = torch.ones(1000).sum()
    assert entered is stream and stream.query() and total == 1000 and stream.priority == -1
    assert stream.record_event(given) is given
    other = HostStream()
    other.wait_event(given), other.wait_stream(stream)
    assert other.query()


def test_pages_that_this_process_touches_count_and_stay_in_its_peak() -> None:
    before, _ = process_memory()
    with mmap.mmap(-1, 64 * MIB) as pages:
        for at in range(0, 64 * MIB, mmap.PAGESIZE):
            pages[at] = 1
        held, peak = process_memory()
        assert held - before >= 60 * MIB and peak >= held
    freed, later = process_memory()
    assert freed <= held - 60 * MIB and later >= held - MIB, "freed pages stay in the peak"


def test_the_machine_has_memory_for_this_process() -> None:
    total, available = machine_memory()
    assert 0 < available <= total and process_memory()[0] < total
