"""From launcher and arguments to an engine.

The order matters to a joiner, which runs the user's script from the top while
the others train: links and groups first (alone), then Megatron's own
initialisation, the model, and only then the engine, which a first start builds
together with everybody and a joiner when it is admitted.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from megatron.elastic.comm import install, make_fabric
from megatron.elastic.comm.errors import CommError, PeerLost
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.config import ConfigError, ElasticConfig
from megatron.elastic.control import env
from megatron.elastic.control.client import WorkerMembership
from megatron.elastic.control.membership import Activity, Decision
from megatron.elastic.engine.ahead import LinksAhead
from megatron.elastic.engine.assignment import Assignment
from megatron.elastic.engine.basis import Basis, History
from megatron.elastic.engine.buffers import Arena
from megatron.elastic.engine.catalog import build_layouts, exchange_catalog, own_catalog
from megatron.elastic.engine.certificates import Verdict
from megatron.elastic.engine.clocks import Clocks
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.exact import ExactGradients, one_sample_pieces
from megatron.elastic.engine.inject import Injector, parse
from megatron.elastic.engine.joining import NEWCOMER, Welcome, newcomers, receive_welcome
from megatron.elastic.engine.listener import Listener, Stepped
from megatron.elastic.engine.machine import Machine, survey
from megatron.elastic.engine.movement import Moved
from megatron.elastic.engine.nominal import Nominal
from megatron.elastic.engine.pacing import Pacing
from megatron.elastic.engine.port import ModelPort
from megatron.elastic.engine.position import Position
from megatron.elastic.engine.recovery import Outcome, Recovery, failure_domains
from megatron.elastic.engine.recut import Recut, unmeasured_profile
from megatron.elastic.engine.settings import Settings
from megatron.elastic.engine.standing import Standing, unit_groups
from megatron.elastic.engine.transaction import Tools
from megatron.elastic.engine.waiting import StageGone, await_ranks
from megatron.elastic.mcore.narrate import (
    narrate_clock,
    narrate_movement,
    narrate_pace,
    narrate_recut,
    narrate_step,
    narrate_verdict,
)
from megatron.elastic.observe.events import EventLog, Ready
from megatron.elastic.observe.phases import PhaseTimer
from megatron.elastic.observe.timeline import Timeline
from megatron.elastic.plan.choice import Choice, choice_named
from megatron.elastic.plan.model import Profile
from megatron.elastic.plan.pace import Pace
from megatron.elastic.plan.profile import SpeedOptions
from megatron.elastic.platform.frequency import Kind, frequency_of, open_frequency
from megatron.elastic.platform.select import select
from megatron.elastic.state.layout import UnitLayout
from megatron.elastic.state.ownership import initial
from megatron.elastic.state.placement import Rules
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import StepRecord

__all__ = ["Job", "JobGone", "Links", "found", "join", "open_links"]

_EVIDENCE_NS = 500_000_000
"""Computing time that must show a rank slow before plans follow: the moods of a machine pass."""

_BAND_PPM = 150_000
"""Smaller differences of speed change no plan."""

Layouts = Mapping[tuple[int, int], UnitLayout]


@dataclass(frozen=True)
class Links:
    """This process's connection to the others: control plane and communicator."""

    membership: WorkerMembership
    fabric: Fabric
    events: EventLog
    injector: Injector
    decision: Decision | None
    """The first generation; ``None`` for a joiner that is yet to be admitted."""


def open_links(config: ElasticConfig, timeout: float) -> Links:
    """Join the control plane, listen, and (unless joining later) connect to everybody.

    Raises ``NotUnderLauncher`` outside the elastic launcher.
    """
    membership = WorkerMembership.from_env()
    fabric = make_fabric(
        config,
        rank=membership.rank,
        slots=membership.slots,
        incarnation=membership.incarnation,
        run_id=os.environ[env.RUN_ID],
        secret=bytes.fromhex(os.environ[env.SECRET]),
        store=lambda: _agent_store(timeout),
        host=os.environ[env.ADDRESS],
        timeout=timeout,
    )
    events = EventLog(config.event_log, membership.rank, membership.incarnation)
    injector = Injector(parse(config.inject or ""), membership.rank, membership.incarnation)
    membership.start(fabric.interrupt)
    membership.sample(lambda: _waiting(fabric))
    install(fabric)
    # Slurm and others signal every process of a job, not only the launcher.
    signal.signal(signal.SIGTERM, lambda number, frame: membership.drain())
    decision = None
    if not membership.newcomer:
        membership.request("setup")  # until "begin", nobody here holds what could outlive a loss
        decision = membership.decide(fabric.address(), "", timeout)
        fabric.edit(decision.generation, decision.members, timeout)
        events.generation = decision.generation
    return Links(membership, fabric, events, injector, decision)


