"""How a process comes to its engine: founding it with everybody, or joining those who train.

A joiner runs the user's script from the top while the others train: links and groups
first (alone), then Megatron's own initialisation, the model, and only then the engine,
once it is admitted. Whatever it can do before they wait for it, it does before.
"""

from __future__ import annotations

import pickle
from dataclasses import replace

from megatron.elastic.comm.errors import CommError, PeerLost
from megatron.elastic.control.membership import Decision
from megatron.elastic.engine.ahead import LinksAhead
from megatron.elastic.engine.assignment import Assignment
from megatron.elastic.engine.basis import Basis
from megatron.elastic.engine.buffers import Arena
from megatron.elastic.engine.catalog import Catalog, build_layouts, exchange_catalog, own_catalog
from megatron.elastic.engine.certificates import LOOKED_AT_BYTES, examine, looked_at, statement
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.inject import Injector
from megatron.elastic.engine.joining import NEWCOMER, Welcome, newcomers, receive_welcome
from megatron.elastic.engine.machine import Machine, survey
from megatron.elastic.engine.program import Place
from megatron.elastic.engine.recovery import failure_domains
from megatron.elastic.engine.standing import unit_groups
from megatron.elastic.engine.waiting import StageGone, await_ranks
from megatron.elastic.mcore.assembly import Job, Layouts, assemble
from megatron.elastic.mcore.links import Links
from megatron.elastic.observe.events import EventLog, Ready
from megatron.elastic.state.layout import UnitLayout
from megatron.elastic.state.ownership import initial
from megatron.elastic.state.placement import Rules
from megatron.elastic.state.record import StepRecord

__all__ = ["JobGone", "found", "join"]


class JobGone(RuntimeError):
    """Whoever held anything is gone while a newcomer waited: there is nothing to join.

    ``begins_anew``: that was decided already; else it depends on whether there is a checkpoint.
    """

    def __init__(self, begins_anew: bool) -> None:
        super().__init__("the job this rank was to join has ended")
        self.begins_anew = begins_anew


def found(links: Links, job: Job) -> Engine:
    """The engine at the start of a job, together with everybody. Its state is what the model's parameters say."""
    assert links.decision is not None, "a newcomer joins, it does not found"
    shard = job.nominal.shard(links.fabric.rank)
    catalog = exchange_catalog(job.port, shard, links.fabric.world, links.fabric.slots)
    layouts = build_layouts(catalog, job.config.block_bytes)
    basis, record = _beginning(job, layouts, links.decision)
    arena = Arena(job.port, _of_shard(layouts, shard))
    engine = assemble(links, job, links.decision, layouts, arena, basis, record, survey(links.fabric))
    engine.adopt_parameters()
    links.injector.settle()
    return engine


def join(links: Links, job: Job) -> tuple[Engine, Welcome]:
    """The engine of a rank that comes later: waits to be admitted, then takes the members' position.

    What can be made without them (its arena) is made before anybody waits for it, and the rest is
    rehearsed. Raises ``ValueError`` when its model is not the job's, :class:`JobGone` when there is no job any more.
    """
    fabric, timeout = links.fabric, job.settings.communication_timeout
    shard = job.nominal.shard(fabric.rank)
    catalog = own_catalog(job.port, shard)
    own = build_layouts(catalog, job.config.block_bytes)
    known = _of_shard(own, shard)
    arena = Arena(job.port, known)
    _rehearse(links, job, catalog, arena)
    links.events.write(Ready())
    ahead = LinksAhead(fabric, timeout)
    links.membership.watch_members(ahead.members_are)
    while True:
        try:
            decision = links.membership.decide(fabric.address(), NEWCOMER, timeout)
            if decision.reason == "start" or len(newcomers(decision)) == len(decision.members):
                raise JobGone(begins_anew=decision.reason == "start")
            ahead.stop()
            fabric.edit(decision.generation, decision.members, timeout)
            welcome = receive_welcome(fabric, decision)
            layouts = build_layouts(welcome.catalog, job.config.block_bytes)
            if any(layouts.get(key) != layout for key, layout in own.items()):
                raise ValueError(f"rank {fabric.rank}: the parameters of its model are not those of the job's")
            known.update(_of_shard(layouts, shard))
            engine = assemble(links, job, decision, layouts, arena, welcome.basis, welcome.record, welcome.machine)
            engine.join(welcome)
            links.events.generation = decision.generation
            return engine, welcome
        except StageGone as gone:  # others are waited for as well
            respawn, patience = job.config.respawn, job.config.detection_timeout
            await_ranks(links.membership, gone, -1, respawn, patience, say=lambda line: None)  # the members say it
        except CommError as error:
            if isinstance(error, PeerLost) and not error.heard:
                links.membership.suspect(error.rank, error.why)


def _rehearse(links: Links, job: Job, own: Catalog, arena: Arena) -> None:
    """Go through an admission alone, with everybody of the launch as if here, for nothing but to have done it.

    What a process does for the first time takes it two to three times as long as the next, and at the real admission
    the members wait. Units that others hold are taken to be like one of its own. Nothing is sent or logged,
    no state is made, the arena stays as it is.
    """
    rank, here = links.fabric.rank, links.fabric.address()
    assignment = _launched(job)
    if assignment.units_of(rank) != tuple(arena.slices):
        return  # a rank beyond those of the launch: its place is not known yet
    like = next(iter(own.values()))
    layouts = build_layouts({key: own.get(key, like) for key in assignment.state_groups()}, job.config.block_bytes)
    members = {peer: replace(here, rank=peer) for peer in range(job.nominal.slots)}
    decision = Decision(0, members, "join")
    basis, record = _beginning(job, layouts, decision)
    told = Welcome(own, Machine(1, 1), basis, basis, record, Place(0, True, 0, {}, None), False, (), {})
    welcome: Welcome = pickle.loads(pickle.dumps(told))
    alone = replace(links, injector=Injector((), rank), events=EventLog(None, rank))
    quiet = replace(job, config=replace(job.config, frequency="off", trace=False, exact=False))
    at = assemble(
        alone, quiet, decision, layouts, arena, welcome.basis, welcome.record, welcome.machine
    ).position
    mine = statement(at.tools, at.standing, record, 0, looked_at(layouts, basis.placement.copies, 0, LOOKED_AT_BYTES))
    # What it finds is of no account: of the others there is nothing to compare.
    examine(at.tools, at.standing, at.recovery.groups(at.standing), mine, "join")


def _launched(job: Job) -> Assignment:
    return job.assignment or Assignment.at_launch(job.nominal)


def _beginning(job: Job, layouts: Layouts, decision: Decision) -> tuple[Basis, StepRecord]:
    """Who holds what when the members of ``decision`` found the job, and the record that names it."""
    assignment, config = _launched(job), job.config
    rules = Rules(config.mirrors, config.scatter_width, failure_domains(decision), config.ownership)
    basis = Basis(initial(unit_groups(assignment, layouts, decision.members), rules), assignment)
    return basis, replace(StepRecord.initial(job.settings.hyper), placement=basis.digest)


def _of_shard(layouts: Layouts, shard: int) -> dict[int, UnitLayout]:
    """Unit → layout, as tensor-parallel rank ``shard`` holds it."""
    return {unit: layout for (unit, of), layout in layouts.items() if of == shard}
