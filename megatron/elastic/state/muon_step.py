"""One step of Muon for a whole matrix: momentum, orthogonalised by a Newton-Schulz iteration.

The momentum is an exponential mean of gradients. A few steps of a polynomial iteration push its singular values
towards one; the result, scaled by the matrix's shape, is the update. Weight decay is decoupled from it.

A product of matrices may have other bits on another processor, so copies do not repeat this step: they receive the
stepped state (``state`` mode, docs/design.md §6).

Sources: K. Jordan, "Muon: an optimizer for hidden layers" (kellerjordan.github.io/posts/muon); scale factors from
arXiv 2502.16982 and 2502.07529. Decay and rounding follow Megatron-core 0.17's Muon over
emerging-optimizers 0.3.0 (``orthogonalized_optimizer.py``); parity is tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron.elastic.state.layout import Matrix
from megatron.elastic.state.muon import Muon, Precision

__all__ = ["MuonScalars", "muon_step", "orthogonalize"]

_SMALLEST_NORM = 1e-7


@dataclass(frozen=True)
class MuonScalars:
    """Scalars of one step, as those of Adam (:class:`AdamScalars`)."""

    grad_multiplier: float
    lr: float
    weight_decay: float
    muon: Muon


def muon_step(
    master: torch.Tensor, momentum: torch.Tensor, grad: torch.Tensor, matrix: Matrix, scalars: MuonScalars
) -> None:
    """Update ``master`` and ``momentum`` in place (fp32, of one device, padded beyond ``matrix.numel`` elements)."""
    s, muon = scalars, scalars.muon
    shape = matrix.rows, matrix.columns
    weight, mean, gradient = (flat[: matrix.numel].view(shape) for flat in (master, momentum, grad))
    gradient = gradient * s.grad_multiplier
    if s.weight_decay:
        weight.add_(weight, alpha=-s.weight_decay * s.lr)
    mean.lerp_(gradient, 1.0 - muon.momentum)
    direction = gradient.lerp(mean, muon.momentum) if muon.nesterov else mean
    weight.add_(_update(direction, matrix, muon), alpha=-s.lr)


def _update(direction: torch.Tensor, matrix: Matrix, muon: Muon) -> torch.Tensor:
    """Return the scaled update of ``direction`` [rows, columns], each part of a fused matrix on its own."""
    if not matrix.parts:
        return orthogonalize(direction, muon) * muon.factor(matrix.rows, matrix.columns)
    groups = direction.view(-1, sum(matrix.parts), matrix.columns)
    updates = []
    for part in groups.split(matrix.parts, dim=1):
        whole = part.reshape(-1, matrix.columns)
        updates.append((orthogonalize(whole, muon) * muon.factor(*whole.shape)).view(part.shape))
    return torch.cat(updates, dim=1).view(direction.shape)


def orthogonalize(values: torch.Tensor, muon: Muon) -> torch.Tensor:
    """Return fp32 ``values`` [m, n] with singular values near one (zero stays zero), by Newton-Schulz iterations."""
    tall = values.shape[0] > values.shape[1]
    x = values.mT if tall else values
    x = x / torch.linalg.vector_norm(x).clamp_min(_SMALLEST_NORM)
    if muon.precision == "medium":
        x = x.to(torch.bfloat16)
    with _products_of(muon.precision):
        for a, b, c in muon.rounds():
            gram = x @ x.mT
            x = torch.addmm(x, torch.addmm(gram, gram, gram, alpha=c, beta=b), x, beta=a)
    x = x.to(torch.float32)
    return x.mT if tall else x


@contextmanager
def _products_of(precision: Precision) -> Iterator[None]:
    """Have torch compute fp32 products in this precision inside the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
