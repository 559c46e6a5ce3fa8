"""The rehearsal of an admission and of a first step, so that members wait less for the real ones.

Python runs code slower for the first time than later (``docs/log.md``), and a newcomer runs
all code of its admission for the first time. In its first step kernels are loaded or compiled too,
workspaces allocated, and pages of memory touched.

A rank that has never been linked to others is a world of one with the sizes of the job
(:mod:`~megatron.elastic.comm.fabric`): collectives return at once, and what other ranks would have
written has any value.
"""

from __future__ import annotations

import gc
from dataclasses import replace

import msgspec

from megatron.elastic.comm.messages import decode, encode
from megatron.elastic.control.membership import Decision
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.engine.compute.model_interface import Covered, ForwardStep
from megatron.elastic.engine.compute.point_to_point import Unanswered
from megatron.elastic.engine.compute.samples import StepAddress
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.hardware import Hardware
from megatron.elastic.engine.generation.state_catalog import Catalog, build_layouts
from megatron.elastic.engine.inject import Injector
from megatron.elastic.engine.settings import OverlapSettings
from megatron.elastic.engine.transaction.certificates import LOOKED_AT_BYTES, begin_examination, looked_at, statement
from megatron.elastic.engine.transaction.context import Context
from megatron.elastic.engine.transaction.fence import EntryPoint
from megatron.elastic.engine.transaction.join import JoinState
from megatron.elastic.engine.transaction.phases import StepBody
from megatron.elastic.engine.transaction.tools import StepInput
from megatron.elastic.observe.events import EventLog
from megatron.elastic.runtime.assembly import EngineParts, assemble, beginning
from megatron.elastic.runtime.connect import Links
from megatron.elastic.state.layout import ParamSpec

__all__ = ["rehearse"]


def rehearse(
    links: Links, job: EngineParts, own: Catalog, arena: Arena, forward_step: ForwardStep | None = None
) -> float | None:
    """Run the admission of this rank to an imaginary job in which all ranks of the launch are present.

    ``own``: the catalog of this rank's units; other units are assumed to be like one of them. ``forward_step``: with
    it the rank then computes one micro-batch of each of its stages; it gets an empty iterator and brings a batch of
    its own. Returns the seconds of that, or ``None`` if it was not computed: if it fails, there is a line on stdout.

    The rehearsal sends and logs nothing, makes no state and leaves ``arena`` unchanged, except that its gradients are
    zero afterwards. Call it before the first edit of the fabric.
    """
    admitted, seconds = _rehearse_admission(links, job, own, arena), None
    if admitted is not None and forward_step is not None:
        seconds = _rehearse_pass(admitted, forward_step)
    gc.collect()  # now, so that it does not run during the admission
    return seconds


def _rehearse_pass(at: Context, forward_step: ForwardStep) -> float | None:
    """Compute the first micro-batch of every replica; return the seconds, or ``None`` if that fails."""
    grid, began = at.view.plan.grid, at.agreement.threads.monotonic()
    address = StepAddress(0, grid.micro_batch_size * grid.data_parallel_size)
    tools = replace(at.tools, publish=_to_nobody)  # the launcher sees a rank that waits
    body = StepBody(tools, at.views.sized(at.view, address.size), OverlapSettings(), transport=Unanswered)
    try:
        body.compute(StepInput(at.record.version + 1, address, forward_step, None), at.record)
    except Exception as error:  # for example where a model computes with the values that other ranks would have sent
        print(f"rank {at.view.rank}: takes part without a rehearsal of its first step ({error})", flush=True)
        return None
    finally:
        at.tools.arena.zero_gradients()
    return at.agreement.threads.monotonic() - began


def _to_nobody(phase: str, waiting_for: tuple[int, ...]) -> None:
    return None


def _rehearse_admission(links: Links, job: EngineParts, own: Catalog, arena: Arena) -> Context | None:
    """Return the context of the imaginary job; ``None`` if no place in it is known for this rank's model."""
    rank, here = links.fabric.rank, links.fabric.address()
    assignment, living = _in_a_place(job.launched, rank, arena.held.units)
    if rank not in living:
        return None
    layouts = build_layouts(_guessed(own, arena.held.units, assignment, job.interface.covered), job.config.block_bytes)
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
        True,
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
    begin_examination(at.tools, at.view, at.views.groups(at.view), mine, "join").complete()
    return at


def _guessed(own: Catalog, units: tuple[int, ...], assignment: Assignment, covered: Covered) -> Catalog:
    """Return a catalog of all units, in which units that this rank does not hold are like one that it holds.

    ``units``: those that it holds. One without an entry in ``own`` has no parameters.
    """
    launch = assignment.launch_topology

    def kind(shard: int) -> int:
        """Return a number that spaces with parameters of the same kind share: shards, the common part, experts."""
        return min(max(shard, launch.tensor - 1), len(launch.shards))

    held = {unit for unit, _ in own}
    without = set(units) - held
    with_experts = {unit for unit, shard in own if kind(shard) == len(launch.shards)}
    like: dict[int, tuple[ParamSpec, ...]] = {}
    for (_, shard), specs in own.items():
        like.setdefault(kind(shard), specs)
    keys = {
        (unit, shard)
        for unit, shard in assignment.state_groups(covered)
        if unit not in without
        and kind(shard) in like
        and (kind(shard) < len(launch.shards) or unit not in held - with_experts)
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
