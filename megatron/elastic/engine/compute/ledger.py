"""The ledger of a pass: the samples from which its results were really computed.

A :class:`Ledger` records the samples that the data loader delivered and the computations that ran. A plan requires:

- every sample of the step is read once at the first unit and once at the loss, with the same tokens and labels;
- the gradient of every unit contains every sample;
- the loss weights add up to those of the launch's grid.

Two checks refuse a fault:

- A rank refuses its own faults before it reduces a gradient: :meth:`Ledger.read` compares the samples of a piece
  with those that the plan assigns to it.
- The vote refuses faults that only all ranks together can see: ledgers are added, and :meth:`Ledger.findings`
  compares the sum with the plan.

Entries are sums of digests, so they do not depend on the distribution over ranks or on the order. Every sum
of digests is an exact integer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import xxhash

from megatron.elastic.plan.model import Piece

__all__ = [
    "DIGEST_BITS",
    "Expected",
    "Ledger",
    "LedgerError",
    "PieceReading",
    "content_digests",
    "differences",
    "sample_digest",
]

DIGEST_BITS = 63
_MASK = (1 << DIGEST_BITS) - 1
_PRIME = (1 << 61) - 1
"""Products of two digests are summed modulo this Mersenne prime."""
_ROUNDING = 1e-6
"""Relative error allowed in the sum of loss weights."""


class LedgerError(RuntimeError):
    """A piece or a step was computed from other samples than planned."""


@dataclass(frozen=True)
class PieceReading:
    """The samples that a piece read: global sample numbers in row order, and a digest of each one's contents."""

    samples: tuple[int, ...]
    contents: tuple[int, ...]


@dataclass(frozen=True)
class Expected:
    """The ledger that a plan requires for one step, or for the batches of an evaluation."""

    samples: Sequence[int]
    """Global sample numbers, each once."""
    units: int
    """Compute units of the model."""
    weights: float = 0.0
    """Sum of all loss weights of a step: the number of replicas at launch, or 0 with per-token loss."""
    training: bool = True
    complete: bool = True
    """True if all ranks that computed have added their ledger; in a repeated vote only the losses are complete."""


@dataclass
class Ledger:
    """The computations of one rank, or of all ranks when summed."""

    samples: int = 0
    """Number of samples that have a loss."""
    numbers: int = 0
    """Sum of digests of the numbers of those samples."""
    losses: int = 0
    """Sum of digests of (number, contents) of the samples at the loss."""
    inputs: int = 0
    """Sum of digests of (number, contents) of the samples at the first unit."""
    gradients: int = 0
    """Sum over backwards of (digest of its samples × digest of its units)."""
    weights: float = 0.0
    """Sum of the weights of the micro-batch losses."""

    def read(self, piece: Piece, planned: tuple[int, ...], reading: PieceReading | None, units: int) -> None:
        """Enter the samples of ``piece``, if it is the first or last of the ``units`` of the model.

        Raises :class:`LedgerError` if it read other samples than ``planned``.
        """
        first, last = piece.first == 0, piece.end == units
        if not first and not last:
            return
        if reading is None:
            raise LedgerError(
                f"piece {piece.id}: the forward step read nothing from its data iterator, though samples "
                f"{_ranges(planned)} were planned: read one batch a call on the first and the last stage"
            )
        if reading.samples != planned:
            raise LedgerError(
                f"piece {piece.id} was computed from samples {_ranges(reading.samples)} instead of "
                f"{_ranges(planned)}: read one batch a call"
            )
        total = sum(map(sample_digest, reading.samples, reading.contents))
        if first:
            self.inputs += total
        if last:
            self.samples += len(reading.samples)
            self.numbers += sum(map(sample_digest, reading.samples))
            self.losses += total

    def accumulated(self, piece: Piece, samples: Iterable[int]) -> None:
        """Enter a finished backward of ``piece``."""
        self.gradients += _shares(samples, piece.first, piece.end)

    def add(self, other: Ledger) -> None:
        """Add the entries of another pass."""
        self.samples, self.numbers = self.samples + other.samples, self.numbers + other.numbers
        self.losses, self.inputs = self.losses + other.losses, self.inputs + other.inputs
        self.gradients, self.weights = self.gradients + other.gradients, self.weights + other.weights

    def findings(self, expected: Expected) -> list[str]:
        """Return the differences between this sum over all ranks and ``expected``; empty if the step may commit."""
        found = []
        if self.samples != len(expected.samples) or self.numbers != sum(map(sample_digest, expected.samples)):
            found.append(
                f"{self.samples} samples were computed, {len(expected.samples)} belong to it; "
                "each must be computed exactly once"
            )
        if expected.complete and self.inputs != self.losses:
            found.append("tokens at the first stage and labels at the last are not those of the same samples")
        if not expected.training or not expected.complete:
            return found
        if self.gradients % _PRIME != _shares(expected.samples, 0, expected.units):
            found.append("some layer's gradient lacks a sample, or has one twice")
        if abs(self.weights - expected.weights) > _ROUNDING * max(1.0, expected.weights):
            found.append(f"the weights of the losses add up to {self.weights:.6g} instead of {expected.weights:.6g}")
        return found

    @property
    def digest(self) -> str:
        """Digest of the samples and their contents, as hex digits; equal in runs over the same data."""
        return f"{self.numbers:x}.{self.losses:x}"


