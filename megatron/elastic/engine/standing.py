"""What one rank stands on for the length of a generation.

Derived, by pure functions, from a decision, the assignment of units to cells and
the placement of state: the plan, this rank's cell, which slices of the arena are reduced over which group and who owns
each block, and who ships gradients to whom. Replaced as a whole at the next
generation; nothing in it is edited.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

import torch.distributed as dist

from megatron.elastic.comm.fabric import BlockRange, Fabric
from megatron.elastic.engine.assignment import Assignment
from megatron.elastic.engine.basis import Basis
from megatron.elastic.engine.buffers import Arena
from megatron.elastic.plan.model import Cell, Plan
from megatron.elastic.plan.planner import plan_hash
from megatron.elastic.plan.profile import PPM
from megatron.elastic.state.layout import BlockKey, StateBlock, UnitLayout
from megatron.elastic.state.placement import Placement, UnitGroup

__all__ = ["Span", "Standing", "block_index", "replanned", "restand", "stand", "unit_groups"]

UnitShard = tuple[int, int]


@dataclass(frozen=True)
class Span:
    """Neighbouring units of the arena with the same holders: one collective call.

    Elements ``[start, stop)`` of the arena; ``blocks`` are relative to ``start``.
    """

    group: dist.ProcessGroup
    members: tuple[int, ...]
    start: int
    stop: int
    blocks: tuple[BlockRange, ...]


@dataclass(frozen=True)
class Standing:
    """See the module docstring."""

    generation: int
    living: tuple[int, ...]
    plan: Plan
    plan_hash: str
    cell: Cell | None
    """This rank's cell, ``None`` when the rank is parked."""
    position: int
    spans: tuple[Span, ...]
    basis: Basis
    owned: tuple[StateBlock, ...]
    mirrored: tuple[StateBlock, ...]
    outgoing: Mapping[int, tuple[StateBlock, ...]]
    """Rank → owned blocks whose reduced gradient it is sent: their mirrors, and copies about to go."""
    incoming: Mapping[int, tuple[StateBlock, ...]]
    """Owner rank → blocks mirrored here, or about to go."""

    @property
    def placement(self) -> Placement:
        """Who holds which copies."""
        return self.basis.placement

    @property
    def assignment(self) -> Assignment:
        """Which units each cell holds."""
        return self.basis.assignment

    @property
    def lowest(self) -> bool:
        """Whether this rank is the lowest living one, which tells what all know alike."""
        return self.position == 0

    def speeds(self) -> tuple[tuple[int, int], ...]:
        """(cell, parts per million) of the cells the plan takes to be slower than their peers."""
        return tuple((cell.id, cell.speed_ppm) for cell in self.plan.cells if cell.speed_ppm != PPM)


def replanned(standing: Standing, plan: Plan) -> Standing:
    """The same standing under another plan of the same cells."""
    mine = None if standing.cell is None else standing.cell.id
    cell = next((cell for cell in plan.cells if cell.id == mine), None)
    return replace(standing, plan=plan, plan_hash=plan_hash(plan), cell=cell)


def stand(
    rank: int,
    generation: int,
    living: Iterable[int],
    basis: Basis,
    layouts: Mapping[UnitShard, UnitLayout],
    arena: Arena,
    fabric: Fabric,
    plan: Plan,
    followers: Mapping[BlockKey, tuple[int, ...]],
) -> Standing:
    """``followers``: ranks that get gradients besides mirrors. ``arena`` holds what the basis gives this
    rank; ``plan`` is the policy's answer to who is living.
    """
    alive = tuple(sorted(living))
    cell = next((c for c in plan.cells if rank in c.ranks), None)
    bare = Standing(
        generation=generation,
        living=alive,
        plan=plan,
        plan_hash=plan_hash(plan),
        cell=cell,
        position=basis.assignment.nominal.shard(rank),
        spans=_spans(rank, alive, basis, arena, fabric),
        basis=basis,
        owned=(),
        mirrored=(),
        outgoing={},
        incoming={},
    )
    return _placed(bare, rank, layouts, followers)


def restand(
    standing: Standing,
    rank: int,
    basis: Basis,
    layouts: Mapping[UnitShard, UnitLayout],
    arena: Arena,
    fabric: Fabric,
    followers: Mapping[BlockKey, tuple[int, ...]],
) -> Standing:
    """The same generation, assignment and plan on another placement."""
    spans = _spans(rank, standing.living, basis, arena, fabric)
    return _placed(replace(standing, spans=spans, basis=basis), rank, layouts, followers)


def _placed(
    standing: Standing,
    rank: int,
    layouts: Mapping[UnitShard, UnitLayout],
    followers: Mapping[BlockKey, tuple[int, ...]],
) -> Standing:
    """``standing`` with everything that follows from its placement and ``followers``."""
    placement = standing.placement
    blocks = {block.key: block for layout in layouts.values() for block in layout.blocks}
    owned = tuple(blocks[key] for key in placement.owned_by(rank))
    mirrored = tuple(blocks[key] for key in placement.mirrored_by(rank))
    followed = tuple(blocks[key] for key, ranks in followers.items() if rank in ranks)
    return replace(
        standing,
        owned=owned,
        mirrored=mirrored,
        outgoing=_by_peer(
            (peer, block)
            for block in owned
            for peer in (*placement.copies[block.key].mirrors, *followers.get(block.key, ()))
        ),
        incoming=_by_peer((placement.owner(block.key), block) for block in (*mirrored, *followed)),
    )


def _by_peer(pairs: Iterable[tuple[int, StateBlock]]) -> dict[int, tuple[StateBlock, ...]]:
    table: dict[int, list[StateBlock]] = {}
    for peer, block in pairs:
        table.setdefault(peer, []).append(block)
    return {peer: tuple(sorted(table[peer])) for peer in sorted(table)}


def _spans(
    rank: int, living: tuple[int, ...], basis: Basis, arena: Arena, fabric: Fabric
) -> tuple[Span, ...]:
    assignment, placement = basis.assignment, basis.placement
    shard = assignment.nominal.shard(rank)
    groups = assignment.state_groups()
    alive = frozenset(living)
    units = sorted(arena.slices)
    spans = []
    for members, run in groupby(units, key=lambda unit: tuple(r for r in groups[unit, shard] if r in alive)):
        slices = [arena.slices[unit] for unit in run]
        start = slices[0].start
        ranges = tuple(
            BlockRange(piece.start + block.start - start, piece.start + block.stop - start, placement.owner(block.key))
            for piece in slices
            for block in piece.layout.blocks
        )
        spans.append(Span(fabric.group("state", members), members, start, slices[-1].stop, ranges))
    return tuple(spans)


def block_index(layouts: Mapping[UnitShard, UnitLayout]) -> tuple[BlockKey, ...]:
    """Every block of the job, ascending: the order of the vote's norm slots."""
    return tuple(sorted(block.key for layout in layouts.values() for block in layout.blocks))


def unit_groups(
    assignment: Assignment, layouts: Mapping[UnitShard, UnitLayout], living: Collection[int]
) -> tuple[UnitGroup, ...]:
    """Living holders of every (unit, shard) that has any."""
    alive = frozenset(living)
    groups = []
    for (unit, shard), members in assignment.state_groups().items():
        holders = tuple(rank for rank in members if rank in alive)
        if holders:
            groups.append(UnitGroup(unit, shard, layouts[unit, shard].blocks, holders))
    return tuple(groups)
