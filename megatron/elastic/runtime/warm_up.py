"""The rehearsal of an admission, so that members wait less for the real one.

Python runs code slower for the first time than later (``docs/log.md``), and a newcomer runs
all code of its admission for the first time.
"""

from __future__ import annotations

import gc
from dataclasses import replace

import msgspec

from megatron.elastic.comm.messages import decode, encode
from megatron.elastic.control.membership import Decision
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.engine.compute.model_interface import Covered
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.hardware import Hardware
from megatron.elastic.engine.generation.state_catalog import Catalog, build_layouts
from megatron.elastic.engine.inject import Injector
from megatron.elastic.engine.transaction.certificates import LOOKED_AT_BYTES, examine, looked_at, statement
from megatron.elastic.engine.transaction.fence import EntryPoint
from megatron.elastic.engine.transaction.join import JoinState
from megatron.elastic.observe.events import EventLog
from megatron.elastic.runtime.assembly import EngineParts, assemble, beginning
from megatron.elastic.runtime.connect import Links
from megatron.elastic.state.layout import ParamSpec

__all__ = ["rehearse"]


def rehearse(links: Links, job: EngineParts, own: Catalog, arena: Arena) -> None:
    """Run the admission of this rank to an imaginary job in which all ranks of the launch are present.

    ``own``: the catalog of this rank's units; other units are assumed to be like one of them. The rehearsal sends
    and logs nothing, makes no state and leaves ``arena`` unchanged. Call it before the first edit of the fabric.
    """
    _rehearse_admission(links, job, own, arena)
    gc.collect()  # now, so that it does not run during the admission


def _rehearse_admission(links: Links, job: EngineParts, own: Catalog, arena: Arena) -> None:
    rank, here = links.fabric.rank, links.fabric.address()
    assignment, living = _in_a_place(job.launched, rank, arena.held.units)
    if rank not in living:
        return  # its model is not that of any stage at launch, so no place is known for a rehearsal
    layouts = build_layouts(_guessed(own, assignment, job.interface.covered), job.config.block_bytes)
    decision = Decision(0, {peer: msgspec.structs.replace(here, rank=peer) for peer in living}, "join")
    configuration, record = beginning(job, assignment, layouts, decision)
    sent = JoinState(
        own,
        Hardware(1, 1),
        configuration,
        configuration,
        record.to_json(),
        EntryPoint(0, True, 0, {}, {}),
        False,
        (),
        "",
    )
    join_state: JoinState = decode(JoinState, encode(sent), rank)
    alone = replace(links, injector=Injector((), rank), events=EventLog(None, rank))
    quiet = replace(job, config=replace(job.config, frequency="off", trace=False, exact=False))
    at = assemble(
        alone,
        quiet,
        decision,
        layouts,
        arena,
        join_state.configuration,
        join_state.record,
        join_state.hardware,
        join_state.confirmed.assignment,
    ).context
    mine = statement(
        at.tools, at.view, record, 0, looked_at(layouts, configuration.placement.copies, 0, LOOKED_AT_BYTES)
    )
    # Its findings are ignored: there are no statements of other ranks to compare.
    examine(at.tools, at.view, at.views.groups(at.view), mine, "join")


def _guessed(own: Catalog, assignment: Assignment, covered: Covered) -> Catalog:
    """Return a catalog of all units, in which units that this rank does not hold are like one that it holds."""
    launch = assignment.launch_topology

    def kind(shard: int) -> int:
        """Return a number that spaces with parameters of the same kind share: shards, the common part, experts."""
        return min(max(shard, launch.tensor - 1), len(launch.shards))

    held = {unit for unit, _ in own}
    with_experts = {unit for unit, shard in own if kind(shard) == len(launch.shards)}
    like: dict[int, tuple[ParamSpec, ...]] = {}
    for (_, shard), specs in own.items():
        like.setdefault(kind(shard), specs)
    keys = {
        (unit, shard)
        for unit, shard in assignment.state_groups(covered)
        if kind(shard) in like and (kind(shard) < len(launch.shards) or unit not in held - with_experts)
    }
    return {key: own.get(key) or like[kind(key[1])] for key in sorted(keys)}


def _in_a_place(assignment: Assignment, rank: int, units: tuple[int, ...]) -> tuple[Assignment, tuple[int, ...]]:
    """Return (assignment, living ranks) in which ``rank`` computes ``units``: as launched, or replacing a lost rank."""
    launch_topology, present = assignment.launch_topology, range(assignment.launch_topology.slots)
    if assignment.units_of(rank) == units:
        return assignment, tuple(present)
    place = next((cell for cell in launch_topology.cells if assignment.units_of(cell.ranks[0]) == units), None)
    if launch_topology.place(rank) is not None or place is None:
        return assignment, ()
    living = tuple(peer for peer in present if peer not in place.ranks) + launch_topology.cell_of(rank).ranks
    return assignment.seated(living), living
