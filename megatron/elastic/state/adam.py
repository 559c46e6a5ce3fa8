"""One optimizer update, with the same bits on every rank.

Host tensors are updated by one native kernel (``csrc/state/update.hpp``), tensors
of another device by :func:`adam_step_tensors`: the same sequence of individually
rounded fp32 operations as separate torch calls. Both are bitwise equal on CPU
(tested) and should be on CUDA. The square root is taken in fp64 and rounded, which is
exact: torch's fp32 ``sqrt`` on CPU is MKL's, which may be off by one unit in the last
place.

Invariant: the result of an element depends only on its own inputs and the scalars,
not on how the range was split or aligned. NaN payloads may differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron.elastic import _state
from megatron.elastic.state.lion import Lion
from megatron.elastic.state.record import MomentType

__all__ = [
    "AdamScalars",
    "LionScalars",
    "SgdScalars",
    "adam_step",
    "adam_step_runs",
    "adam_step_tensors",
    "address_of",
    "lion_step",
    "lion_step_tensors",
    "round_to_bf16",
    "sgd_step",
    "sgd_step_tensors",
    "single",
    "sum_of_squares",
]


_SIZE = torch.float32.itemsize


@dataclass(frozen=True)
class AdamScalars:
    """Scalars of one Adam step (fp64; each combination is rounded once to fp32).

    ``grad_multiplier`` (1/(tokens · loss scale) · clip coefficient) is applied to
    the gradient first. ``bias_correction1/2`` are ``1 - beta**step``, computed once
    for all ranks and carried in the StepRecord. ``decoupled`` chooses AdamW over L2.
    """

    grad_multiplier: float
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction1: float
    bias_correction2: float
    decoupled: bool = True
    moments: tuple[MomentType, MomentType] = ("fp32", "fp32")
    """Types of the values that exp_avg and exp_avg_sq keep after the step."""

    @cached_property
    def native(self) -> _state.AdamScalars:
        """The same for the native kernel."""
        rates = self.grad_multiplier, self.lr, self.beta1, self.beta2, self.eps, self.weight_decay
        return _state.AdamScalars(*rates, self.bias_correction1, self.bias_correction2, self.decoupled)

    @cached_property
    def fp32(self) -> bool:
        """True if the step keeps all values in fp32."""
        return "bf16" not in self.moments


@dataclass(frozen=True)
class LionScalars:
    """Scalars of one step of Lion with decoupled weight decay."""

    grad_multiplier: float
    lr: float
    weight_decay: float
    lion: Lion


@dataclass(frozen=True)
class SgdScalars:
    """Scalars of one step of SGD with momentum (L2 weight decay), as torch.optim.SGD."""

    grad_multiplier: float
    lr: float
    momentum: float
    weight_decay: float


def address_of(tensor: torch.Tensor, count: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the address of a contiguous host tensor of ``count`` elements. Raises ``ValueError`` for another one."""
    if not tensor.is_cpu or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.numel() != count:
        raise ValueError(
            f"expected a contiguous host tensor of {count} {dtype}, got {tensor.numel()} {tensor.dtype} "
            f"on {tensor.device}, strides {tensor.stride()}"
        )
    return tensor.data_ptr()


def adam_step(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    scalars: AdamScalars,
) -> None:
    """Update ``master``, ``exp_avg``, ``exp_avg_sq`` in place (fp32 host tensors, same length).

    Raises ``ValueError`` for tensors of another kind.
    """
    n = master.numel()
    at, first, second, gradient = (address_of(row, n) for row in (master, exp_avg, exp_avg_sq, grad))
    _state.adam(at, first, second, gradient, n, scalars.native)


def adam_step_runs(
    state: torch.Tensor,
    runs: Sequence[tuple[int, int]],
    steps: Sequence[tuple[torch.Tensor, Sequence[AdamScalars]]],
) -> None:
    """Make one step or two of the elements ``[start, stop)`` of each of ``runs`` in ``state`` (fp32 [3, n]: a block).

    ``steps``: gradient, fp32 [n], and scalars of each run. Two steps take one pass over ``state``, with the bits of one
    after the other. As :func:`adam_step` for each run, without a view of each tensor. Raises ``ValueError`` for tensors
    of another kind, a run outside them, or more steps.
    """
    (grad, first), *more = steps
    n = grad.numel()
    master, row, here = address_of(state, 3 * n), n * _SIZE, address_of(grad, n)
    if more:
        ((grad, second),) = more
        next_one = address_of(grad, n)
    for number, (start, stop) in enumerate(runs):
        if not 0 <= start <= stop <= n:
            raise ValueError(f"elements {start} to {stop} of {n}")
        skipped, count, scalars = start * _SIZE, stop - start, first[number].native
        at = master + skipped
        if more:
            by = here + skipped, next_one + skipped
            _state.adam_twice(at, at + row, at + 2 * row, *by, count, scalars, second[number].native)
        else:
            _state.adam(at, at + row, at + 2 * row, here + skipped, count, scalars)