def differences(readings: Mapping[int, Sequence[Mapping[int, int]]]) -> list[str]:
    """Return one line for each pair of ranks that read different contents of a sample.

    ``readings``: by rank, sample number → contents as read at the first unit, and at the loss.
    """
    last = {sample: (rank, contents) for rank, (_, losses) in readings.items() for sample, contents in losses.items()}
    differing: dict[tuple[int, int], list[int]] = {}
    for rank, (inputs, _) in readings.items():
        for sample, contents in inputs.items():
            other, there = last.get(sample, (rank, contents))
            if there != contents:
                differing.setdefault((rank, other), []).append(sample)
    return [
        f"ranks {rank} and {other} read different contents of samples {_ranges(sorted(samples))}: "
        "compare their data files"
        for (rank, other), samples in sorted(differing.items())
    ]


def content_digests(batch: Any, rows: int) -> tuple[int, ...]:
    """Return one digest a row over all integer tensors in ``batch`` whose first dimension is ``rows``: tokens, labels.

    ``batch`` is the result of a collate function: tensors in dictionaries (in order of names) and sequences.
    """
    hashes = [xxhash.xxh3_64() for _ in range(rows)]
    for tensor in _integers(batch):
        if tensor.dim() > 0 and tensor.shape[0] == rows:
            flat = tensor.detach().cpu().contiguous().view(rows, -1).view(torch.uint8).numpy()
            for number, state in enumerate(hashes):
                state.update(flat[number].data)
    return tuple(state.intdigest() & _MASK for state in hashes)


def _integers(batch: Any) -> Iterable[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        if not (batch.is_floating_point() or batch.is_complex() or batch.dtype == torch.bool):
            yield batch
    elif isinstance(batch, Mapping):
        for name in sorted(batch, key=str):
            yield from _integers(batch[name])
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _integers(part)


def sample_digest(sample: int, contents: int = 0) -> int:
    """Return the digest of one sample's number and contents, :data:`DIGEST_BITS` long."""
    return xxhash.xxh3_64_intdigest(sample.to_bytes(8, "little") + contents.to_bytes(8, "little")) & _MASK


def _shares(samples: Iterable[int], first: int, end: int) -> int:
    """Return the digest of all pairs (sample, unit in ``[first, end)``); disjoint sets add up modulo the prime."""
    return sum(map(sample_digest, samples)) * _units_digest(first, end) % _PRIME


@lru_cache(maxsize=1024)
def _units_digest(first: int, end: int) -> int:
    return sum(sample_digest(unit, _MASK) for unit in range(first, end))


def _ranges(samples: Sequence[int]) -> str:
    """Return ``3-5, 9`` for 3, 4, 5, 9; at most eight ranges."""
    spans: list[list[int]] = []
    for sample in samples:
        if spans and sample == spans[-1][1] + 1:
            spans[-1][1] = sample
        else:
            spans.append([sample, sample])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:8]]
    return ", ".join(texts) + (", ..." if len(spans) > 8 else "")
