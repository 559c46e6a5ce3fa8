"""Sample-keyed dropout as one kernel on devices that Triton compiles for (CUDA; Ascend by triton-ascend).

The same masks and the same rounding as ``csrc/random``: one Philox block makes four
neighbouring stretches of sixteen elements, so a program forms 1,024 blocks and writes
4,096 elements. Layouts are those of Megatron's sites: one run of elements that is
contiguous in memory and in coordinate behind the sample dimension, and at most one
dimension before it (:func:`row_layout`).

Invariant: bits equal to the CPU kernel's (tests run this one in Triton's interpreter).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

from megatron.elastic.engine.compute.device_numbers import on_device
from megatron.elastic.engine.compute.philox import philox

__all__ = ["DTYPES", "RowLayout", "launch", "row_layout"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCKS = 1024
_WORD = (1 << 32) - 1


@dataclass(frozen=True)
class RowLayout:
    """A tensor [outer, samples, run]: row (o, b) has coordinates from ``first + o·stride`` on, of sample b."""

    outer: int
    samples: int
    run: int
    first: int
    stride: int


def row_layout(sizes: Sequence[int], sample_dim: int, extent: Sequence[int], offset: Sequence[int]) -> RowLayout | None:
    """Return the layout of a slice as rows; None if it is cut in more dimensions than rows can express."""
    outer, inner = sizes[:sample_dim], sizes[sample_dim + 1 :]
    whole = [size == full for size, full in zip([*outer, *inner], extent, strict=True)]
    before, behind = whole[: len(outer)], whole[len(outer) :]
    if not all(before[1:]) or not all(behind[1:]):
        return None
    stride = prod(extent[len(outer) :])
    first = sum(o * prod(extent[d + 1 :]) for d, o in enumerate(offset))
    return RowLayout(prod(outer), sizes[sample_dim], prod(inner), first, stride)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _rounded(value, dtype: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton reads annotations
    """Round fp32 to ``dtype``, to nearest even; bf16 in integers, since Triton's interpreter truncates there."""
    if dtype == tl.bfloat16:
        raw = value.to(tl.uint32, bitcast=True)
        raw = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
        return tl.where(value == value, raw, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)


@triton.jit(do_not_specialize=["samples", "run", "first", "stride"])  # type: ignore[untyped-decorator,unused-ignore]
def _kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations
    src, residual, dst, words, scale, samples, run, first, stride, ADD: tl.constexpr, BLOCKS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    sample = row % samples
    start = first.to(tl.int64) + (row // samples) * stride.to(tl.int64)  # coordinate of the row's first element
    key = tl.load(words)
    drop_below = tl.load(words + 1).to(tl.uint32)
    word2 = tl.load(words + 2 + 2 * sample).to(tl.uint32)
    word3 = tl.load(words + 3 + 2 * sample).to(tl.uint32)
    block = (start // 64) * 16 + tl.program_id(1).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    lane = block % 16
    low = (block & 0xFFFFFFFF).to(tl.uint32)
    high = (block >> 32).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(key, low, high, tl.zeros_like(low) + word2, tl.zeros_like(low) + word3)
    for w in tl.static_range(4):
        drawn = r0 if w == 0 else (r1 if w == 1 else (r2 if w == 2 else r3))
        at = (block // 16) * 64 + 16 * w + lane - start  # position in the row
        inside = (at >= 0) & (at < run)
        address = row * run + at
        x = tl.load(src + address, mask=inside, other=0.0).to(tl.float32)
        y = _rounded(tl.where(drawn >= drop_below, x * scale, 0.0), dst.dtype.element_ty)
        if ADD:
            r = tl.load(residual + address, mask=inside, other=0.0).to(tl.float32)
            y = _rounded(r + y.to(tl.float32), dst.dtype.element_ty)
        tl.store(dst + address, y, mask=inside)


def launch(
    x: Tensor,
    residual: Tensor | None,
    layout: RowLayout,
    *,
    seed: int,
    step: int,
    unit: int,
    site: int,
    samples: Sequence[int],
    drop_below: int,
    scale: float,
) -> Tensor:
    """Return ``dropout(x)`` (+ residual), new. ``x`` and ``residual`` must be contiguous, of one of ``DTYPES``."""
    d0, d1, d2, d3 = (int(word) for word in philox((step & _WORD, step >> 32, unit, site), (seed & _WORD, seed >> 32)))
    key = d0 | d1 << 32
    words = [key - (1 << 64) if key >> 63 else key, drop_below]
    for sample in samples:
        words += [d2 ^ (sample & _WORD), d3 ^ (sample >> 32)]
    out = torch.empty_like(x)
    rows = layout.outer * layout.samples
    if rows == 0 or layout.run == 0:
        return out
    groups = (layout.run + 126) // 64  # a run that starts inside a group touches one more
    _kernel[(rows, triton.cdiv(groups * 16, _BLOCKS))](
        x,
        x if residual is None else residual,
        out,
        on_device(words, x.device),
        scale,
        layout.samples,
        layout.run,
        layout.first,
        layout.stride,
        ADD=residual is not None,
        BLOCKS=_BLOCKS,
        enable_fp_fusion=False,  # round the product before the addition, as the other implementations do
    )
    return out
