"""The construction of an engine from links, a model and the decision of a generation.

It is the same for ranks of the first start and for newcomers (:mod:`start`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, cast

from megatron.elastic.config import ConfigError, ElasticConfig
from megatron.elastic.control import env
from megatron.elastic.control.membership import Activity, Decision
from megatron.elastic.engine.compute.block_checksums import CHECKSUM_SLOTS
from megatron.elastic.engine.compute.buffers import Arena
from megatron.elastic.engine.compute.clocks import Clocks
from megatron.elastic.engine.compute.exact_gradients import ExactGradients, whole_microbatches
from megatron.elastic.engine.compute.message_memory import MessageMemory
from megatron.elastic.engine.compute.model_interface import ModelInterface
from megatron.elastic.engine.compute.piece_times import clock_of
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.cell_sizes import CellSizes
from megatron.elastic.engine.generation.configuration import Configuration, History
from megatron.elastic.engine.generation.domains import failure_domains, placement_rules
from megatron.elastic.engine.generation.factory import ViewFactory
from megatron.elastic.engine.generation.hardware import Hardware
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.repartition import Recut, unmeasured_profile
from megatron.elastic.engine.generation.report import Report, reports_of
from megatron.elastic.engine.generation.shape import CellCut
from megatron.elastic.engine.generation.view import View, unit_groups
from megatron.elastic.engine.settings import Settings
from megatron.elastic.engine.transaction.agreement import Agreement, RecoveryOutcome, StateLost
from megatron.elastic.engine.transaction.certificates import CertificateOutcome
from megatron.elastic.engine.transaction.context import Context
from megatron.elastic.engine.transaction.listener import Listener, Stepped, Voted
from megatron.elastic.engine.transaction.protection import Protected
from megatron.elastic.engine.transaction.rebalance import Rebalancer
from megatron.elastic.engine.transaction.streams import Moved
from megatron.elastic.engine.transaction.tools import Tools
from megatron.elastic.observe.events import EventLog
from megatron.elastic.observe.phases import PhaseTimer
from megatron.elastic.observe.timeline import Timeline
from megatron.elastic.plan.crews import crewed
from megatron.elastic.plan.dataflow import microbatches
from megatron.elastic.plan.model import Profile
from megatron.elastic.plan.pace import Pace
from megatron.elastic.plan.policies.registry import Choice, choice_of, policy_named
from megatron.elastic.plan.profile import SpeedOptions
from megatron.elastic.platform.frequency import Kind, frequency_of, open_frequency
from megatron.elastic.platform.own_device import own_device
from megatron.elastic.platform.select import select
from megatron.elastic.platform.threads import Threads
from megatron.elastic.runtime.connect import Links
from megatron.elastic.runtime.owner_memory import device_place
from megatron.elastic.runtime.publish import Publisher
from megatron.elastic.runtime.telemetry import (
    write_certificate,
    write_clock,
    write_experts,
    write_lost_state,
    write_migration,
    write_protection,
    write_record,
    write_recut,
    write_rehoming,
    write_report,
    write_speeds,
    write_step,
)
from megatron.elastic.runtime.tolerance import Tolerances
from megatron.elastic.state.device_place import DevicePlace
from megatron.elastic.state.layout import UnitLayout, UnitShard
from megatron.elastic.state.memory import MIRROR_BYTES, OWNER_BYTES, SUM_BYTES
from megatron.elastic.state.ownership import initial
from megatron.elastic.state.place import HOST
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.protocol import Resolution
from megatron.elastic.state.record import StepRecord
from megatron.elastic.state.relocation import Relocation

__all__ = ["EngineParts", "Layouts", "assemble", "beginning"]

_EVIDENCE_NS = 500_000_000
"""Computing time in which a rank must be slow before plans change, so that short disturbances have no effect."""

_BAND_PPM = 150_000
"""Differences of speed below this change no plan."""

Layouts = Mapping[UnitShard, UnitLayout]


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine besides links: the model and the constants of the run."""

    interface: ModelInterface
    launch_topology: LaunchTopology
    config: ElasticConfig
    settings: Settings
    on_settled: Callable[[RecoveryOutcome, View, float], None]
    host_state: Callable[[], str]
    on_notice: Callable[[str], None]
    on_moved: Callable[[View], None] = lambda _: None
    """Called after a migration, whose cells may be others."""
    choose: Choice | None = None
    """Chooses plans in place of the configured policy, if given."""
    profile: Profile | None = None
    """Costs of units, if known beforehand; None: estimated from sizes."""
    assignment: Assignment | None = None
    """Assignment of units at launch, if it is not Megatron's cut."""

    @property
    def launched(self) -> Assignment:
        """Assignment of units at launch."""
        return self.assignment or Assignment.at_launch(self.launch_topology)


