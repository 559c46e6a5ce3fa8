"""Dropout whose masks depend on samples, not on ranks.

The mask of an element is a function of (seed, step, global sample number, unit,
site, use) and the element's coordinate in the whole activation, made by a counter-based
generator (Philox4x32-10; ``csrc/random``). The generator has no state.

Invariant: every computation of a sample drops the same elements, independent of rank,
piece, stage and tensor- or sequence-parallel slice, also in a recomputation.
(docs/design.md §7, RNG axis; ElasWave, arXiv 2510.00606, "computation consistency".)

The engine enters :func:`dropout_scope` with a piece's samples around its forward *and*
its backward, where recomputation runs the forward again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.elastic import _random
from megatron.elastic.engine.compute import thread_state
from megatron.elastic.engine.compute.philox import keep_mask

__all__ = [
    "BiasDropoutAdd",
    "DropoutKey",
    "Intervals",
    "SampleDropout",
    "Section",
    "Site",
    "Split",
    "current_key",
    "dropout_scope",
    "placed",
    "sample_dropout",
]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_U64 = (1 << 64) - 1
_USE_AT = 8
"""The bit of a site's number at which the number of the use begins."""
_SCOPE = "megatron.elastic.engine.compute.dropout.key"


class Site(IntEnum):
    """A place of dropout within a unit. Part of the key: a number must never change its meaning."""

    EMBEDDING = 0
    ATTENTION_PROBS = 1
    ATTENTION_OUTPUT = 2
    CROSS_ATTENTION_PROBS = 3
    CROSS_ATTENTION_OUTPUT = 4
    MLP_OUTPUT = 5
    ROUTER_INPUT = 6


@dataclass(frozen=True)
class DropoutKey:
    """The step and the samples of a piece.

    ``samples``: global sample numbers of the piece's rows, in batch order. ``use``: tells apart the passes of a sample
    through one module, such as the embedding of its tokens and of further tokens.
    """

    seed: int
    step: int
    samples: tuple[int, ...]
    use: int = 0

    def site(self, site: int) -> int:
        """Return the number under which masks of ``site`` are drawn in this use."""
        return site | self.use << _USE_AT


@dataclass(frozen=True)
class Split:
    """An even slice of dimension ``dim``: part ``index`` of ``count`` (a tensor-parallel rank and size)."""

    dim: int
    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"part {self.index} of {self.count}")

    def place(self, size: int) -> tuple[int, int]:
        """Return (extent, offset) of a slice of ``size`` elements in the whole dimension."""
        return size * self.count, size * self.index


@dataclass(frozen=True)
class Section:
    """A slice of any size of dimension ``dim``: it begins at ``start`` of ``extent`` elements."""

    dim: int
    start: int
    extent: int

    def place(self, size: int) -> tuple[int, int]:
        """Return (extent, offset) of the slice. Raises ``ValueError`` if ``size`` elements do not fit."""
        if self.start + size > self.extent:
            raise ValueError(f"{size} elements from {self.start} lie outside of {self.extent}")
        return self.extent, self.start


@dataclass(frozen=True)
class Intervals:
    """Several slices of dimension ``dim``, one behind the other: ``[start, stop)`` of its ``extent`` elements."""

    dim: int
    runs: tuple[tuple[int, int], ...]
    extent: int

    def sections(self) -> Iterator[Section]:
        """Yield each slice by itself."""
        return (Section(self.dim, start, self.extent) for start, _ in self.runs)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of ``x`` in the slices."""
        parts: tuple[Tensor, ...] = x.split([stop - start for start, stop in self.runs], self.dim)
        return parts


@contextmanager
def dropout_scope(key: DropoutKey) -> Iterator[None]:
    """Have dropout inside use ``key``. Scopes nest; each is local to the thread and the backward passes it starts.

    The key is in torch's thread-local state, not in a ``ContextVar``: autograd passes that
    state to its device threads, where recomputation runs the forward again.
    """
    before = current_key()
    thread_state.put(_SCOPE, key)
    try:
        yield
    finally:
        thread_state.put(_SCOPE, before)


def current_key() -> DropoutKey | None:
    """Return the innermost scope's key, or None outside of any scope."""
    key: DropoutKey | None = thread_state.get(_SCOPE)
    return key


@cache
def _odds(p: float) -> tuple[int, float]:
    """Return (threshold, scale) of the drop probability ``p``, met to within 2^-33.

    An element is dropped if its 32-bit word is below the threshold, and else multiplied by the scale.
    """
    return min(round(p * 2**32), 2**32 - 1), 1.0 / (1.0 - p)


