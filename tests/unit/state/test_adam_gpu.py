"""Replay is bitwise between host and device: the same rounded operations on an NVIDIA GPU as in the native kernel."""

# mypy: disable-error-code="call-arg"
# A state is passed with a star, whose length mypy does not know.

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron.elastic.platform.cuda import CudaPlatform
from megatron.elastic.runtime.owner_memory import device_place
from megatron.elastic.state.adam import AdamScalars, adam_step, adam_step_tensors
from megatron.elastic.state.step_selftest import differing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA device"),
]


@pytest.mark.parametrize("decoupled", [True, False])
def test_ten_steps_on_the_device_end_with_the_hosts_bits(decoupled):
    rng = np.random.default_rng(3)
    n = 1 << 20
    host: Any = [torch.from_numpy(rng.normal(size=n).astype(np.float32)), torch.zeros(n), torch.zeros(n)]
    device: Any = [tensor.cuda() for tensor in host]
    for step in range(1, 11):
        spread = np.exp(rng.uniform(-40, 3, n))
        grad = torch.from_numpy((rng.normal(size=n) * spread).astype(np.float32))
        scalars = AdamScalars(0.37, 3e-4, 0.9, 0.95, 1e-8, 0.1, 1 - 0.9**step, 1 - 0.95**step, decoupled)
        adam_step(*host, grad, scalars)
        adam_step_tensors(*device, grad.cuda(), scalars)
    for name, a, b in zip(("master", "exp_avg", "exp_avg_sq"), host, device, strict=True):
        differing = (a.view(torch.int32) != b.cpu().view(torch.int32)).nonzero().flatten()
        assert not len(differing), f"{name}: {len(differing)} elements, first {differing[:3].tolist()}"


def test_the_kernels_that_owners_are_stepped_with_give_the_hosts_bits():
    place = device_place(CudaPlatform())
    assert place is not None
    assert differing(place) == (), place.kernels.name