def beginning(
    job: EngineParts, assignment: Assignment, layouts: Layouts, decision: Decision
) -> tuple[Configuration, StepRecord]:
    """Return the first configuration of a job that starts with the members of ``decision``, and its record."""
    config = job.config
    rules = placement_rules(config, failure_domains(decision))
    groups = unit_groups(assignment, layouts, decision.members, job.interface.covered)
    configuration = Configuration(initial(groups, rules), assignment)
    return configuration, replace(StepRecord.initial(job.settings.hyper), placement=configuration.digest)


def assemble(
    links: Links,
    job: EngineParts,
    decision: Decision,
    layouts: Layouts,
    arena: Arena,
    configuration: Configuration,
    record: StepRecord,
    hardware: Hardware,
    measured: Assignment,
) -> Engine:
    """Return this rank's engine in the generation of ``decision``, at ``record``, under ``configuration``.

    ``measured``: the assignment that the record names. The engine holds no state yet. Raises :class:`StageGone` if some
    unit has no whole living cell.
    """
    arena.hold(arena.built)  # costs are asked of the model: an admission cut short left it as in a cell of another size
    timeline = Timeline(job.config.trace)
    timer = PhaseTimer(timeline.moved if timeline.enabled else None)
    links.injector.enter([at.incarnation for at in decision.members.values()], job.launch_topology.slots)
    choose, exact = _planning(job, arena)
    tools = _tools(links, job, layouts, arena, hardware, exact, timeline, timer)
    views = _views(links, job, layouts, arena, hardware, choose)
    agreement = Agreement(links.membership, views, links.injector, job.settings.communication_timeout, links.threads)
    context = Context(
        tools=tools,
        views=views,
        agreement=agreement,
        record=record,
        view=views.build_view(decision, configuration, record, measured, reports_of(decision)),
        history=History(configuration),
        injector=links.injector,
        timer=timer,
        listener=_listener(links, job, timeline),
    )
    pace = Pace(SpeedOptions(evidence_ns=_EVIDENCE_NS, band_ppm=_BAND_PPM))
    rebalancer = Rebalancer(context, pace, _clocks(links, job.config, timer))
    engine = Engine(context, rebalancer, job.host_state, newcomer=links.decision is None)
    links.injector.flip, links.injector.spoil = engine.flip_bit, engine.spoil_gradient
    return engine


def _planning(job: EngineParts, arena: Arena) -> tuple[Choice, ExactGradients | None]:
    """Return what answers with a plan, and the gradient sums of exact mode if it is on."""
    per_token, split = job.settings.per_token_loss, job.config.schedule == "zero-bubble"
    policy = policy_named(job.config.policy)
    cut = per_token and not job.settings.whole_microbatches and not job.config.exact
    choose = crewed(job.choose or choice_of(policy, split, cut))
    if not job.config.exact:
        return choose, None
    topology = job.launch_topology
    exact = ExactGradients(arena, microbatches(topology.grid), parts=topology.tensor)
    job.interface.separate_uses(exact.contribute)
    return whole_microbatches(choose), exact


def _tools(
    links: Links,
    job: EngineParts,
    layouts: Layouts,
    arena: Arena,
    hardware: Hardware,
    exact: ExactGradients | None,
    timeline: Timeline,
    timer: PhaseTimer,
) -> Tools:
    place, snapshot = _owners(job.config, hardware)
    pool = StatePool(links.fabric.rank, layouts, job.settings.hyper, snapshot, place or HOST)
    return Tools(
        interface=job.interface,
        arena=arena,
        pool=pool,
        messages=MessageMemory(CHECKSUM_SLOTS, links.fabric),
        layouts=layouts,
        fabric=links.fabric,
        settings=job.settings,
        reach=links.injector.reach,
        publish=lambda phase, waiting: links.membership.publish(Activity(timer.current.step, phase, waiting)),
        drag=links.injector.drag,
        timeline=timeline,
        steady_clock=_has_steady_clock(job.config, hardware),
        clock=clock_of(select()),
        exact=exact,
        threads=links.threads,
        relocation=None if place is None else _relocation(pool, place, links.threads),
    )


