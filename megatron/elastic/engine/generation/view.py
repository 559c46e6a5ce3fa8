"""A rank's view of one generation: placement, assignment, plan and groups. Immutable.

Pure functions derive it from a decision and a configuration. It holds the plan, this rank's cell, the process group
that reduces each slice of the arena, and the blocks that this rank owns and mirrors. It also names the peers that get
its gradients. The next generation replaces it as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import torch.distributed as dist

from megatron.elastic.comm.fabric import BlockRange, Fabric
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.engine.compute.model_interface import Covered, only_at_launch
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.configuration import Configuration
from megatron.elastic.plan.model import Cell, Plan
from megatron.elastic.plan.profile import PPM
from megatron.elastic.state.domains import FailureDomains
from megatron.elastic.state.layout import ALIGN, BlockKey, StateBlock, UnitLayout, UnitShard
from megatron.elastic.state.placement import Copies, Placement, UnitGroup

__all__ = [
    "GroupSpan",
    "Relays",
    "Routes",
    "View",
    "block_index",
    "build_view",
    "have_parameters",
    "routes",
    "shared_runs",
    "unit_groups",
    "with_configuration",
    "with_plan",
]


@dataclass(frozen=True)
class GroupSpan:
    """Adjacent (unit, shard)s of the arena with the same holders: one collective call.

    Elements ``[start, stop)`` of the arena; ``blocks`` are relative to ``start``.
    """

    group: dist.ProcessGroup
    members: tuple[int, ...]
    start: int
    stop: int
    blocks: tuple[BlockRange, ...]


@dataclass(frozen=True)
class Routes:
    """The blocks that this rank sends to and receives from each peer."""

    outgoing: Mapping[int, tuple[StateBlock, ...]]
    """Destination → blocks that this rank owns."""
    incoming: Mapping[int, tuple[StateBlock, ...]]
    """Owner → blocks."""


@dataclass(frozen=True)
class Relays:
    """This rank's messages for blocks whose owners do not compute their units."""

    to_owners: Routes = Routes({}, {})
    """From delegates to owners: gradients."""
    from_owners: Routes = Routes({}, {})
    """From owners to delegates: parameters."""


@dataclass(frozen=True)
class View:
    """One rank's view of one generation. Immutable."""

    rank: int
    generation: int
    living: tuple[int, ...]
    plan: Plan
    cell: Cell | None
    """This rank's cell; ``None`` if the rank is parked."""
    spans: tuple[GroupSpan, ...]
    silent: tuple[tuple[int, int], ...]
    """Elements ``[start, stop)`` of the arena whose gradients another rank of the tensor-parallel group contributes."""
    configuration: Configuration
    owned: tuple[StateBlock, ...]
    mirrored: tuple[StateBlock, ...]
    routes: Routes
    """Messages from owners to mirrors."""
    relays: Relays = Relays()
    domains: FailureDomains = field(default_factory=FailureDomains)
    """Failure domains of the living ranks."""
    unproven: frozenset[int] = frozenset()
    """Members that had not voted since their admission when this generation was decided."""

    @property
    def placement(self) -> Placement:
        """Owner and mirrors of every block."""
        return self.configuration.placement

    @property
    def assignment(self) -> Assignment:
        """Units of each cell."""
        return self.configuration.assignment

    @cached_property
    def mirrored_keys(self) -> frozenset[BlockKey]:
        """Keys of :attr:`mirrored`."""
        return frozenset(block.key for block in self.mirrored)

    @property
    def tensor_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's tensor-parallel group; none if it is parked."""
        place = None if self.cell is None else self.assignment.place(self.rank)
        return () if place is None else place.tensor_ranks

    @property
    def leads(self) -> bool:
        """True if this is the first rank of its cell, which reports for the cell."""
        return self.cell is not None and self.cell.ranks[0] == self.rank

    @property
    def lowest(self) -> bool:
        """True if this is the lowest living rank, which logs events that all ranks know."""
        return self.rank == self.living[0]

    @property
    def reporter(self) -> int:
        """The rank that logs for the job: the highest living one of the launch, like Megatron's last rank."""
        launched = self.assignment.launch_topology.slots
        return max((rank for rank in self.living if rank < launched), default=self.living[-1])

    def speeds(self) -> tuple[tuple[int, int], ...]:
        """Return (cell, parts per million) of the cells that are slower than their peers in the plan."""
        return tuple((cell.id, cell.speed_ppm) for cell in self.plan.cells if cell.speed_ppm != PPM)


