"""The masks of ``csrc/random``, computed with tensor operations.

This works on any device of torch, in exact int64 arithmetic. On CPU the native kernel
is used, and tests compare it with this module. ``csrc/random/philox.h`` and
``keep_bits.h`` define the computation.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3"
(SC 2011), section 3.3 (Philox4x32-10).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.elastic.engine.compute.device_numbers import on_device

__all__ = ["keep_mask", "philox", "random_words"]

_WORD = (1 << 32) - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Word = Tensor | int


def _halves(value: Word, multiplier: int) -> tuple[Word, Word]:
    """Return the high and low 32 bits of a product; int64 wraps modulo 2^64, so no bit is lost."""
    product = value * multiplier
    return (product >> 32) & _WORD, product & _WORD


def philox(counter: Sequence[Word], key: Sequence[int]) -> tuple[Word, Word, Word, Word]:
    """Return four 32-bit words of one block (ints) or of a tensor of blocks (int64 tensors that broadcast)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _halves(c0, _MULTIPLIERS[0])
        high1, low1 = _halves(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _coordinates(
    sizes: Sequence[int], sample_dim: int, extent: Sequence[int], offset: Sequence[int], device: torch.device
) -> Tensor:
    """Return the global row-major coordinate over the non-sample dimensions, int64, size 1 along ``sample_dim``."""
    coordinate = torch.zeros([1] * len(sizes), dtype=torch.int64, device=device)
    stride = 1
    others = [d for d in range(len(sizes)) if d != sample_dim]
    for position in range(len(others) - 1, -1, -1):
        dim = others[position]
        along = torch.arange(offset[position], offset[position] + sizes[dim], dtype=torch.int64, device=device)
        shape = [1] * len(sizes)
        shape[dim] = sizes[dim]
        coordinate = coordinate + along.view(shape) * stride
        stride *= extent[position]
    return coordinate


def keep_mask(
    *,
    sizes: Sequence[int],
    sample_dim: int,
    extent: Sequence[int],
    offset: Sequence[int],
    seed: int,
    step: int,
    unit: int,
    site: int,
    samples: Sequence[int],
    drop_below: int,
    device: torch.device,
) -> Tensor:
    """Return a boolean tensor of shape ``sizes``: True where the element is kept."""
    words = random_words(
        sizes=sizes,
        sample_dim=sample_dim,
        extent=extent,
        offset=offset,
        seed=seed,
        step=step,
        unit=unit,
        site=site,
        samples=samples,
        device=device,
    )
    return words >= drop_below


def random_words(
    *,
    sizes: Sequence[int],
    sample_dim: int,
    extent: Sequence[int],
    offset: Sequence[int],
    seed: int,
    step: int,
    unit: int,
    site: int,
    samples: Sequence[int],
    device: torch.device,
) -> Tensor:
    """Return an int64 tensor of shape ``sizes``: the 32-bit word of each element."""
    d0, d1, d2, d3 = philox((step & _WORD, step >> 32, unit, site), (seed & _WORD, seed >> 32))
    assert isinstance(d0, int) and isinstance(d1, int)
    shape = [1] * len(sizes)
    shape[sample_dim] = len(samples)
    low = on_device([sample & _WORD for sample in samples], device).view(shape) ^ d2
    high = on_device([sample >> 32 for sample in samples], device).view(shape) ^ d3
    coordinate = _coordinates(sizes, sample_dim, extent, offset, device)
    block = (coordinate >> 6) * 16 + (coordinate & 15)
    words = philox((block & _WORD, block >> 32, low, high), (d0, d1))
    wanted = ((coordinate >> 4) & 3).expand(list(sizes))
    chosen = torch.zeros(list(sizes), dtype=torch.int64, device=device)
    for lane, word in enumerate(words):
        chosen = torch.where(wanted == lane, word, chosen)
    return chosen