def _views(
    links: Links, job: EngineParts, layouts: Layouts, arena: Arena, hardware: Hardware, choose: Choice
) -> ViewFactory:
    sizes = _sizes(job, layouts)
    return ViewFactory(
        fabric=links.fabric,
        launch_topology=job.launch_topology,
        config=job.config,
        layouts=layouts,
        arena=arena,
        choose=choose,
        moves_units=_moves_units(job),
        profile=_profile(job, layouts, arena, hardware) if job.profile is None else job.profile,
        hardware=hardware,
        sizes=sizes,
        lives_on=_lives_on(job, sizes, says=links.fabric.rank == 0 and links.decision is not None),
        batch_size=job.settings.batch_size,
        covered=job.interface.covered,
        refusal=job.interface.refusal,
    )


def _listener(links: Links, job: EngineParts, timeline: Timeline) -> _EventWriter:
    """Return what hears of steps and recoveries: it writes events and publishes."""
    rank = links.fabric.rank
    tolerances = Tolerances(
        rank,
        job.config.mirrors,
        links.events,
        announce=lambda text, protection: links.membership.announce(text, protection),
        store=_first_serves_all(),
    )
    publisher = Publisher(
        links.membership,
        job.settings.steps,
        _ranks_of_node(rank),
        draws=job.config.dashboard is not None,
        load=job.settings.hyper.load,
    )
    return _EventWriter(links.events, timeline, job, tolerances, publisher)


def _owners(config: ElasticConfig, hardware: Hardware) -> tuple[DevicePlace | None, Literal["gradient", "state"]]:
    """Return the device that owned blocks lie on, if they do, and what mirrors receive."""
    place = device_place(select()) if hardware.owners.on_device else None
    return place, config.snapshot if hardware.owners.same_bits else "state"


def _relocation(pool: StatePool, place: DevicePlace, threads: Threads) -> Relocation:
    platform = select()
    index = own_device(platform)
    return Relocation(
        pool,
        place,
        free=lambda: platform.memory(index).free,
        say=lambda line: print(line, flush=True),
        threads=threads,
    )


def _moves_units(job: EngineParts) -> bool:
    """Return whether layers may change place; the cells of a crew hold the same ones."""
    launch = job.launch_topology
    moves = policy_named(job.config.policy).moves_units and job.config.steps_before_migration >= 0
    # From one stage layers can only move to further ones.
    return moves and not launch.experts and not job.interface.refusal(launch.tensor, launch.context, 2)


def _sizes(job: EngineParts, layouts: Layouts) -> CellSizes:
    """Return the numbers of ranks that cells of this model may have."""
    launch = job.launch_topology
    parameters = {slot.spec for layout in layouts.values() for slot in layout.slots}
    largest_part = partial(job.interface.largest_part, parameters=parameters)
    return CellSizes.of(largest_part, CellCut(launch.tensor, launch.context), only_whole=launch.experts > 0)