class _Mask(NamedTuple):
    """Everything that determines one mask; backward keeps these few bytes instead of a tensor."""

    key: DropoutKey
    p: float
    unit: int
    site: int
    sample_dim: int
    extent: tuple[int, ...]
    offset: tuple[int, ...]

    def apply(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return ``dropout(x)`` (+ residual), new and contiguous; rounded as by separate operators."""
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        if not x.is_cpu or x.dtype not in _DTYPES:
            return self._on_device(x, residual)
        out = torch.empty_like(x)
        key, p, unit, site, sample_dim, extent, offset = self
        added = 0 if residual is None else residual.data_ptr()
        _random.dropout(  # by position: half the cost of a small call is its arguments
            out.data_ptr(),
            x.data_ptr(),
            added,
            x.nbytes,
            _DTYPES[x.dtype],
            x.shape,
            sample_dim,
            extent,
            offset,
            key.seed & _U64,
            key.step,
            unit,
            site,
            key.samples,
            *_odds(p),
        )
        return out

    def _on_device(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Run one Triton kernel if it supports the layout, else tensor operations; the same bits."""
        key, where = self.key, (self.sample_dim, self.extent, self.offset)
        drop_below, scale = _odds(self.p)
        drawn: dict[str, Any] = {
            "seed": key.seed & _U64,
            "step": key.step,
            "unit": self.unit,
            "site": self.site,
            "samples": key.samples,
            "drop_below": drop_below,
        }
        kernel = _triton_kernel() if x.device.type == "cuda" else None
        if kernel is not None and x.dtype in kernel.DTYPES:
            layout = kernel.row_layout(x.shape, *where)
            if layout is not None:
                out: Tensor = kernel.launch(x, residual, layout, scale=scale, **drawn)
                return out
        sample_dim, extent, offset = where
        keep = keep_mask(
            sizes=tuple(x.shape), sample_dim=sample_dim, extent=extent, offset=offset, device=x.device, **drawn
        )
        dropped = torch.where(keep, x * scale, torch.zeros((), dtype=x.dtype, device=x.device))
        return dropped if residual is None else residual + dropped


@cache
def _triton_kernel() -> Any | None:
    """Return the kernel's module; None, with one warning, if Triton is missing."""
    try:
        from megatron.elastic.engine.compute import dropout_triton
    except ImportError as error:
        warnings.warn(f"sample-keyed dropout runs as separate operations (slower, same masks): {error}", stacklevel=2)
        return None
    return dropout_triton


class _Dropout(torch.autograd.Function):
    """Dropout as an autograd function: backward applies the same mask to the gradient.

    Backward computes the mask again instead of keeping it (``tools/bench/dropout.py`` measures both).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, mask: _Mask) -> Tensor:
        ctx.mask = mask
        return mask.apply(x, residual)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        wants_x, wants_residual, _ = ctx.needs_input_grad
        grad_x: Tensor | None = None
        if wants_x and torch.is_grad_enabled():  # a graph of the backward pass is wanted
            grad_x = _Dropout.apply(grad, None, ctx.mask)  # type: ignore[no-untyped-call]
        elif wants_x:
            grad_x = ctx.mask.apply(grad, None)
        return grad_x, grad if wants_residual else None, None


def sample_dropout(
    x: Tensor,
    p: float,
    *,
    unit: int,
    site: int,
    sample_dim: int,
    extent: tuple[int, ...],
    offset: tuple[int, ...],
    residual: Tensor | None = None,
) -> Tensor:
    """Return ``dropout(x, p)``, or ``residual + dropout(x, p)`` in one pass.

    ``extent`` holds the global sizes of all dimensions of ``x`` but ``sample_dim``, in
    order, and ``offset`` the start of this rank's slice in each. Kept elements are scaled
    by 1/(1-p); a dropped element is 0 whatever its value. Always active (no training flag):
    see :class:`SampleDropout`. ``residual`` has x's shape and dtype.

    Raises ``RuntimeError`` outside :func:`dropout_scope`, ``ValueError`` when the key's
    samples do not fit ``x`` or the slice does not fit its extent.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability must be in [0, 1], not {p}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"residual is {residual.dtype}{list(residual.shape)}, x is {x.dtype}{list(x.shape)}")
    _check(x, sample_dim, extent, offset)
    return _drop(x, residual, p, unit, int(site), sample_dim, extent, offset)


def _drop(
    x: Tensor,
    residual: Tensor | None,
    p: float,
    unit: int,
    site: int,
    sample_dim: int,
    extent: tuple[int, ...],
    offset: tuple[int, ...],
) -> Tensor:
    """Return :func:`sample_dropout` of a slice that is known to be inside its extent."""
    if p == 0.0:
        return x if residual is None else residual + x
    if p == 1.0:
        return x * 0.0 if residual is None else residual + x * 0.0
    key = current_key()
    if key is None:
        raise RuntimeError("sample-keyed dropout ran outside dropout_scope: step and samples of its mask are unknown")
    if x.shape[sample_dim] != len(key.samples):
        raise ValueError(
            f"dropout got {x.shape[sample_dim]} rows along dimension {sample_dim}; the scope names "
            f"{len(key.samples)} samples"
        )
    mask = _Mask(key, p, unit, key.site(site), sample_dim, extent, offset)
    if not torch.is_grad_enabled():
        return mask.apply(x, residual)
    out: Tensor = _Dropout.apply(x, residual, mask)  # type: ignore[no-untyped-call]
    return out