def lion_step(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    grad: torch.Tensor,
    scalars: LionScalars,
) -> None:
    """Update ``master`` and the momentum ``exp_avg`` in place (fp32 host tensors, same length)."""
    n, s = master.numel(), scalars
    _state.lion(
        address_of(master, n),
        address_of(exp_avg, n),
        address_of(grad, n),
        n,
        s.grad_multiplier,
        s.lr,
        s.lion.beta1,
        s.lion.beta2,
        s.weight_decay,
    )


def sgd_step(
    master: torch.Tensor,
    buffer: torch.Tensor,
    grad: torch.Tensor,
    scalars: SgdScalars,
) -> None:
    """Update ``master`` and the momentum ``buffer`` in place (fp32 host tensors, same length)."""
    n, s = master.numel(), scalars
    _state.sgd(
        address_of(master, n),
        address_of(buffer, n),
        address_of(grad, n),
        n,
        s.grad_multiplier,
        s.lr,
        s.momentum,
        s.weight_decay,
    )


def adam_step_tensors(
    master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad: torch.Tensor, scalars: AdamScalars
) -> None:
    """Update tensors of any device in place, by the kernel's sequence as separate torch operations.

    ``lerp``, ``addcmul``, ``addcdiv`` and ``alpha=`` are not used: they may be contracted to fused
    multiply-adds.
    """
    s = scalars
    g = grad * single(s.grad_multiplier)
    if s.decoupled:
        master.mul_(single(1.0 - s.lr * s.weight_decay))
    else:
        g = g + single(s.weight_decay) * master
    exp_avg.add_((g - exp_avg) * single(1.0 - s.beta1))
    exp_avg_sq.mul_(single(s.beta2)).add_(g * single(1.0 - s.beta2) * g)
    # Division by a tensor: a scalar divisor may be turned into a multiplication by its reciprocal.
    correction = torch.full_like(master, single(math.sqrt(s.bias_correction2)))
    denominator = (exp_avg_sq.double().sqrt().float() / correction).add_(single(s.eps))
    master.sub_((exp_avg * single(s.lr / s.bias_correction1)) / denominator)


def lion_step_tensors(master: torch.Tensor, exp_avg: torch.Tensor, grad: torch.Tensor, scalars: LionScalars) -> None:
    """Update tensors of any device in place, by the sequence of :func:`lion_step` as separate torch operations."""
    s = scalars
    toward = grad * single(s.grad_multiplier) - exp_avg
    direction = torch.sign(exp_avg + toward * single(1.0 - s.lion.beta1))
    exp_avg.add_(toward * single(1.0 - s.lion.beta2))
    master.mul_(single(1.0 - s.lr * s.weight_decay)).sub_(direction * single(s.lr))


def sgd_step_tensors(master: torch.Tensor, buffer: torch.Tensor, grad: torch.Tensor, scalars: SgdScalars) -> None:
    """Update tensors of any device in place, by the sequence of :func:`sgd_step` as separate torch operations."""
    s = scalars
    g = grad * single(s.grad_multiplier) + single(s.weight_decay) * master
    buffer.mul_(single(s.momentum)).add_(g)
    master.sub_(buffer * single(s.lr))


def single(value: float) -> float:
    """Return ``value`` rounded to fp32, as the kernels take it."""
    return float(torch.tensor(value, dtype=torch.float64).to(torch.float32))


def round_to_bf16(source: torch.Tensor, target: torch.Tensor) -> None:
    """Write fp32 ``source`` into bf16 ``target``, to nearest even (the kernel's own rounding)."""
    n = source.numel()
    _state.round_to_bf16(address_of(source, n), address_of(target, n, torch.bfloat16), n)


def sum_of_squares(values: torch.Tensor) -> float:
    """Return the sum of squares of a host fp32 tensor in fp64, in one fixed order (16 lanes, then a binary tree).

    The sum is finite exactly if every element is.
    """
    return float(_state.sum_of_squares(address_of(values, values.numel()), values.numel()))
