"""The start of a rank's engine: together with all ranks, or as a newcomer of a running job.

A newcomer runs the user's script from the top while the members train. It makes links and
groups (alone), runs Megatron's own initialisation, builds the model, and makes its engine
once it is admitted. It does as much as possible before the members wait for it.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.elastic.comm.errors import CommError, PeerLost
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.engine.compute.model_interface import ForwardStep
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.generation.factory import StageGone
from megatron.elastic.engine.generation.hardware import OwnerMemory, survey
from megatron.elastic.engine.generation.report import NEWCOMER, newcomers
from megatron.elastic.engine.generation.state_catalog import build_layouts, built, exchange_catalog, own_catalog
from megatron.elastic.engine.transaction.early_links import EarlyLinks
from megatron.elastic.engine.transaction.join import JoinState, receive_join_state
from megatron.elastic.engine.transaction.wait_for_ranks import await_ranks
from megatron.elastic.observe.event_kinds import ReadyEvent
from megatron.elastic.platform.garbage import garbage_later
from megatron.elastic.platform.select import select
from megatron.elastic.runtime.assembly import EngineParts, assemble, beginning
from megatron.elastic.runtime.connect import Links
from megatron.elastic.runtime.owner_memory import agree_on_owners, bytes_needed, device_place, lines, training_of
from megatron.elastic.runtime.warm_up import rehearse
from megatron.elastic.state.step_selftest import differing

__all__ = ["JobGone", "found", "join"]


class JobGone(RuntimeError):
    """All members were lost while a newcomer waited, so there is no job to join.

    ``begins_anew``: a new start was decided already; otherwise it depends on a checkpoint.
    """

    def __init__(self, begins_anew: bool) -> None:
        super().__init__("the job this rank was to join has ended")
        self.begins_anew = begins_anew


def found(links: Links, job: EngineParts) -> Engine:
    """Return the engine at the start of a job, with state from the model's parameters. Collective."""
    assert links.decision is not None, "a newcomer calls join"
    catalog = exchange_catalog(job.interface, job.launch_topology, links.fabric)
    layouts = build_layouts(catalog, job.config.block_bytes)
    configuration, record = beginning(job, job.launched, layouts, links.decision)
    own = own_catalog(job.interface, job.launch_topology, links.fabric.rank)
    arena = Arena(job.interface, layouts, built(job.interface, own, job.launch_topology, links.fabric.rank))
    owned = configuration.placement.owned_by(links.fabric.rank)
    needed = bytes_needed(job.launch_topology, job.interface, layouts, owned, arena, job.config.exact)
    hardware = survey(links.fabric, links.threads)
    owners = agree_on_owners(links.fabric, job.config, select(), needed, hardware.sharing)
    hardware = replace(hardware, owners=owners)
    if links.fabric.rank == links.fabric.alive[0]:
        print(*lines(training_of(job.config, job.launch_topology, arena, owners)), sep="\n", flush=True)
    launched = configuration.assignment
    engine = assemble(links, job, links.decision, layouts, arena, configuration, record, hardware, launched)
    engine.adopt_parameters()
    links.injector.settle()
    return engine


@garbage_later()
def join(links: Links, job: EngineParts, forward_step: ForwardStep | None = None) -> tuple[Engine, JoinState]:
    """Wait to be admitted, take over the members' context, and return the engine; for newcomers.

    The arena is made, and the rest rehearsed, before any member waits; ``forward_step`` is for that rehearsal
    (:mod:`~megatron.elastic.runtime.warm_up`). Raises ``ValueError`` if the model or the bits
    of the device are not the job's, :class:`JobGone` if the job has ended.
    """
    fabric, timeout = links.fabric, job.settings.communication_timeout
    catalog = own_catalog(job.interface, job.launch_topology, fabric.rank)
    own = build_layouts(catalog, job.config.block_bytes)
    known = dict(own)
    arena = Arena(job.interface, known, built(job.interface, catalog, job.launch_topology, fabric.rank))
    rehearsed_seconds = rehearse(links, job, catalog, arena, forward_step)
    place = device_place(select())
    unlike = () if place is None or job.config.state == "host" else differing(place)
    links.events.write(ReadyEvent(rehearsed_seconds))
    ahead = EarlyLinks(fabric, timeout, links.threads)
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
                raise ValueError(
                    f"rank {fabric.rank}: its model has other parameters than the model "
                    "of the job: start it with the same arguments"
                )
            if unlike and join_state.hardware.owners == OwnerMemory(on_device=True):
                raise ValueError(
                    f"rank {fabric.rank}: its device computes {' and '.join(unlike)} with other bits than its host, "
                    "and the job relies on equal ones: start it on another machine, or the job with "
                    "--elastic-state host"
                )
            known.update(layouts)
            engine = assemble(
                links,
                job,
                decision,
                layouts,
                arena,
                join_state.configuration,
                join_state.record,
                join_state.hardware,
                join_state.confirmed.assignment,
            )
            engine.join(join_state)
            links.events.generation = decision.generation
            return engine, join_state
        except StageGone as gone:  # more ranks are needed
            respawn, patience = job.config.respawn, job.config.detection_timeout
            await_ranks(links.membership, gone, -1, respawn, patience, _silent, links.threads)
        except CommError as error:
            if isinstance(error, PeerLost) and not error.heard:
                links.membership.suspect(error.rank, error.why, error.silent)


def _silent(line: str) -> None:
    """Drop the line: the members log it."""