def _check(x: Tensor, sample_dim: int, extent: tuple[int, ...], offset: tuple[int, ...]) -> None:
    local = tuple(size for dim, size in enumerate(x.shape) if dim != sample_dim)
    if len(extent) != len(local) or len(offset) != len(local):
        raise ValueError(f"extent {extent} and offset {offset} must name {len(local)} dimensions")
    for size, start, whole in zip(local, offset, extent, strict=True):
        if start < 0 or start + size > whole:
            raise ValueError(f"slice {offset} + {local} lies outside extent {extent}")


def placed(
    sizes: Sequence[int], sample_dim: int, *splits: Split | Section | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (extent, offset) of a tensor of ``sizes`` that is sliced by ``splits`` only."""
    extent, offset = [], []
    sliced = {split.dim: split for split in splits if split is not None}
    for dim, size in enumerate(sizes):
        if dim == sample_dim:
            continue
        whole, start = sliced[dim].place(size) if dim in sliced else (size, 0)
        extent.append(whole)
        offset.append(start)
    return tuple(extent), tuple(offset)


def _drop_placed(
    x: Tensor,
    residual: Tensor | None,
    p: float,
    unit: int,
    site: int,
    sample_dim: int,
    split: Split | Section | None,
    intervals: Intervals | None,
) -> Tensor:
    """Return :func:`sample_dropout` of a tensor that is sliced by ``split`` and ``intervals``."""
    if intervals is None:
        return _drop(x, residual, p, unit, site, sample_dim, *placed(x.shape, sample_dim, split))
    parts = intervals.split(x)
    residuals = [None] * len(parts) if residual is None else intervals.split(residual)
    dropped = [
        _drop(part, beside, p, unit, site, sample_dim, *placed(part.shape, sample_dim, split, section))
        for part, beside, section in zip(parts, residuals, intervals.sections(), strict=True)
    ]
    return dropped[0] if len(dropped) == 1 else torch.cat(dropped, intervals.dim)


class SampleDropout(nn.Module):
    """A replacement of ``nn.Dropout``; identity in eval mode and at p = 0.

    ``unit`` is the unit's number in the whole model (constant when units move),
    ``sample_dim`` the batch dimension of the input. ``split`` is the dimension that tensor
    or sequence parallelism slices, ``intervals`` that of the positions with context parallelism.
    Attention probabilities are [b, np, sq, sk]: sample_dim 0, split dim 1 (heads), intervals of dim 2.
    Hidden states and embeddings are [s, b, h]: sample_dim 1, split or intervals of dim 0.
    """

    def __init__(
        self,
        p: float,
        *,
        unit: int,
        site: Site,
        sample_dim: int,
        split: Split | Section | None = None,
        intervals: Intervals | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability must be in [0, 1], not {p}")
        if split is not None and split.dim == sample_dim:
            raise ValueError("the sample dimension cannot be split: masks depend on sample numbers")
        self.p = p
        self.unit = unit
        self.site = site
        self.sample_dim = sample_dim
        self.split = None if isinstance(split, Split) and split.count == 1 else split
        self.intervals = intervals

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` after dropout, in the same shape and dtype."""
        if not self.training or self.p == 0.0:
            return x
        return _drop_placed(x, None, self.p, self.unit, self.site, self.sample_dim, self.split, self.intervals)

    def extra_repr(self) -> str:
        return f"p={self.p}, unit={self.unit}, site={self.site.name}, split={self.split}"


@dataclass(frozen=True)
class BiasDropoutAdd:
    """A replacement of a layer's ``get_bias_dropout_add``: ``bda(training, fused)(x_with_bias, residual, p)``.

    Not a module, so that it adds nothing to the layer's state. Tensors are [s, b, h].
    """

    unit: int
    site: Site
    split: Split | Section | None = None
    sample_dim: int = 1
    intervals: Intervals | None = None

    def __call__(
        self, training: bool, fused: bool = False
    ) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """Return the function for one call. ``fused`` has no effect: dropout and addition are always one pass."""

        def bias_dropout_add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
            x, bias = x_with_bias
            if x.dtype != residual.dtype:  # fp32 residual stream
                x = x.to(residual.dtype)
                bias = None if bias is None else bias.to(residual.dtype)
            if bias is not None:
                x = x + bias
            if not training or prob == 0.0:
                return residual + x
            if x.shape != residual.shape:
                raise ValueError(f"residual is {list(residual.shape)}, x is {list(x.shape)}")
            where = self.sample_dim, self.split, self.intervals
            return _drop_placed(x, residual, prob, self.unit, self.site, *where)

        return bias_dropout_add