def _lives_on(job: EngineParts, sizes: CellSizes, says: bool) -> bool:
    """Return whether damaged cells go on with their living ranks. ``says``: print why not, where 'auto' decides.

    Raises ``ConfigError`` if that was asked for and the model cannot be computed by smaller groups.
    """
    config, size, sequence = job.config, job.launch_topology.cell_size, job.launch_topology.context > 1
    alone = size > 1 and not sizes.smaller
    groups = "groups that share a sequence" if sequence else "tensor-parallel groups"
    only = f"this model is computed by {groups} of {size} ranks only"
    if sizes.only_whole:
        alone, only = True, "its ranks have experts for other groups too (--expert-model-parallel-size)"
    if config.tensor == "live-on" and alone:
        raise ConfigError(f"--elastic-tensor live-on: {only}; use --elastic-tensor park")
    if config.tensor != "auto":
        return config.tensor == "live-on"
    reasons = {
        only: alone,
        "--elastic-exact keeps the order of sums": config.exact,
        f"--elastic-policy {config.policy} has no smaller groups": policy_named(config.policy).smaller_cells == "never",
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    if why and size > 1 and says:
        print(f"--elastic-tensor auto: a group that loses a rank waits until it is back, since {why}", flush=True)
    return not why


def _profile(job: EngineParts, layouts: Layouts, arena: Arena, hardware: Hardware) -> Profile:
    """Return the costs of units before any measurement."""
    shape, dtype = job.interface.boundary(1)
    mirrors, gradient = job.config.mirrors, _owners(job.config, hardware)[1] == "gradient"
    owner, mirror = (OWNER_BYTES, MIRROR_BYTES) if gradient else (28, 24)
    every = owner + mirror * mirrors
    here = every if select().name == "cpu" else owner if hardware.owners.on_device else 0
    costs = unmeasured_profile(
        job.launch_topology,
        layouts,
        shape[0],
        shape.numel() * dtype.itemsize,
        arena.dtype.itemsize,
        job.interface.activation_bytes,
        state_bytes=every,
        used_ppm=job.interface.used_ppm,
        quantized_bytes=job.interface.quantized_bytes,
        gradient_bytes=4 + (SUM_BYTES if job.config.exact else 0),
    )
    return replace(costs, link_bytes_per_s=hardware.link_bytes_per_s, resident_ppm=-(-1_000_000 * here // every))


def _first_serves_all() -> bool:
    """Return whether other nodes depend on the first one because its launcher serves the store."""
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    return nodes > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _position() -> int:
    """Return the number of this rank among those of its node."""
    return int(os.environ.get(env.POSITION) or os.environ.get("LOCAL_RANK", "0"))


def _ranks_of_node(rank: int) -> range:
    """Return the ranks of this rank's node, which are consecutive."""
    first = rank - _position()
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _has_steady_clock(config: ElasticConfig, hardware: Hardware) -> bool:
    """Return whether times measured by this rank may change plans: not if ranks share a core or a device."""
    if config.fail_slow != "auto":
        return config.fail_slow != "off"
    if select().name != "cpu":
        return hardware.sharing == 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= len(os.sched_getaffinity(0))


def _clocks(links: Links, config: ElasticConfig, timer: PhaseTimer) -> Clocks | None:
    """Return the clocks of ``--elastic-frequency``, if given; the first rank of a node prints its status."""
    if config.frequency == "off":
        return None
    position = _position()
    if config.frequency == "auto":
        control = frequency_of(select().name, own_device(select()))
    else:
        kind, device, path = [*config.frequency.replace("{local_rank}", str(position)).split(":", 2), "", ""][:3]
        control = open_frequency(cast(Kind, kind), device, path)
    if position == 0:
        print(f"--elastic-frequency: {control.why()}", flush=True)
    return Clocks(
        control,
        say=lambda line: print(f"rank {links.fabric.rank}: {line}", flush=True),
        note=lambda applied, power: write_clock(links.events, timer.current.step + 1, applied, power),
        boost=config.frequency_boost,
    )


@dataclass(frozen=True)
class _EventWriter(Listener):
    """Logs and publishes the engine's events, and forwards to the host the lines that it prints."""

    events: EventLog
    timeline: Timeline
    job: EngineParts
    tolerances: Tolerances
    publisher: Publisher

    def recorded(
        self,
        record: StepRecord,
        view: View,
        source: str,
        voted: Voted | None = None,
        resolution: Resolution | None = None,
    ) -> None:
        write_record(self.events, record, view, source, voted, resolution)

    def reporting(self, report: Report) -> None:
        write_report(self.events, report)

    def lost(self, lost: StateLost, pool: StatePool) -> None:
        write_lost_state(self.events, lost, pool)

    def stepped(self, record: StepRecord, view: View, step: Stepped) -> None:
        write_step(self.events, self.timeline, record, view, step)
        write_experts(self.events, record, view, self.job.settings.hyper.load)
        self.publisher.stepped(record, view, step)
        self.tolerances.look(view, record.version)

    def settled(self, outcome: RecoveryOutcome, view: View, seconds: float) -> None:
        self.job.on_settled(outcome, view, seconds)
        self.publisher.rests()
        assert outcome.resolution.record is not None, "only a lost state has no record"
        self.tolerances.look(view, outcome.resolution.record.version)
        self.publisher.draw(outcome.resolution.record, view)

    def noticed(self, why: str) -> None:
        self.job.on_notice(why)

    def paced(self, record: StepRecord, before: View, view: View) -> None:
        write_speeds(self.events, record, before, view)

    def recut(self, record: StepRecord, view: View, recut: Recut) -> None:
        write_recut(record, view, recut)
        self.publisher.moves(recut.moved_units)

    def reshapes(self, units: int) -> None:
        self.publisher.moves(units)

    def rehomes(self, record: StepRecord, view: View, before: float, after: float, replicas: int) -> None:
        write_rehoming(record, view, before, after, replicas)

    def moved(self, record: StepRecord, view: View, moved: Moved) -> None:
        write_migration(self.events, record, view, moved)
        if not moved.migration.urgent:
            self.publisher.rests()
        self.tolerances.look(view, record.version)
        self.job.on_moved(view)

    def protected(self, record: StepRecord, view: View, protected: Protected) -> None:
        write_protection(self.events, record, protected)
        self.publisher.protected(record, protected)

    def examined(self, view: View, verdict: CertificateOutcome) -> None:
        write_certificate(self.events, view, verdict)
