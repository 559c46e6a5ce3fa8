"""Flat layout of one unit's state, and its cut into blocks.

A unit (embedding, transformer layer, final norm + head) has, for each
tensor-parallel shard, one flat fp32 element space that holds all its
parameters. The space is cut into :class:`StateBlock` slices, the granule of
ownership, copies, transfers and hashes (docs/design.md §6).

Invariants
- The layout is a pure function of (unit, shard, parameter list, block size),
  so every holder of (unit, shard) has the same one, also when a unit is held by
  several cells (tied embeddings).
- Parameters start at multiples of :data:`ALIGN` elements. Parameters that
  differ between tensor-parallel ranks come first, replicated ones after them,
  and a block boundary lies between: a block counts in the global gradient norm
  as a whole or not at all.
- Padding belongs to the run before it. Its gradient and state are zero and stay
  zero under the update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

__all__ = ["ALIGN", "BlockKey", "ParamSlot", "ParamSpec", "Run", "StateBlock", "UnitLayout"]

ALIGN = 16
"""Alignment in elements; 64 bytes of fp32: one cache line and one AVX-512 register."""

BlockKey = tuple[int, int, int]
"""(unit, shard, index): the name of a block, also in messages and reports."""


@dataclass(frozen=True)
class ParamSpec:
    """One parameter on this tensor-parallel shard."""

    name: str
    numel: int
    shape: tuple[int, ...]
    sharded: bool
    """True if it differs between tensor-parallel ranks; otherwise it is replicated and counts once in the norm."""
    weight_decay_multiplier: float = 1.0
    lr_multiplier: float = 1.0
    group: int = 0
    """Index of the parameter group whose rate in the StepRecord applies."""

    def __post_init__(self) -> None:
        if self.numel != math.prod(self.shape) or self.numel <= 0:
            raise ValueError(f"parameter {self.name}: {self.numel} elements do not fill shape {self.shape}")


@dataclass(frozen=True)
class ParamSlot:
    """The elements ``[start, stop)`` of the unit's flat space that a parameter takes."""

    spec: ParamSpec
    start: int
    stop: int


@dataclass(frozen=True, order=True)
class StateBlock:
    """Elements ``[start, stop)`` of the flat space of (unit, shard)."""

    unit: int
    shard: int
    index: int
    start: int
    stop: int

    @property
    def key(self) -> BlockKey:
        """Name of the block, unique in the job."""
        return (self.unit, self.shard, self.index)

    @property
    def numel(self) -> int:
        """Number of elements, including padding."""
        return self.stop - self.start


@dataclass(frozen=True)
class Run:
    """Elements ``[start, stop)`` of the unit's flat space with the same hyper-parameters."""

    start: int
    stop: int
    wd_mult: float
    lr_mult: float
    counts_in_norm: bool
    group: int = 0


def _aligned(elements: int) -> int:
    return -(-elements // ALIGN) * ALIGN


def _place(params: Sequence[ParamSpec], start: int) -> tuple[list[ParamSlot], int]:
    slots = []
    for spec in params:
        slots.append(ParamSlot(spec, start, start + spec.numel))
        start = _aligned(start + spec.numel)
    return slots, start


def _cut(start: int, stop: int, limit: int) -> list[tuple[int, int]]:
    """Return nearly equal aligned ranges of at most ``limit`` elements that tile ``[start, stop)``."""
    quanta = (stop - start) // ALIGN
    count = -(-quanta // (limit // ALIGN))
    edges = [start + ALIGN * (quanta * i // count) for i in range(count + 1)] if count else []
    return list(pairwise(edges))


@dataclass(frozen=True)
class UnitLayout:
    """The layout of one (unit, shard) (module docstring). ``numel``: length of the flat space in elements."""

    unit: int
    shard: int
    slots: tuple[ParamSlot, ...]
    blocks: tuple[StateBlock, ...]
    numel: int
    sharded_stop: int
    """First element of the replicated part."""

    @classmethod
    def build(cls, unit: int, shard: int, params: Sequence[ParamSpec], block_bytes: int) -> UnitLayout:
        """Lay out ``params`` (in the given order, sharded ones first) and cut at ``block_bytes`` of fp32.

        Raises ``ValueError`` for duplicate names or a block size below one aligned quantum.
        """
        limit = block_bytes // 4 // ALIGN * ALIGN
        if limit < ALIGN:
            raise ValueError(f"--elastic-block-bytes {block_bytes} is below {4 * ALIGN}, the smallest block")
        if len({p.name for p in params}) != len(params):
            raise ValueError(f"unit {unit}: duplicate parameter names")
        first, middle = _place([p for p in params if p.sharded], 0)
        second, end = _place([p for p in params if not p.sharded], middle)
        ranges = _cut(0, middle, limit) + _cut(middle, end, limit)
        blocks = tuple(StateBlock(unit, shard, i, a, b) for i, (a, b) in enumerate(ranges))
        return cls(unit, shard, tuple(first + second), blocks, end, middle)

    @cached_property
    def _by_name(self) -> dict[str, ParamSlot]:
        return {slot.spec.name: slot for slot in self.slots}

    def slot(self, name: str) -> ParamSlot:
        """Return the slot of parameter ``name``. Raises ``KeyError``."""
        return self._by_name[name]

    def counts_in_norm(self, block: StateBlock) -> bool:
        """Return whether this shard's copy of the block counts in the global gradient norm."""
        return self.shard == 0 or block.start < self.sharded_stop

    def params_in(self, block: StateBlock) -> tuple[ParamSlot, ...]:
        """Return the slots that overlap the block."""
        return tuple(s for s in self.slots if s.start < block.stop and block.start < s.stop)

    def runs(self, block: StateBlock) -> tuple[Run, ...]:
        """Return the runs that tile the block, in order; adjacent runs with equal hyper-parameters are merged."""
        return self._runs[block.index]

    @cached_property
    def _runs(self) -> tuple[tuple[Run, ...], ...]:
        return tuple(self._build_runs(block) for block in self.blocks)

    def _build_runs(self, block: StateBlock) -> tuple[Run, ...]:
        counts, out = self.counts_in_norm(block), list[Run]()
        for slot in self.slots:
            start, stop = max(slot.start, block.start), min(_aligned(slot.stop), block.stop)
            if start >= stop:
                continue
            spec = slot.spec
            run = Run(start, stop, spec.weight_decay_multiplier, spec.lr_multiplier, counts, spec.group)
            if out and (out[-1].wd_mult, out[-1].lr_mult, out[-1].group) == (run.wd_mult, run.lr_mult, run.group):
                run = Run(out.pop().start, stop, run.wd_mult, run.lr_mult, counts, run.group)
            out.append(run)
        return tuple(out)
