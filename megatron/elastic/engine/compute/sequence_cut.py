"""The positions of the sequence that each rank of a cell holds.

Context parallelism cuts the sequence of a cell into *parts*, one a tensor-parallel group. With n parts it has 2n
chunks, and part i has chunks i and 2n - 1 - i (Megatron-LM, ``get_batch_on_this_cp_rank``). So all parts have about the
same number of pairs of query and key under a causal mask. Where 2n divides the length, the chunks are equal: the
launch's cut is Megatron's own. Otherwise, after a loss, their sizes differ by one *grain*, the number of ranks over
which sequence parallelism cuts each part again. Each part is then a multiple of the grain.

Sequence parallelism (Korthikanti et al., arXiv 2205.05198, §4.2.2) cuts tensors between attention and MLP over the
tensor-parallel ranks of a part, into equal slices of the part's positions. Where the size does not divide them, and
with one rank, each rank holds the whole part.

Positions are *runs*: intervals of the whole sequence, in the order of the local tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

import torch

__all__ = ["Run", "SequenceCut", "held_runs", "is_sliced", "length_of", "part_runs", "taken"]

Run = tuple[int, int]
"""Positions ``[start, stop)`` of the whole sequence."""


@dataclass(frozen=True)
class SequenceCut:
    """The cut of a sequence of ``length`` positions over the ranks of every cell."""

    length: int
    sequence_parallel: bool = False
    """The launch's setting; each cell uses it where its size allows."""
    tensor: int | None = None
    """Ranks that have the same part of the sequence; None: all ranks of a cell (no context parallelism)."""

    def size(self, count: int) -> int:
        """Return the number of ranks of each tensor-parallel group in a cell of ``count`` ranks."""
        return self.tensor or count

    def held(self, index: int, count: int) -> tuple[Run, ...]:
        """Return the positions that rank ``index`` of a cell of ``count`` ranks holds."""
        size = self.size(count)
        part = part_runs(self.length, index // size, count // size, self.grain(count))
        return held_runs(part, index % size, size) if self.sequence_parallel else part

    def grain(self, count: int) -> int:
        """Return the number of positions that a cell of ``count`` ranks keeps together (:func:`part_runs`)."""
        return self.size(count) if self.sequence_parallel and is_sliced(self.size(count), self.length) else 1

    def is_shared(self, index: int, count: int) -> bool:
        """Return whether the ranks of the tensor-parallel group of rank ``index`` hold the same positions."""
        size = self.size(count)
        part = part_runs(self.length, index // size, count // size, self.grain(count))
        return not (self.sequence_parallel and is_sliced(size, length_of(part)))


def is_sliced(count: int, length: int) -> bool:
    """Return whether ``count`` ranks can cut ``length`` positions into equal slices."""
    return count > 1 and length % count == 0


def length_of(runs: Iterable[Run]) -> int:
    """Return the number of positions in ``runs``."""
    return sum(stop - start for start, stop in runs)


@cache
def part_runs(length: int, index: int, count: int, grain: int = 1) -> tuple[Run, ...]:
    """Return the positions of part ``index`` of ``count`` of a sequence.

    ``grain``: parts are multiples of it where it divides the length.
    """
    if length % grain or (length % (2 * count) == 0 and length // count % grain == 0):
        grain = 1
    size, more = divmod(length // grain, 2 * count)
    cuts = [0, *accumulate(grain * (size + (chunk < more)) for chunk in range(2 * count))]
    chunks = list(pairwise(cuts))
    return _joined((chunks[index], chunks[2 * count - 1 - index]))


@cache
def held_runs(part: tuple[Run, ...], index: int, count: int) -> tuple[Run, ...]:
    """Return the positions of slice ``index`` of ``count`` of a part; the whole part where it cannot be cut so."""
    length = length_of(part)
    if not is_sliced(count, length):
        return part
    size = length // count
    first, end, found, at = index * size, (index + 1) * size, list[Run](), 0
    for start, stop in part:
        low, high = max(first, at), min(end, at + stop - start)
        if low < high:
            found.append((start + low - at, start + high - at))
        at += stop - start
    return tuple(found)


def taken(tensor: torch.Tensor, runs: Sequence[Run], dim: int) -> torch.Tensor:
    """Return the positions ``runs`` of dimension ``dim``; a view if they are adjacent."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Return the same positions without empty runs, adjacent ones joined."""
    found = list[Run]()
    for start, stop in runs:
        if start == stop:
            continue
        joined = bool(found) and found[-1][1] == start
        found.append((found.pop()[0] if joined else start, stop))
    return tuple(found)