def _agent_store(timeout: float) -> dist.Store:
    """The first agent's store. Raises :class:`ConfigError` where there is none (native links need none)."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigError("--elastic-comm gloo needs a store in the first agent: leave out --rdzv-backend etcd")
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*where, is_master=False, timeout=timedelta(seconds=timeout))


def _has_steady_clock(config: ElasticConfig) -> bool:
    """Whether times measured here may change plans: ranks that share a core measure each other."""
    if config.fail_slow == "auto" and select().name == "cpu":
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= len(os.sched_getaffinity(0))
    return config.fail_slow != "off"


def _clocks(links: Links, config: ElasticConfig, timer: PhaseTimer) -> Clocks | None:
    """The frequency axis, if asked for; the first rank of a node says what is controlled, or why nothing is."""
    if config.frequency == "off":
        return None
    local = os.environ.get("LOCAL_RANK", "0")
    if config.frequency == "auto":
        control = frequency_of(select().name, int(local))
    else:
        kind, device, path = [*config.frequency.replace("{local_rank}", local).split(":", 2), "", ""][:3]
        control = open_frequency(cast(Kind, kind), device, path)
    if local == "0":
        print(f"--elastic-frequency: {control.why()}", flush=True)
    return Clocks(
        control,
        say=lambda line: print(f"rank {links.fabric.rank}: {line}", flush=True),
        note=lambda applied, power: narrate_clock(links.events, timer.current.step + 1, applied, power),
    )


def _waiting(fabric: Fabric) -> Activity | None:
    waiting = fabric.waiting_for()
    return Activity(-1, "communication", waiting) if waiting else None


class JobGone(RuntimeError):
    """Whoever held anything is gone while a newcomer waited: there is nothing to join.

    ``begins_anew``: that was decided already; else it depends on whether there is a checkpoint.
    """

    def __init__(self, begins_anew: bool) -> None:
        super().__init__("the job this rank was to join has ended")
        self.begins_anew = begins_anew


@dataclass(frozen=True)
class Job:
    """What an engine is built from besides links: the model and what is constant over the run."""

    port: ModelPort
    nominal: Nominal
    config: ElasticConfig
    settings: Settings
    on_settled: Callable[[Outcome, Standing, float], None]
    host_state: Callable[[], Mapping[str, Any]]
    on_notice: Callable[[str], None]
    choose: Choice | None = None
    """In place of the configured policy."""
    profile: Profile | None = None
    """Costs of units where they are known beforehand; else all alike."""
    assignment: Assignment | None = None
    """Who holds what at launch, where it is not Megatron's cut."""


def found(links: Links, job: Job) -> Engine:
    """The engine at the start of a job, together with everybody. Its state is what the model's parameters say."""
    assert links.decision is not None, "a newcomer joins, it does not found"
    shard = job.nominal.shard(links.fabric.rank)
    catalog = exchange_catalog(job.port, shard, links.fabric.world, links.fabric.slots)
    layouts = build_layouts(catalog, job.config.block_bytes)
    assignment = job.assignment or Assignment.at_launch(job.nominal)
    groups = unit_groups(assignment, layouts, links.decision.members)
    config = job.config
    rules = Rules(config.mirrors, config.scatter_width, failure_domains(links.decision), config.ownership)
    basis = Basis(initial(groups, rules), assignment)
    record = replace(StepRecord.initial(job.settings.hyper), placement=basis.digest)
    arena = Arena(job.port, _of_shard(layouts, shard))
    engine = _assemble(links, job, links.decision, layouts, arena, basis, record, survey(links.fabric))
    engine.adopt_parameters()
    links.injector.settle()
    return engine


def join(links: Links, job: Job) -> tuple[Engine, Welcome]:
    """The engine of a rank that comes later: waits to be admitted, then takes the members' position.

    What can be made without them (its arena) is made before anybody waits for it. Raises
    ``ValueError`` when its model is not the job's, :class:`JobGone` when there is no job any more.
    """
    fabric, timeout = links.fabric, job.settings.communication_timeout
    shard = job.nominal.shard(fabric.rank)
    own = build_layouts(own_catalog(job.port, shard), job.config.block_bytes)
    known = _of_shard(own, shard)
    arena = Arena(job.port, known)
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
            engine = _assemble(
                links, job, decision, layouts, arena, welcome.basis, welcome.record, welcome.machine
            )
            engine.join(welcome)
            links.events.generation = decision.generation
            return engine, welcome
        except StageGone as gone:  # others are waited for as well
            respawn, patience = job.config.respawn, job.config.detection_timeout
            await_ranks(links.membership, gone, -1, respawn, patience, say=lambda line: None)  # the members say it
        except CommError as error:
            if isinstance(error, PeerLost) and not error.heard:
                links.membership.suspect(error.rank, error.why)


