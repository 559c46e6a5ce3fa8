"""What one rank stands on for the length of a generation.

Derived, by pure functions, from a decision, the assignment of units to cells and
the placement of state: the plan, this rank's cell, which slices of the arena are reduced over which group and who owns
each block, and who ships gradients to whom. Replaced as a whole at the next
generation; nothing in it is edited.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch.distributed as dist

from megatron.elastic.comm.fabric import BlockRange, Fabric
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.configuration import Configuration
from megatron.elastic.plan.model import Cell, Plan
from megatron.elastic.plan.planner import plan_hash
from megatron.elastic.plan.profile import PPM
from megatron.elastic.state.domains import FailureDomains
from megatron.elastic.state.layout import BlockKey, StateBlock, UnitLayout
from megatron.elastic.state.placement import Placement, UnitGroup

__all__ = [
    "GroupSpan",
    "Routes",
    "View",
    "block_index",
    "build_view",
    "routes",
    "unit_groups",
    "with_configuration",
    "with_plan",
]

UnitShard = tuple[int, int]


@dataclass(frozen=True)
class GroupSpan:
    """Neighbouring units of the arena with the same holders: one collective call.

    Elements ``[start, stop)`` of the arena; ``blocks`` are relative to ``start``.
    """

    group: dist.ProcessGroup
    members: tuple[int, ...]
    start: int
    stop: int
    blocks: tuple[BlockRange, ...]


@dataclass(frozen=True)
class Routes:
    """Which blocks this rank sends to whom, and is sent by whom."""

    outgoing: Mapping[int, tuple[StateBlock, ...]]
    """Rank → blocks owned here."""
    incoming: Mapping[int, tuple[StateBlock, ...]]
    """Owner → blocks."""


@dataclass(frozen=True)
class View:
    """See the module docstring."""

    rank: int
    generation: int
    living: tuple[int, ...]
    plan: Plan
    plan_hash: str
    cell: Cell | None
    """This rank's cell, ``None`` when the rank is parked."""
    shard: int
    """This rank's place in its tensor-parallel group."""
    spans: tuple[GroupSpan, ...]
    configuration: Configuration
    owned: tuple[StateBlock, ...]
    mirrored: tuple[StateBlock, ...]
    routes: Routes
    """From owners to mirrors."""
    domains: FailureDomains = field(default_factory=FailureDomains)
    """Failure domains of the living."""
    unproven: frozenset[int] = frozenset()
    """Members that had not voted since they were let in when this generation was decided."""

    @property
    def placement(self) -> Placement:
        """Who holds which copies."""
        return self.configuration.placement

    @property
    def assignment(self) -> Assignment:
        """Which units each cell holds."""
        return self.configuration.assignment

    @property
    def lowest(self) -> bool:
        """Whether this rank is the lowest living one, which tells what all know alike."""
        return self.rank == self.living[0]

    def speeds(self) -> tuple[tuple[int, int], ...]:
        """(cell, parts per million) of the cells the plan takes to be slower than their peers."""
        return tuple((cell.id, cell.speed_ppm) for cell in self.plan.cells if cell.speed_ppm != PPM)


def with_plan(view: View, plan: Plan) -> View:
    """The same standing under another plan of the same cells."""
    mine = None if view.cell is None else view.cell.id
    cell = next((cell for cell in plan.cells if cell.id == mine), None)
    return replace(view, plan=plan, plan_hash=plan_hash(plan), cell=cell)


def build_view(
    rank: int,
    generation: int,
    living: Iterable[int],
    configuration: Configuration,
    layouts: Mapping[UnitShard, UnitLayout],
    arena: Arena,
    fabric: Fabric,
    plan: Plan,
) -> View:
    """``arena`` holds what the basis gives this rank; ``plan`` is the policy's answer to who is living."""
    alive = tuple(sorted(living))
    cell = next((c for c in plan.cells if rank in c.ranks), None)
    bare = View(
        rank=rank,
        generation=generation,
        living=alive,
        plan=plan,
        plan_hash=plan_hash(plan),
        cell=cell,
        shard=configuration.assignment.launch_topology.shard(rank),
        spans=_spans(rank, alive, configuration, arena, fabric),
        configuration=configuration,
        owned=(),
        mirrored=(),
        routes=Routes({}, {}),
    )
    return _placed(bare, rank, layouts)


def with_configuration(
    view: View,
    rank: int,
    configuration: Configuration,
    layouts: Mapping[UnitShard, UnitLayout],
    arena: Arena,
    fabric: Fabric,
) -> View:
    """The same generation, assignment and plan on another placement."""
    spans = _spans(rank, view.living, configuration, arena, fabric)
    return _placed(replace(view, spans=spans, configuration=configuration), rank, layouts)


def routes(rank: int, owners: Placement, holders: Placement, layouts: Mapping[UnitShard, UnitLayout]) -> Routes:
    """From the owners of one placement to the copies of ``holders``: the same, or one that is about to hold."""
    outgoing: list[tuple[int, StateBlock]] = []
    incoming: list[tuple[int, StateBlock]] = []
    for key, copies in holders.copies.items():
        owner, block = owners.owner(key), layouts[key[:2]].blocks[key[2]]
        if owner == rank:
            outgoing.extend((peer, block) for peer in copies.ranks if peer != rank)
        elif rank in copies.ranks:
            incoming.append((owner, block))
    return Routes(_by_peer(outgoing), _by_peer(incoming))


def _placed(view: View, rank: int, layouts: Mapping[UnitShard, UnitLayout]) -> View:
    """``view`` with everything that follows from its placement."""
    placement = view.placement
    blocks = {block.key: block for layout in layouts.values() for block in layout.blocks}
    return replace(
        view,
        owned=tuple(blocks[key] for key in placement.owned_by(rank)),
        mirrored=tuple(blocks[key] for key in placement.mirrored_by(rank)),
        routes=routes(rank, placement, placement, layouts),
    )


def _by_peer(pairs: Iterable[tuple[int, StateBlock]]) -> dict[int, tuple[StateBlock, ...]]:
    table: dict[int, list[StateBlock]] = {}
    for peer, block in pairs:
        table.setdefault(peer, []).append(block)
    return {peer: tuple(sorted(table[peer])) for peer in sorted(table)}


def _spans(
    rank: int, living: tuple[int, ...], configuration: Configuration, arena: Arena, fabric: Fabric
) -> tuple[GroupSpan, ...]:
    assignment, placement = configuration.assignment, configuration.placement
    shard = assignment.launch_topology.shard(rank)
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
        spans.append(GroupSpan(fabric.group("state", members), members, start, slices[-1].stop, ranges))
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
