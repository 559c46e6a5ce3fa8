"""``pretrain_gpt.py`` on the stand-in accelerator with one bug of device code in the engine, named by ``DEVICE_BUG``.

Ends with exit status 1 if a copy was called asynchronous and named pageable memory of the host.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import torch

from megatron.elastic.comm.vendor import host_staging, outbox, staged_message
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.runtime import connect
from tests.standin import device

ROOT = Path(__file__).resolve().parents[2]
UNPINNED = "asynchronous copies that named pageable memory: "


def host_read() -> None:
    """The host reads gradients where they lie, in device memory."""
    right = Arena.block_gradients

    def wrong(arena: Arena, block: object) -> torch.Tensor:
        there = right(arena, block)  # type: ignore[arg-type]
        here = (ctypes.c_float * there.numel()).from_address(there.data_ptr())
        return torch.frombuffer(here, dtype=torch.float32)

    Arena.block_gradients = wrong  # type: ignore[method-assign, assignment]


def missing_wait() -> None:
    """A tensor that goes through host memory is not waited for."""
    host_staging._finish = lambda tensors: None


def missing_event() -> None:
    """A send begins although the device may not have computed its tensor."""
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    vars(outbox)["torch"] = SimpleNamespace(
        Event=lambda at: event, accelerator=torch.accelerator, Tensor=torch.Tensor, device=torch.device
    )


def wrong_device() -> None:
    """A rank does not make its device the current one."""
    vars(connect)["use_own_device"] = lambda platform: None


def unpinned_copy() -> None:
    """A message's host copy is pageable memory."""
    staged_message._beside = lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype)


BUGS: MappingProxyType[str, Callable[[], None]] = MappingProxyType(
    {
        "none": lambda: None,
        "host_read": host_read,
        "missing_wait": missing_wait,
        "missing_event": missing_event,
        "wrong_device": wrong_device,
        "unpinned_copy": unpinned_copy,
    }
)


def main() -> None:
    """Patch, train, count."""
    BUGS[os.environ["DEVICE_BUG"]]()
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
    if copies := device.unpinned_asynchronous_copies():
        print(f"{UNPINNED}{copies}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
