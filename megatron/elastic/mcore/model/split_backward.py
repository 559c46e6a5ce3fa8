"""Backward in two parts for Megatron's local linear layers: input gradient now, weight gradient later.

Megatron's own linear layers have no such split (their ``backward_dw`` does nothing). Here another autograd function
replaces that of Column- and RowParallelLinear. While a piece is *deferring*, its backward computes the input gradient
(with its all-reduce or reduce-scatter) and the gradients of small parameters. It queues the operands of the weight's
gradient: input and output gradient. Running the queue computes these products, with the shapes of the whole backward
and in the order of the pieces, so every bit equals the whole backward's. Outside of :meth:`SplitLinears.deferring`
Megatron's function runs unchanged. Transformer Engine's layers split their backward themselves and pass the other
half to :mod:`split_te`.

Under sequence parallelism the queue keeps the sharded input and gathers it again when the product is computed, as
Megatron's backward does. A weight that the same piece uses twice is not deferred, such as tied embeddings on a stage
that holds both ends. Autograd adds its two contributions before they are accumulated, and that sum must not change.

Source: Zero Bubble Pipeline Parallelism (Qi et al., arXiv 2401.10241), section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

__all__ = ["Deferred", "SplitLinears", "WeightQueue"]


class Deferred(Protocol):
    """Gradients that one layer's backward pass left out."""

    def form(self) -> Iterable[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Return each parameter and its gradient, of its shape and type. Call once; may be collective over the cell."""
        ...


@dataclass(frozen=True)
class _Product:
    """A deferred weight gradient. ``source``: the layer's input, ``gradient``: its 2-D output gradient."""

    weight: torch.nn.Parameter
    source: torch.Tensor
    gradient: torch.Tensor
    gather: dist.ProcessGroup | None

    def form(self) -> tuple[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Return the weight and its gradient (:class:`Deferred`)."""
        source = self.source if self.gather is None else _gathered(self.source, self.gather)
        return ((self.weight, self.gradient.t().matmul(_flat(source))),)


@dataclass
class WeightQueue:
    """Weight gradients left out by one piece's backward pass, in the order autograd met them."""

    _left_out: list[Deferred] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._left_out)

    def run(self, accumulate: Callable[[torch.nn.Parameter, torch.Tensor], None]) -> None:
        """Compute and accumulate every deferred gradient. Collective over the cell under sequence parallelism."""
        with torch.no_grad():
            for deferred in self._left_out:
                for parameter, gradient in deferred.form():
                    accumulate(parameter, gradient)
        self._left_out.clear()

    def put(self, deferred: Deferred) -> None:
        """Add ``deferred`` to the queue."""
        self._left_out.append(deferred)


@dataclass
class SplitLinears:
    """The switch shared by all replaced layers of one model."""

    active: bool = False
    queue: WeightQueue | None = None
    whole: frozenset[int] = frozenset()

    def install(self, model: torch.nn.Module) -> None:
        """Make every trainable local linear layer of ``model`` splittable."""
        for module in model.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module._forward_impl = _splittable(module._forward_impl, self)

    @contextmanager
    def deferring(self, whole: Collection[torch.nn.Parameter] = ()) -> Iterator[WeightQueue]:
        """Make layers that run inside splittable; backward passes inside put weight gradients into the queue.

        ``whole``: weights whose gradient is computed at once nevertheless.
        """
        queue = WeightQueue()
        before = self.active, self.queue, self.whole
        self.active, self.queue, self.whole = True, queue, frozenset(map(id, whole))
        try:
            yield queue
        finally:
            self.active, self.queue, self.whole = before

    def defers(self, weight: torch.nn.Parameter) -> WeightQueue | None:
        """Return the queue for the gradient of ``weight``; None if it is to be computed at once."""
        return None if id(weight) in self.whole else self.queue


def _splittable(original: Callable[..., torch.Tensor], switch: SplitLinears) -> Callable[..., torch.Tensor]:
    def forward(input: torch.Tensor, weight: torch.nn.Parameter, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Not a leaf: a separate use of a weight, whose gradient goes to a sink (exact mode).
        splits = switch.active and weight.requires_grad and weight.is_leaf and kwargs.get("grad_output_buffer") is None
        if not splits or kwargs.get("gradient_accumulation_fusion"):
            return original(input, weight, *args, **kwargs)
        collective = bool(kwargs["allreduce_dgrad"] or kwargs["sequence_parallel"])
        group = kwargs.get("tp_group") or (parallel_state.get_tensor_model_parallel_group() if collective else None)
        settings = _LinearSettings(
            switch, weight, bool(kwargs["allreduce_dgrad"]), bool(kwargs["sequence_parallel"]), group
        )
        return _SplitLinear.apply(input, weight, kwargs["bias"], settings)  # type: ignore[no-any-return, no-untyped-call]

    return forward


@dataclass(frozen=True)
class _LinearSettings:
    switch: SplitLinears
    weight: torch.nn.Parameter
    """The parameter itself: autograd may unpack another object."""
    all_reduce: bool
    sequence_parallel: bool
    group: dist.ProcessGroup | None


class _SplitLinear(torch.autograd.Function):
    """The product of ``input`` [s, b, in] and the transposed ``weight`` [out, in]; ``s`` may be a slice."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, settings: _LinearSettings
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.settings, ctx.has_bias = settings, bias is not None
        output = torch.matmul(_gathered(input, settings.group) if settings.sequence_parallel else input, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        source, weight = ctx.saved_tensors
        settings: _LinearSettings = ctx.settings
        flat = _flat(gradient.contiguous())
        result = gradient.matmul(weight)
        work: dist.Work | None = None
        if settings.sequence_parallel:
            whole, result = result, torch.empty_like(source)
            work = dist.reduce_scatter_tensor(result, whole, group=settings.group, async_op=True)
        elif settings.all_reduce:
            work = dist.all_reduce(result, group=settings.group, async_op=True)
        product = _Product(settings.weight, source, flat, settings.group if settings.sequence_parallel else None)
        queue = settings.switch.defers(settings.weight)
        if queue is not None:
            queue.put(product)
        weight_gradient = product.form()[0][1] if queue is None else None
        bias_gradient = flat.sum(dim=0) if ctx.has_bias else None
        if work is not None:
            work.wait()
        return result, weight_gradient, bias_gradient, None


def _gathered(slices: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the whole sequence ``[s, b, h]`` from every rank's slice."""
    assert group is not None
    whole = torch.empty((slices.shape[0] * group.size(), *slices.shape[1:]), dtype=slices.dtype, device=slices.device)
    dist.all_gather_into_tensor(whole, slices.contiguous(), group=group)
    return whole


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[s, b, h]`` as ``[s·b, h]``, contiguous."""
    return tensor.contiguous().view(-1, tensor.shape[-1])
