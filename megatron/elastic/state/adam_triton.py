"""The optimizer's updates as one kernel each on devices that Triton compiles for (CUDA; Ascend by triton-ascend).

The operations of ``csrc/state/update.hpp`` in its order, each rounded once to fp32: quotients and square roots by
``div_rn`` and ``sqrt_rn``, no contraction of products and sums (``enable_fp_fusion=False``). Scalars are rounded to
fp32 before they are passed on, as the host's are.

Invariant: bits equal to the host kernel's (tests run these in Triton's interpreter; each process tries its device,
:mod:`step_selftest`).
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from megatron.elastic.state.adam import AdamScalars, LionScalars, SgdScalars, single
from megatron.elastic.state.device_place import Kernels

__all__ = ["triton_kernels"]

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _adam(  # type: ignore[no-untyped-def]  # Triton reads annotations
    master,
    exp_avg,
    exp_avg_sq,
    grad,
    multiplier: tl.float32,
    decay: tl.float32,
    one_minus_beta1: tl.float32,
    beta2: tl.float32,
    one_minus_beta2: tl.float32,
    eps: tl.float32,
    step_size: tl.float32,
    correction: tl.float32,
    count,
    DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    p = tl.load(master + at, mask=inside, other=0.0)
    m = tl.load(exp_avg + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
    g = tl.load(grad + at, mask=inside, other=0.0) * multiplier
    if DECOUPLED:
        p = p * decay
    else:
        g = g + decay * p
    m = m + one_minus_beta1 * (g - m)
    v = v * beta2 + (one_minus_beta2 * g) * g
    root = tl.sqrt_rn(v)
    denominator = tl.div_rn(root, tl.zeros_like(root) + correction) + eps
    p = p - tl.div_rn(step_size * m, denominator)
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    tl.store(master + at, p, mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _lion(  # type: ignore[no-untyped-def]  # Triton reads annotations
    master,
    momentum,
    grad,
    multiplier: tl.float32,
    decay: tl.float32,
    one_minus_beta1: tl.float32,
    one_minus_beta2: tl.float32,
    lr: tl.float32,
    count,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    p = tl.load(master + at, mask=inside, other=0.0)
    m = tl.load(momentum + at, mask=inside, other=0.0)
    toward = tl.load(grad + at, mask=inside, other=0.0) * multiplier - m
    c = m + one_minus_beta1 * toward
    direction = tl.where(c > 0.0, 1.0, tl.where(c < 0.0, -1.0, c))
    tl.store(momentum + at, m + one_minus_beta2 * toward, mask=inside)
    tl.store(master + at, p * decay - lr * direction, mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sgd(  # type: ignore[no-untyped-def]  # Triton reads annotations
    master,
    momentum,
    grad,
    multiplier: tl.float32,
    decay: tl.float32,
    friction: tl.float32,
    lr: tl.float32,
    count,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    p = tl.load(master + at, mask=inside, other=0.0)
    g = tl.load(grad + at, mask=inside, other=0.0) * multiplier + decay * p
    b = tl.load(momentum + at, mask=inside, other=0.0) * friction + g
    tl.store(momentum + at, b, mask=inside)
    tl.store(master + at, p - lr * b, mask=inside)


def _launch(kernel: Any, count: int, device: torch.device, *arguments: Any, **constants: Any) -> None:
    rounded = [single(value) if isinstance(value, float) else value for value in arguments]
    on_host = device.type == "cpu"  # Triton's interpreter
    with nullcontext() if on_host else torch.get_device_module(device).device(device):  # it launches on the current one
        kernel[(triton.cdiv(count, _BLOCK),)](*rounded, count, **constants, BLOCK=_BLOCK, enable_fp_fusion=False)


def _adam_step(
    master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad: torch.Tensor, scalars: AdamScalars
) -> None:
    s = scalars
    _launch(
        _adam,
        master.numel(),
        master.device,
        master,
        exp_avg,
        exp_avg_sq,
        grad,
        s.grad_multiplier,
        1.0 - s.lr * s.weight_decay if s.decoupled else s.weight_decay,
        1.0 - s.beta1,
        s.beta2,
        1.0 - s.beta2,
        s.eps,
        s.lr / s.bias_correction1,
        math.sqrt(s.bias_correction2),
        DECOUPLED=s.decoupled,
    )


def _lion_step(master: torch.Tensor, momentum: torch.Tensor, grad: torch.Tensor, scalars: LionScalars) -> None:
    s, lion = scalars, scalars.lion
    decay = 1.0 - s.lr * s.weight_decay
    arguments = (master, momentum, grad, s.grad_multiplier, decay, 1.0 - lion.beta1, 1.0 - lion.beta2, s.lr)
    _launch(_lion, master.numel(), master.device, *arguments)


def _sgd_step(master: torch.Tensor, momentum: torch.Tensor, grad: torch.Tensor, scalars: SgdScalars) -> None:
    s = scalars
    arguments = (master, momentum, grad, s.grad_multiplier, s.weight_decay, s.momentum, s.lr)
    _launch(_sgd, master.numel(), master.device, *arguments)


def triton_kernels() -> Kernels:
    """Return the updates as Triton kernels."""
    return Kernels("Triton kernels", _adam_step, _lion_step, _sgd_step)
