"""A child counts the CUDA devices, so that the process that asks stays fit for a fork."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from megatron.elastic.launch.workers import device_count
from megatron.elastic.launch.workers.device_count import counted_by_a_child
from megatron.elastic.launch.workers.processes import thread_count


@pytest.fixture
def devices(monkeypatch, tmp_path):
    """A machine with CUDA devices; what is returned says how torch counts them."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device_count, "_DEVICES", os.fspath(tmp_path))

    def counted(by):
        monkeypatch.setattr(torch.cuda, "device_count", by)

    return counted


def test_torch_knows_the_count_inside_and_forgets_it_after(devices):
    def count():
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # as NVML does
        return 3

    devices(count)
    before = thread_count()
    with counted_by_a_child():
        assert torch.cuda._cached_device_count == 3
    assert torch.cuda._cached_device_count is None
    assert thread_count() == before


def fails():
    raise RuntimeError("the driver is broken")


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def hangs():
    time.sleep(600)


@pytest.mark.parametrize("count", [fails, dies, hangs])
def test_nothing_is_known_where_the_child_cannot_tell(devices, monkeypatch, count):
    monkeypatch.setattr(device_count, "_SECONDS", 1.0)
    devices(count)
    with counted_by_a_child():
        assert torch.cuda._cached_device_count is None


def test_no_child_is_made_where_there_is_no_such_device(monkeypatch):
    monkeypatch.setattr(os, "fork", fails)
    with counted_by_a_child():
        assert torch.cuda._cached_device_count is None