def with_plan(view: View, plan: Plan) -> View:
    """Return the same view under another plan of the same cells."""
    mine = None if view.cell is None else view.cell.id
    cell = next((cell for cell in plan.cells if cell.id == mine), None)
    return replace(view, plan=plan, cell=cell)


def build_view(
    rank: int,
    generation: int,
    living: Iterable[int],
    configuration: Configuration,
    layouts: Mapping[UnitShard, UnitLayout],
    arena: Arena,
    fabric: Fabric,
    plan: Plan,
    covered: Covered = only_at_launch,
) -> View:
    """Return ``rank``'s view. ``arena`` must hold its part of the configuration; ``plan`` is made for ``living``."""
    alive = tuple(sorted(living))
    cell = next((c for c in plan.cells if rank in c.ranks), None)
    place = None if cell is None else configuration.assignment.place(rank)
    groups, delegates = _groups(alive, configuration, layouts, covered)
    bare = View(
        rank=rank,
        generation=generation,
        living=alive,
        plan=plan,
        cell=cell,
        spans=_spans(configuration.placement, delegates, groups, arena, fabric),
        silent=_silent(place is None or place.position.index > 0, arena),
        configuration=configuration,
        owned=(),
        mirrored=(),
        routes=Routes({}, {}),
    )
    return _placed(bare, rank, delegates, layouts)


def with_configuration(
    view: View,
    rank: int,
    configuration: Configuration,
    layouts: Mapping[UnitShard, UnitLayout],
    arena: Arena,
    fabric: Fabric,
    covered: Covered = only_at_launch,
) -> View:
    """Return the view with the same generation, assignment and plan under another placement."""
    groups, delegates = _groups(view.living, configuration, layouts, covered)
    spans = _spans(configuration.placement, delegates, groups, arena, fabric)
    return _placed(replace(view, spans=spans, configuration=configuration), rank, delegates, layouts)


def routes(rank: int, owners: Placement, holders: Placement, layouts: Mapping[UnitShard, UnitLayout]) -> Routes:
    """Return ``rank``'s messages from the owners of placement ``owners`` to the copies of placement ``holders``."""
    outgoing: list[tuple[int, StateBlock]] = []
    incoming: list[tuple[int, StateBlock]] = []
    for key, copies in holders.copies.items():
        owner, block = owners.owner(key), layouts[key[:2]].blocks[key[2]]
        if owner == rank:
            outgoing.extend((peer, block) for peer in copies.ranks if peer != rank)
        elif rank in copies.ranks:
            incoming.append((owner, block))
    return Routes(_by_peer(outgoing), _by_peer(incoming))


def _groups(
    living: Collection[int], configuration: Configuration, layouts: Mapping[UnitShard, UnitLayout], covered: Covered
) -> tuple[Mapping[UnitShard, tuple[int, ...]], Mapping[BlockKey, int]]:
    """Return the living holders of every (unit, shard), and the delegates of the blocks whose owners are none of them.

    Delegates take turns, so that all holders of a unit send and receive about as much.
    """
    alive = frozenset(living)
    groups = {
        key: tuple(rank for rank in ranks if rank in alive)
        for key, ranks in configuration.assignment.state_groups(covered).items()
        if key in layouts
    }
    delegates = {}
    for key, copies in configuration.placement.copies.items():
        holders = groups.get(key[:2], ())
        if holders and copies.owner not in holders:
            delegates[key] = holders[key[2] % len(holders)]
    return groups, delegates


def _placed(view: View, rank: int, delegates: Mapping[BlockKey, int], layouts: Mapping[UnitShard, UnitLayout]) -> View:
    """Return ``view`` with the blocks, routes and relays of its placement."""
    placement = view.placement
    owners = Placement({key: Copies(placement.owner(key)) for key in delegates})
    holders = Placement({key: Copies(delegate) for key, delegate in delegates.items()})
    blocks = {block.key: block for layout in layouts.values() for block in layout.blocks}
    return replace(
        view,
        owned=tuple(blocks[key] for key in placement.owned_by(rank)),
        mirrored=tuple(blocks[key] for key in placement.mirrored_by(rank)),
        routes=routes(rank, placement, placement, layouts),
        relays=Relays(routes(rank, holders, owners, layouts), routes(rank, owners, holders, layouts)),
    )


