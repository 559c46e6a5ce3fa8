"""How a process comes to its engine: founding it with everybody, or joining those who train.

A joiner runs the user's script from the top while the others train: links and groups
first (alone), then Megatron's own initialisation, the model, and only then the engine,
once it is admitted. Whatever it can do before they wait for it, it does before.
"""

from __future__ import annotations

from megatron.elastic.comm.errors import CommError, PeerLost
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.generation.factory import StageGone
from megatron.elastic.engine.generation.hardware import survey
from megatron.elastic.engine.generation.report import NEWCOMER, newcomers
from megatron.elastic.engine.generation.state_catalog import build_layouts, exchange_catalog, own_catalog
from megatron.elastic.engine.transaction.early_links import LinksAhead
from megatron.elastic.engine.transaction.join import JoinState, receive_join_state
from megatron.elastic.engine.transaction.wait_for_ranks import await_ranks
from megatron.elastic.observe.events import ReadyEvent
from megatron.elastic.runtime.assembly import EngineParts, Layouts, assemble, beginning
from megatron.elastic.runtime.connect import Links
from megatron.elastic.runtime.warm_up import rehearse
from megatron.elastic.state.layout import UnitLayout

__all__ = ["JobGone", "found", "join"]


class JobGone(RuntimeError):
    """Whoever held anything is gone while a newcomer waited: there is nothing to join.

    ``begins_anew``: that was decided already; else it depends on whether there is a checkpoint.
    """

    def __init__(self, begins_anew: bool) -> None:
        super().__init__("the job this rank was to join has ended")
        self.begins_anew = begins_anew


def found(links: Links, job: EngineParts) -> Engine:
    """The engine at the start of a job, together with everybody. Its state is what the model's parameters say."""
    assert links.decision is not None, "a newcomer joins, it does not found"
    shard = job.launch_topology.shard(links.fabric.rank)
    catalog = exchange_catalog(job.interface, shard, links.fabric)
    layouts = build_layouts(catalog, job.config.block_bytes)
    configuration, record = beginning(job, job.launched, layouts, links.decision)
    arena = Arena(job.interface, _of_shard(layouts, shard))
    hardware = survey(links.fabric, links.threads)
    engine = assemble(links, job, links.decision, layouts, arena, configuration, record, hardware)
    engine.adopt_parameters()
    links.injector.settle()
    return engine


def join(links: Links, job: EngineParts) -> tuple[Engine, JoinState]:
    """The engine of a rank that comes later: waits to be admitted, then takes the members' position.

    What can be made without them (its arena) is made before anybody waits for it, and the rest is
    rehearsed. Raises ``ValueError`` when its model is not the job's, :class:`JobGone` when there is no job any more.
    """
    fabric, timeout = links.fabric, job.settings.communication_timeout
    shard = job.launch_topology.shard(fabric.rank)
    catalog = own_catalog(job.interface, shard)
    own = build_layouts(catalog, job.config.block_bytes)
    known = _of_shard(own, shard)
    arena = Arena(job.interface, known)
    rehearse(links, job, catalog, arena)
    links.events.write(ReadyEvent())
    ahead = LinksAhead(fabric, timeout, links.threads)
    links.membership.watch_members(ahead.members_are)
    while True:
        try:
            decision = links.membership.decide(fabric.address(), NEWCOMER, timeout)
            if decision.reason == "start" or len(newcomers(decision)) == len(decision.members):
                raise JobGone(begins_anew=decision.reason == "start")
            ahead.stop()
            fabric.edit(decision.generation, decision.members, timeout)
            join_state = receive_join_state(fabric, decision)
            layouts = build_layouts(join_state.catalog, job.config.block_bytes)
            if any(layouts.get(key) != layout for key, layout in own.items()):
                raise ValueError(f"rank {fabric.rank}: the parameters of its model are not those of the job's")
            known.update(_of_shard(layouts, shard))
            engine = assemble(
                links, job, decision, layouts, arena, join_state.configuration, join_state.record, join_state.hardware
            )
            engine.join(join_state)
            links.events.generation = decision.generation
            return engine, join_state
        except StageGone as gone:  # others are waited for as well
            respawn, patience = job.config.respawn, job.config.detection_timeout
            await_ranks(links.membership, gone, -1, respawn, patience, _unsaid, links.threads)
        except CommError as error:
            if isinstance(error, PeerLost) and not error.heard:
                links.membership.suspect(error.rank, error.why)


def _unsaid(line: str) -> None:
    """The members say it."""


def _of_shard(layouts: Layouts, shard: int) -> dict[int, UnitLayout]:
    """Unit → layout, as tensor-parallel rank ``shard`` holds it."""
    return {unit: layout for (unit, of), layout in layouts.items() if of == shard}
