"""Flat layout of one unit's state, and its cut into blocks.

A unit (embedding, transformer layer, final norm + head) has, for each
tensor-parallel shard, one flat fp32 element space that holds the parameters of
that shard. Parameters that are replicated over the tensor-parallel group (norms,
biases of row-parallel layers) lie in a space of their own, the *common* part,
numbered as one shard more. At tensor-parallel size 1 all parameters are in shard 0.
Where ranks share the experts of a layer, each expert has a space too, numbered behind these.
Each space is cut into :class:`StateBlock` slices, the granule of
ownership, copies, transfers and hashes (docs/design.md §6).

Invariants
- The layout is a pure function of (unit, shard, parameter list, block size),
  so every holder of (unit, shard) has the same one, also when a unit is held by
  several cells (tied embeddings). It does not depend on the number of ranks, so exact mode may sum squares by block.
- Parameters start at multiples of :data:`ALIGN` elements. Matrices that Muon or Lion steps come first. In shard 0 of
  tensor-parallel size 1, of the others, those that a larger size would cut precede replicated ones.
- Each element of the model lies in one block, so every block counts in the global
  gradient norm.
- A block boundary lies at both ends of a matrix that Muon or Lion steps, and none inside it, whatever the block size.
- Padding belongs to the run before it. Its gradient and state are zero and stay
  zero under the update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

__all__ = [
    "ALIGN",
    "BlockKey",
    "Matrix",
    "ParamSlot",
    "ParamSpec",
    "Run",
    "StateBlock",
    "UnitLayout",
    "UnitShard",
]

ALIGN = 16
"""Alignment in elements; 64 bytes of fp32: one cache line and one AVX-512 register."""

BLOCKS_OF_A_SPACE, BLOCKS_OF_AN_EXPERT = 64, 4
"""About how many blocks a large space is cut into, where no size is given. So a job has about as many blocks whatever
its number of ranks, and what all ranks compute at a loss, which grows with them, takes a fraction of a second. A layer
has many experts, and each of them few holders."""
_SMALLEST_BYTES, _LARGEST_BYTES = 256 << 10, 64 << 20
"""Limits of a block's size, where none is given. The smallest is large beside what a block costs in each step; the
largest can be hashed, or copied, in a fraction of a step of such a model."""

BlockKey = tuple[int, int, int]
"""(unit, shard, index): the name of a block, also in messages and reports."""

UnitShard = tuple[int, int]
"""(unit, shard): the name of one flat space. The common part is the shard behind the last one."""


@dataclass(frozen=True)
class Matrix:
    """A matrix that Muon steps as a whole, or Lion by element.

    ``parts``: rows of each part of a group, if it is fused of several.

    A fused query, key and value weight has groups of rows [queries, key, value]. The queries of all groups are one
    part, which is stepped on its own, as are the keys and the values. Raises ``ValueError`` for another number of rows.
    """

    rows: int
    columns: int
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.parts and self.rows % sum(self.parts):
            raise ValueError(f"{self.rows} rows are not groups of {self.parts}")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns


@dataclass(frozen=True)
class ParamSpec:
    """One parameter as the launch cuts it: its part in one shard, or all of it in the common part."""

    name: str
    numel: int
    shape: tuple[int, ...]
    sharded: bool
    """True if it is cut over the tensor-parallel group; otherwise it is replicated, and state has it once a unit."""
    weight_decay_multiplier: float = 1.0
    lr_multiplier: float = 1.0
    group: int = 0
    """Index of the parameter group whose rate in the StepRecord applies."""
    expert: int | None = None
    """The expert that it belongs to, where ranks share experts: each expert of a unit has a space of its own."""
    matrix: Matrix | None = None
    """The matrix that Muon or Lion steps; None: the other parameters' optimizer steps it by element."""

    def __post_init__(self) -> None:
        if self.matrix is not None and self.matrix.numel != self.numel:
            raise ValueError(f"parameter {self.name}: {self.numel} elements do not fill {self.matrix}")
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

    @cached_property
    def key(self) -> BlockKey:
        """Name of the block, unique in the job."""
        return (self.unit, self.shard, self.index)

    @cached_property
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
    group: int = 0
    matrix: Matrix | None = None
    """The matrix that the run is, if Muon or Lion steps it."""


def _block_bytes(space_bytes: int, blocks: int) -> int:
    """Return the largest size of a block in a space of so many bytes of fp32 that is to have about so many blocks."""
    return min(max(-(-space_bytes // blocks), _SMALLEST_BYTES), _LARGEST_BYTES)


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
    """The layout of one flat space (module docstring). ``numel``: its length in elements."""

    unit: int
    shard: int
    slots: tuple[ParamSlot, ...]
    blocks: tuple[StateBlock, ...]
    numel: int

    @classmethod
    def build(cls, unit: int, shard: int, params: Sequence[ParamSpec], block_bytes: int | None = None) -> UnitLayout:
        """Lay out the parameters of one space (module docstring), and cut them at ``block_bytes`` of fp32.

        ``None``: at a size that follows from that of the space (:data:`BLOCKS_OF_A_SPACE`). Raises ``ValueError`` for
        duplicate names or a block size below one aligned quantum.
        """
        if block_bytes is not None and block_bytes < 4 * ALIGN:
            raise ValueError(f"--elastic-block-bytes {block_bytes} is below {4 * ALIGN}, the smallest block")
        if len({p.name for p in params}) != len(params):
            raise ValueError(f"unit {unit}: duplicate parameter names")
        in_order = sorted(params, key=lambda p: (p.matrix is None, not p.sharded))
        matrices, begin = _place([p for p in in_order if p.matrix is not None], 0)
        others, end = _place([p for p in in_order if p.matrix is None], begin)
        most = BLOCKS_OF_AN_EXPERT if any(p.expert is not None for p in params) else BLOCKS_OF_A_SPACE
        size = _block_bytes(4 * (end - begin), most) if block_bytes is None else block_bytes
        limit = size // 4 // ALIGN * ALIGN
        ranges = [(slot.start, _aligned(slot.stop)) for slot in matrices] + _cut(begin, end, limit)
        blocks = tuple(StateBlock(unit, shard, i, a, b) for i, (a, b) in enumerate(ranges))
        return cls(unit, shard, (*matrices, *others), blocks, end)

    @cached_property
    def _by_name(self) -> dict[str, ParamSlot]:
        return {slot.spec.name: slot for slot in self.slots}

    def slot(self, name: str) -> ParamSlot:
        """Return the slot of parameter ``name``. Raises ``KeyError``."""
        return self._by_name[name]

    def has(self, name: str) -> bool:
        """Return whether the space has a parameter ``name``."""
        return name in self._by_name

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
        out = list[Run]()
        for slot in self.slots:
            start, stop = max(slot.start, block.start), min(_aligned(slot.stop), block.stop)
            if start >= stop:
                continue
            spec = slot.spec
            run = Run(start, stop, spec.weight_decay_multiplier, spec.lr_multiplier, spec.group, spec.matrix)
            alike = out and (out[-1].wd_mult, out[-1].lr_mult, out[-1].group) == (run.wd_mult, run.lr_mult, run.group)
            if alike and out[-1].matrix is None and run.matrix is None:
                run = Run(out.pop().start, stop, run.wd_mult, run.lr_mult, run.group)
            out.append(run)
        return tuple(out)
