"""One process on the first device: whether its kernels have the host's bits, and how fast it steps.

    ELASTIC_PLATFORM=cuda python -m tools.proof.kernels

The last line is one JSON object.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megatron.elastic.engine.compute.dropout import DropoutKey, dropout_scope, sample_dropout
from megatron.elastic.platform.base import Platform
from megatron.elastic.platform.own_device import use_own_device
from megatron.elastic.platform.select import select
from megatron.elastic.runtime.owner_memory import device_place
from megatron.elastic.state.adam import AdamScalars
from megatron.elastic.state.device_place import DevicePlace, tensor_kernels
from megatron.elastic.state.step_selftest import differing

__all__ = ["measured"]

_MOST = 1 << 28
"""Elements that are stepped for the time, where a quarter of the device's memory holds them."""
_BYTES = 28
"""Of an element and step of Adam: four numbers are read, three written."""
_TRIALS = 7
_SIZES = ((1, 3, 130), (5, 2, 64), (2, 2, 5000), (3, 1, 7), (4, 33, 96))
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def measured() -> dict[str, Any]:
    """Return what the device's kernels do. Raises ``RuntimeError`` on a platform whose device is the host."""
    platform = select()
    platform.prepare()
    use_own_device(platform)
    place = device_place(platform)
    if place is None:
        raise RuntimeError("the device of this platform is the host")
    return {
        "kernels": place.kernels.name,
        "differing": list(differing(place)),
        "adam": _adam(platform, place),
        "dropout": _dropout(place.device),
    }


def _adam(platform: Platform, place: DevicePlace) -> dict[str, Any]:
    """Return the seconds of one step of Adam, by the place's kernels and by separate torch operations."""
    elements = min(_MOST, platform.memory(0).total // 4 // _BYTES)
    state, gradient = place.empty(3, elements).zero_(), place.empty(elements).fill_(1e-3)
    scalars = AdamScalars(1.0, 1e-4, 0.9, 0.95, 1e-8, 0.1, 0.1, 0.05)
    master, first, second = state.unbind()
    found: dict[str, Any] = {"elements": elements}
    for name, step in (("kernel", place.kernels.adam), ("operations", tensor_kernels().adam)):
        taken = _seconds(place.device, partial(step, master, first, second, gradient, scalars))
        found |= {f"{name}_seconds": taken, f"{name}_gb_per_second": _BYTES * elements / taken / 1e9}
    return found


def _seconds(device: torch.device, step: Callable[[], None]) -> float:
    """Return the median time of ``step``, queued work included."""
    step()
    taken = []
    for _ in range(_TRIALS):
        torch.accelerator.synchronize(device)
        began = time.monotonic()
        step()
        torch.accelerator.synchronize(device)
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


def _dropout(device: torch.device) -> dict[str, int]:
    """Return the cases of keyed dropout, and how many of them have the host's bits: whole activations and slices."""
    draw = random.Random(5)
    cases = [
        _is_dropped_alike(device, draw, sizes, dtype, adds)
        for sizes in _SIZES
        for dtype in _TYPES
        for adds in (False, True)
    ]
    return {"cases": len(cases), "equal": sum(cases)}


def _is_dropped_alike(
    device: torch.device, draw: random.Random, sizes: tuple[int, ...], dtype: torch.dtype, adds: bool
) -> bool:
    samples = tuple(draw.getrandbits(63) for _ in range(sizes[0]))
    key, before = DropoutKey(draw.getrandbits(64), draw.getrandbits(40), samples), draw.choice((0, 3, 64))
    x, residual = (torch.randn(sizes).to(dtype) for _ in range(2))

    def dropped(values: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        with dropout_scope(key):
            return sample_dropout(
                values,
                0.3,
                unit=2,
                site=1,
                sample_dim=0,
                extent=(sizes[1], sizes[2] + before),
                offset=(0, before),
                residual=added if adds else None,
            )

    return torch.equal(dropped(x, residual), dropped(x.to(device), residual.to(device)).cpu())


if __name__ == "__main__":
    print(json.dumps(measured()))