@dataclass(frozen=True)
class _Narrator(Listener):
    """Writes what the engine did into the event log, and hands on what the host prints."""

    events: EventLog
    timeline: Timeline
    job: Job

    def stepped(self, record: StepRecord, standing: Standing, step: Stepped) -> None:
        narrate_step(self.events, self.timeline, record, standing, step)

    def settled(self, outcome: Outcome, standing: Standing, seconds: float) -> None:
        self.job.on_settled(outcome, standing, seconds)

    def noticed(self, why: str) -> None:
        self.job.on_notice(why)

    def paced(self, record: StepRecord, before: Standing, standing: Standing) -> None:
        narrate_pace(self.events, record, before, standing)

    def recut(self, record: StepRecord, standing: Standing, recut: Recut) -> None:
        narrate_recut(record, standing, recut)

    def moved(self, record: StepRecord, standing: Standing, moved: Moved) -> None:
        narrate_movement(self.events, record, standing, moved)

    def examined(self, standing: Standing, verdict: Verdict) -> None:
        narrate_verdict(self.events, standing, verdict)


def _profile(job: Job, layouts: Layouts, arena: Arena, machine: Machine) -> Profile:
    """Costs before anything is measured."""
    shape, dtype = job.port.boundary(1)
    copies, gradient = 1 + job.config.mirrors, job.config.snapshot == "gradient"
    costs = unmeasured_profile(
        job.nominal, layouts, shape[0], shape.numel() * dtype.itemsize, arena.dtype.itemsize,
        job.port.activation_bytes, state_bytes=16 * copies if gradient else 4 + 24 * copies,
    )  # fmt: skip
    return replace(costs, link_bytes_per_s=machine.link_bytes_per_s, state_in_memory=select().name == "cpu")


def _of_shard(layouts: Layouts, shard: int) -> dict[int, UnitLayout]:
    """Unit → layout, as tensor-parallel rank ``shard`` holds it."""
    return {unit: layout for (unit, of), layout in layouts.items() if of == shard}


def _assemble(
    links: Links,
    job: Job,
    decision: Decision,
    layouts: Layouts,
    arena: Arena,
    basis: Basis,
    record: StepRecord,
    machine: Machine,
) -> Engine:
    fabric, rank = links.fabric, links.fabric.rank
    timeline = Timeline(job.config.trace)
    timer = PhaseTimer(timeline.moved if timeline.enabled else None)
    links.injector.enter([at.incarnation for at in decision.members.values()], job.nominal.slots)
    per_token, split = job.settings.per_token_loss, job.config.schedule == "zero-bubble"
    choose = job.choose or choice_named(job.config.policy, split, per_token)
    exact = None
    if job.config.exact:
        exact, choose = ExactGradients(arena, job.nominal.grid.global_batch_size), one_sample_pieces(choose)
        job.port.separate_uses(exact.contribute)
    tools = Tools(
        port=job.port,
        arena=arena,
        pool=StatePool(rank, layouts, job.settings.hyper, job.config.snapshot),
        layouts=layouts,
        fabric=fabric,
        settings=job.settings,
        reach=links.injector.reach,
        publish=lambda phase, waiting: links.membership.publish(Activity(timer.current.step, phase, waiting)),
        drag=links.injector.drag,
        timeline=timeline,
        steady_clock=_has_steady_clock(job.config),
        exact=exact,
    )
    recovery = Recovery(
        membership=links.membership,
        fabric=fabric,
        nominal=job.nominal,
        config=job.config,
        layouts=layouts,
        arena=arena,
        injector=links.injector,
        timeout=job.settings.communication_timeout,
        choose=choose,
        profile=_profile(job, layouts, arena, machine) if job.profile is None else job.profile,
        machine=machine,
    )
    position = Position(
        tools=tools,
        recovery=recovery,
        record=record,
        standing=recovery.stand(decision, basis, record),
        history=History(basis),
        injector=links.injector,
        timer=timer,
        listener=_Narrator(links.events, timeline, job),
    )
    pace = Pace(SpeedOptions(evidence_ns=_EVIDENCE_NS, band_ppm=_BAND_PPM))
    pacing = Pacing(position, pace, _clocks(links, job.config, timer))
    engine = Engine(position, pacing, job.host_state, newcomer=links.decision is None)
    links.injector.flip = engine.flip_bit
    return engine