def _by_peer(pairs: Iterable[tuple[int, StateBlock]]) -> dict[int, tuple[StateBlock, ...]]:
    table: dict[int, list[StateBlock]] = {}
    for peer, block in pairs:
        table.setdefault(peer, []).append(block)
    return {peer: tuple(sorted(table[peer])) for peer in sorted(table)}


def _spans(
    placement: Placement,
    delegates: Mapping[BlockKey, int],
    groups: Mapping[UnitShard, tuple[int, ...]],
    arena: Arena,
    fabric: Fabric,
) -> tuple[GroupSpan, ...]:
    """Return the collective calls of this rank; a delegate stands there for the owner."""
    spans = []
    held = {key: groups[key] for key in groups if key in arena.layouts}
    for run in shared_runs(tuple(arena.slices), held):
        members, slices = groups[run[0]], [arena.slices[key] for key in run]
        start = slices[0].start
        ranges = tuple(
            BlockRange(
                piece.start + block.start - start,
                piece.start + block.stop - start,
                delegates.get(block.key, placement.owner(block.key)),
            )
            for piece in slices
            for block in piece.layout.blocks
        )
        spans.append(GroupSpan(fabric.group("state", members), members, start, slices[-1].stop, ranges))
    return tuple(spans)


def shared_runs(
    held: Sequence[UnitShard], groups: Mapping[UnitShard, tuple[int, ...]]
) -> Iterator[tuple[UnitShard, ...]]:
    """Yield runs of adjacent spaces with the same holders, cut at the same places on all these holders.

    ``held``: the spaces of this rank, in the order of every rank's arena. A holder's arena may have a further space
    between two that this rank has side by side: then no rank joins the two.
    """
    needed = {rank for key in held for rank in groups[key]}
    of_rank: dict[int, list[UnitShard]] = {rank: [] for rank in needed}
    for key in sorted(groups, key=lambda key: (key[1], key[0])):
        for rank in needed.intersection(groups[key]):
            of_rank[rank].append(key)
    follows = {(rank, *pair) for rank, keys in of_rank.items() for pair in pairwise(keys)}
    run: list[UnitShard] = []
    for key in held:
        same = bool(run) and groups[run[-1]] == groups[key]
        if run and not (same and all((rank, run[-1], key) in follows for rank in groups[key])):
            yield tuple(run)
            run = []
        run.append(key)
    if run:
        yield tuple(run)


def _silent(follows: bool, arena: Arena) -> tuple[tuple[int, int], ...]:
    """Return the elements of replicated parameters on a rank that ``follows`` the first of its tensor-parallel group.

    Their gradients are equal on all ranks of the group: the first rank contributes them to the sum over groups.
    """
    ranges = list[tuple[int, int]]()
    for where in arena.slices.values() if follows else ():
        for slot in where.layout.slots:
            if not slot.spec.sharded:
                start, stop = where.start + slot.start, where.start + -(-slot.stop // ALIGN) * ALIGN
                joined = bool(ranges) and ranges[-1][1] == start
                ranges.append((ranges.pop()[0] if joined else start, stop))
    return tuple(ranges)


def have_parameters(before: Iterable[UnitGroup], now: Iterable[UnitGroup], newcomers: Collection[int]) -> bool:
    """Return whether the holders of ``now``, newcomers apart, were holders ``before``, at least one of each group."""
    held = {(group.unit, group.shard): frozenset(group.holders) for group in before}
    members = {(group.unit, group.shard): frozenset(group.holders).difference(newcomers) for group in now}
    return all(ranks and ranks <= held.get(key, frozenset()) for key, ranks in members.items())


def block_index(layouts: Mapping[UnitShard, UnitLayout]) -> tuple[BlockKey, ...]:
    """Return every block of the job, ascending: the order of the vote's norm slots."""
    return tuple(sorted(block.key for layout in layouts.values() for block in layout.blocks))


def unit_groups(
    assignment: Assignment,
    layouts: Mapping[UnitShard, UnitLayout],
    living: Collection[int],
    covered: Covered = only_at_launch,
) -> tuple[UnitGroup, ...]:
    """Return the living holders of every (unit, shard) that has any."""
    alive = frozenset(living)
    groups = []
    for (unit, shard), members in assignment.state_groups(covered).items():
        holders = tuple(rank for rank in members if rank in alive)
        if holders and (unit, shard) in layouts:
            groups.append(UnitGroup(unit, shard, layouts[unit, shard].blocks, holders))
    return tuple(groups)
