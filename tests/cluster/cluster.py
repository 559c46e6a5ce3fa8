"""A job of a few ranks in one Python process: the real engine on threads of which one runs at a time.

:func:`run` is a function of its scenario (:mod:`tests.scenario.scenario`), the seed among it. A rank's program is what
the adaptor's training loop does: links, engine, steps, now and then an evaluation, the norm of the parameters at the
end. A kill unwinds the rank's threads, and its peers find their links broken. Where ``back`` says so, the rank comes
back as a newcomer.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed import distributed_c10d as c10d
from torch.utils.data import Dataset

from megatron.elastic.config import ElasticConfig
from megatron.elastic.control.events import Readmitted, Wanted
from megatron.elastic.control.membership import Activity, Released
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.requests import Drain, Request, Reshape, SaveCheckpoint
from megatron.elastic.engine.compute.model_interface import CellPlace, Crew, ModelInterface
from megatron.elastic.engine.compute.samples import DatasetSource, StepAddress
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.generation.assignment import Assignment
from megatron.elastic.engine.generation.launch_topology import LaunchTopology
from megatron.elastic.engine.generation.view import View
from megatron.elastic.engine.inject import Effects, Fault, Injector
from megatron.elastic.engine.inject import parse as parse_faults
from megatron.elastic.engine.settings import Settings, StepResult
from megatron.elastic.engine.transaction.agreement import RecoveryOutcome, StateLost
from megatron.elastic.observe.event_kinds import BeginEvent, EndEvent
from megatron.elastic.observe.events import EventLog, clock_name
from megatron.elastic.plan.dataflow import PlanError
from megatron.elastic.plan.model import Grid, Plan, Profile, UnitCost
from megatron.elastic.runtime.assembly import EngineParts
from megatron.elastic.runtime.connect import linked
from megatron.elastic.runtime.publish import RepeatedWork, publish_recovery
from megatron.elastic.runtime.start import JobGone, found, join
from megatron.elastic.runtime.telemetry import write_recovery
from megatron.elastic.state.expert_load import ExpertLoad
from megatron.elastic.state.record import ConstantSchedule, Hyper, Rate
from tests.cluster.control import Agent, ClusterMembership, FirstAgent, Launched, SharedJournal
from tests.cluster.cut_model import CutModel
from tests.cluster.fabric import ClusterFabric, Style, Wire
from tests.cluster.grid_model import GridModel
from tests.cluster.model import LossyModel, Samples, TinyModel, collate, forward_step
from tests.cluster.routed_grid_model import RoutedGridModel
from tests.cluster.routed_model import EXPERTS, RoutedModel
from tests.cluster.scheduler import ClusterThreads, Killed, Process, Scheduler
from tests.cluster.shared_model import SharedModel
from tests.scenario.scenario import RETURNS, Scenario, parse

__all__ = [
    "RANKS",
    "Cluster",
    "Passed",
    "Program",
    "RankProcess",
    "config_of",
    "default_group_kept",
    "named",
    "on_each_rank",
    "run",
    "topology_of",
]

UNITS, MICRO_BATCH = 4, 1
"""Units of the model, rows of a micro-batch."""
RANKS = range(4)
"""Ranks of :func:`on_each_rank`."""
TIMEOUT = 3600.0
HEAVY = Profile((UnitCost(5_000_000, 10_000_000, 5_000_000, 1, 1, 1, 1),) * UNITS)
HYPER = Hyper(ConstantSchedule((Rate(0.01, 0.01),)))


SOON = 0.05
"""Seconds after which a lost rank is back. A step takes some hundredths."""


@dataclass(frozen=True)
class Program:
    """The part of a run that is no text: data, actions between steps, an observer."""

    fenced: Callable[[RankProcess, int], None] = lambda rank, step: None
    """Called after each step on each rank: ``fenced(rank, step)``."""
    died: Callable[[RankProcess], None] = lambda rank: None
    """Called at each kill, before anything follows from it."""
    samples: Dataset[torch.Tensor] = field(default_factory=Samples)
    cut: bool = False
    """Train the model that is cut over the ranks of a cell also where these are one."""
    sequence: bool = False
    """Cut the sequence over the ranks of a cell too."""
    parts: bool = False
    """The ranks of a cell share the sequence instead of the weights: the layout's tensor size is the context size."""
    grid: bool = False
    """Train the model that is cut over tensor-parallel groups, and whose sequence is cut over these groups."""
    experts: tuple[int, int] | None = None
    """(sets of experts, ranks with a part of each): with ``parts`` or ``grid``, of layers whose experts ranks share."""
    layer_losses: bool = False
    """Layers add losses of their own."""
    events: Path | None = None
    """Folder for the event logs of all ranks."""
    outside: Callable[[Cluster], None] | None = None
    """Runs beside all processes, and may end some."""
    begins_together: bool = True
    """No rank takes a step before every agent has read that all have begun."""


def rows_of(scenario: Scenario) -> int:
    """Rows of a global batch."""
    return scenario.layout.data * MICRO_BATCH * scenario.micro_batches


def config_of(scenario: Scenario) -> ElasticConfig:
    """The configuration of every rank."""
    fixed: dict[str, Any] = {
        "block_bytes": 1024,
        "fail_slow": "off",
        "verify_interval": 2,
        "respawn": scenario.returns,
    }
    return ElasticConfig(**{**fixed, **dict(scenario.settings)})


def topology_of(scenario: Scenario, parts: bool = False, experts: tuple[int, int] | None = None) -> LaunchTopology:
    """The launch; units are dealt out evenly to the stages. ``parts``, ``experts``: of :class:`Program`."""
    layout = scenario.layout
    if layout.chunks > 1:
        raise ValueError(f"{layout}: a rank of the cluster has one chunk")
    cuts = [UNITS * stage // layout.pipeline for stage in range(layout.pipeline + 1)]
    grid = Grid(rows_of(scenario), MICRO_BATCH, layout.data)
    tensor, context = (1, layout.tensor) if parts else (layout.tensor, layout.context)
    sizes, chunks = (tensor, layout.pipeline, layout.data), tuple(pairwise(cuts))
    found = LaunchTopology(*sizes, chunks, grid, extra=scenario.spares, context=context)
    if experts is None:
        return found
    replicas = config_of(scenario).replicas_of_a_rank
    return replace(found, experts=EXPERTS, expert_homes=experts[0], expert_parts=experts[1], expert_replicas=replicas)


def _model_of(topology: LaunchTopology, rank: int, fabric: ClusterFabric, program: Program) -> ModelInterface:
    """The model of a rank at launch: plain layers, or layers that are cut over the ranks of a cell.

    A rank beyond the launch builds its model as the first stage would.
    """
    _, _, stage = topology.place(rank) or (0, 0, 0)
    units = range(*topology.chunks[stage])
    if program.experts is not None:
        place = Assignment.at_launch(topology).place(rank)
        assert place is not None
        if place.crew is None:
            seats = (topology.experts_of_seat(at % topology.expert_ranks) for at in range(len(place.ranks)))
            place = replace(place, crew=Crew(place.ranks, tuple(seats), topology.expert_parts))
        if program.grid:
            return RoutedGridModel(UNITS, units, place, fabric, topology.expert_parts)
        return RoutedModel(UNITS, units, place, fabric)
    if program.parts:
        ranks = topology.cell_of(rank).ranks
        return SharedModel(UNITS, units, CellPlace(ranks, ranks.index(rank), team=1), fabric)
    if program.grid:
        ranks, team = topology.cell_of(rank).ranks, topology.tensor if topology.context > 1 else None
        return GridModel(UNITS, units, CellPlace(ranks, ranks.index(rank), team=team), fabric)
    if topology.tensor == 1 and not program.cut:
        return LossyModel(UNITS, units) if program.layer_losses else TinyModel(UNITS, units)
    place = CellPlace(topology.cell_of(rank).ranks, topology.shard(rank))
    return CutModel(UNITS, units, place, fabric, program.sequence)


def respawn_after(scenario: Scenario) -> float | None:
    """Seconds after a loss in which a rank comes back; ``None``: it does not."""
    if not scenario.returns:
        return None
    return SOON if scenario.back in RETURNS else float(scenario.back)


class Passed(NamedTuple):
    """A rank at a named point."""

    entries: int
    """Length of the journal at that time."""
    rank: int
    point: str
    step: int


@dataclass(frozen=True)
class _Effects(Effects):
    """Faults strike a process of the cluster."""

    rank: RankProcess

    def kill(self) -> NoReturn:
        self.rank.die()

    def exit(self, code: int) -> NoReturn:
        self.rank.die()

    def stop(self) -> NoReturn:
        raise AssertionError("a thread cannot be stopped")

    def sleep(self, seconds: float) -> None:
        self.rank.threads.sleep(seconds)


class _Injector(Injector):
    """Others may run at every named point."""

    def __init__(self, faults: tuple[Fault, ...], rank: RankProcess) -> None:
        super().__init__(faults, rank.rank, rank.incarnation, effects=_Effects(rank))
        self._cluster, self._of = rank.cluster, rank.rank

    def reach(self, point: str, step: int) -> None:
        self._cluster.scheduler.wait()
        self._cluster.reached[self._of, point] += 1
        self._cluster.passed.append(Passed(len(self._cluster.journal.entries), self._of, point, step))
        super().reach(point, step)


class RankProcess:
    """One incarnation of a rank."""

    def __init__(self, cluster: Cluster, rank: int, incarnation: int, newcomer: bool) -> None:
        self.cluster, self.rank, self.incarnation, self._newcomer = cluster, rank, incarnation, newcomer
        self.process = Process(f"rank {rank}.{incarnation}")
        self.threads = ClusterThreads(cluster.scheduler, self.process)
        self.launched = Launched.of(rank, incarnation, self.process)
        slots, host = cluster.scenario.ranks, f"host{rank}"
        self.fabric = ClusterFabric(cluster.wire, rank, slots, incarnation, host, TIMEOUT)
        self.process.resumed = self.fabric.enter
        self.membership = ClusterMembership(self.launched, slots, host, newcomer, self.threads, self._publish)
        self.activity = Activity(-1, "launch")
        self.engine: Engine | None = None
        self.results: dict[int, StepResult] = {}
        """Step → what the program was told of it."""
        self.records: dict[int, str] = {}
        """Step → digest of the record held after it."""
        self.evaluations: dict[int, dict[str, tuple[float, float]]] = {}
        self.norm: float | None = None
        """Of the parameters at the end: set where the program has ended."""
        self.recoveries: list[RecoveryOutcome] = []
        """The outcomes of its recoveries, in order."""
        self.plans: list[Plan] = []
        """The plan that each recovery settled on, in order."""
        self.notices: list[str] = []
        self.error: Exception | None = None
        """Why the job cannot go on."""
        cluster.scheduler.spawn(self.process, "trains", self._live)

    def die(self) -> NoReturn:
        """Be killed here."""
        self.kill()
        raise Killed

    def kill(self) -> None:
        """End this process, from any task."""
        self.fabric.break_off()
        self.cluster.scheduler.end(self.process)
        self.cluster.program.died(self)

    def _publish(self, activity: Activity) -> None:
        self.activity = activity

    def _live(self) -> None:
        log = EventLog(self.cluster.program.events, self.rank, self.incarnation)
        log.write(BeginEvent("cluster", clock_name()))
        try:
            self._train(log)
            self._write_end(log, 0)
            self.membership.finish(0)
        except (StateLost, PlanError, JobGone) as error:
            self.error = error
            self._write_end(log, 4, str(error))
            self.membership.give_up(4, str(error))
            self.cluster.scheduler.wait(lambda: not self.launched.said)
        except Released:
            self._write_end(log, 0, "leaves as requested")
            self.membership.finish(0)
        finally:
            log.close()
        self.fabric.close()
        self.cluster.scheduler.end(self.process)

    def _write_end(self, log: EventLog, code: int, why: str = "") -> None:
        log.write(EndEvent(-1 if self.engine is None else self.engine.record.version, code, why))

    def _train(self, log: EventLog) -> None:
        scenario, program, began = self.cluster.scenario, self.cluster.program, 0

        def counters() -> str:
            return json.dumps({"iteration": began})

        repeated = RepeatedWork()

        def settled(outcome: RecoveryOutcome, view: View, seconds: float) -> None:
            self.recoveries.append(outcome)
            self.plans.append(view.plan)
            engine = self.engine
            if engine is not None and log.enabled:
                speaks = min(set(view.living) - set(outcome.newcomers)) == self.rank
                step, in_step = engine.present_step, engine.in_step
                event = write_recovery(log, outcome, view, step, in_step, seconds, speaks)
                again = in_step and outcome.resolution.kind == "rerun" and not outcome.step_committed
                repeated_s = repeated.seconds(engine.context.timer, again)
                if speaks:
                    publish_recovery(self.membership, outcome, event, repeated_s)

        load = None if program.experts is None else ExpertLoad(tuple(range(UNITS)), EXPERTS)
        settings = Settings(
            7,
            replace(HYPER, load=load),
            per_token_loss=True,
            whole_microbatches=program.experts is not None,
            layer_losses=program.layer_losses,
            count_zeros=True,
            communication_timeout=TIMEOUT,
            steps=scenario.steps,
        )
        topology, rows = topology_of(scenario, program.parts, program.experts), rows_of(scenario)
        model = _model_of(topology, self.rank, self.fabric, program)
        parts = EngineParts(
            model,
            topology,
            config_of(scenario),
            settings,
            settled,
            counters,
            self.notices.append,
            profile=HEAVY if scenario.heavy else None,
        )
        injector = _Injector(self.cluster.faults, self)
        self.membership.start(self.fabric.interrupt)
        links = linked(self.membership, self.fabric, log, injector, TIMEOUT, self.threads)
        if links.decision is None:
            self.engine, told = join(links, parts)
            began = json.loads(told.host)["iteration"]
        else:
            self.engine = found(links, parts)
            self.engine.resume(self.engine.record, None)
            self.membership.request(Request.BEGIN)
            if program.begins_together:
                # Until all agents know of it a loss is no matter of the engine's: the launcher starts all ranks anew.
                self.cluster.scheduler.wait(lambda: not any(agent.state.preparing for agent in self.cluster.agents))
        engine = self.engine
        source = DatasetSource(program.samples, lambda sample: sample, collate=collate)
        for iteration in range(began, scenario.steps):
            began = iteration
            self.cluster.wish(iteration)
            result = engine.step(forward_step, source, StepAddress(iteration * rows, rows))
            self.results[iteration + 1], self.records[iteration + 1] = result, engine.record.digest
            if scenario.evaluate and (iteration + 1) % scenario.evaluate == 0:
                batches = [StepAddress(1_000_000, rows)]
                evaluated = engine.evaluate(forward_step, source, batches)
                assert not isinstance(evaluated, str), "it has no reason to end early"
                self.evaluations[iteration + 1] = evaluated
            program.fenced(self, iteration + 1)
            if engine.draining:
                break
        self.norm = engine.parameter_norm()
        engine.close()


class Cluster:
    """One run."""

    def __init__(self, scenario: Scenario, program: Program = Program()) -> None:
        self.scenario, self.program = scenario, program
        lingering = "" if scenario.back == "soon" else scenario.lingering  # no processor to leave to it
        self.faults = parse_faults(";".join([lingering, *scenario.script]))
        self.scheduler = Scheduler(scenario.seed)
        chance = self.scheduler.random.random
        # Drawn by itself, so orders of a seed stay as they were. Exact mode is refused on devices.
        enqueues = Random(f"enqueues {scenario.seed}").random() < 0.3 and ("exact", True) not in scenario.settings
        self.wire = Wire(self.scheduler, Style(eager=chance() < 0.7, meets=chance() < 0.3, enqueues=enqueues))
        self.reached: Counter[tuple[int, str]] = Counter()
        """(rank, named point) → how often it got there."""
        self.passed: list[Passed] = []
        """The same in the order in which it happened."""
        self.processes: list[RankProcess] = []
        """Every incarnation of every rank, in the order they were started."""
        self.journal = SharedJournal()
        self._wishes = list(scenario.wishes)
        nodes = {rank: Node(f"host{rank}", (rank,)) for rank in range(scenario.ranks)}
        launched, after = scenario.layout.ranks, respawn_after(scenario)
        first = FirstAgent(self.scheduler, self.journal, nodes)
        self.agents = [
            Agent(self.scheduler, self.journal, node, nodes, launched, after, self._start, first) for node in nodes
        ]

    def _start(self, rank: int, incarnation: int, newcomer: bool) -> Launched:
        started = RankProcess(self, rank, incarnation, newcomer)
        self.processes.append(started)
        return started.launched

    def wish(self, step: int) -> None:
        """A rank has ended ``step``: what users ask for then."""
        for wish in [one for one in self._wishes if one.step <= step]:
            self._wishes.remove(wish)
            match wish.what:
                case "drain":
                    self.journal.append(Wanted(Drain(wish.ranks)))
                case "checkpoint":
                    self.journal.append(Wanted(SaveCheckpoint()))
                case "reshape":
                    self.journal.append(Wanted(Reshape(*wish.ranks)))
                case "admit":
                    self.journal.append(Readmitted(wish.ranks))

    def go(self) -> None:
        """Run to the end of the job. Raises what any rank did not expect, :class:`Deadlock`; with the scenario."""
        for agent in self.agents:
            self.scheduler.spawn(agent.process, "serves", agent.run)
        outside = self.program.outside
        if outside is not None:
            self.scheduler.spawn(Process("outside"), "acts", lambda: outside(self))
        self.scheduler.over = lambda: all(agent.over for agent in self.agents)
        _set_imports_apart()
        with default_group_kept(), named(self.scenario):
            try:
                self.scheduler.run()
            finally:
                for process in self.processes:
                    process.fabric.close()

    @property
    def finished(self) -> list[RankProcess]:
        """Those whose program came to its end."""
        return [process for process in self.processes if process.norm is not None]


@contextmanager
def named(scenario: Scenario) -> Iterator[None]:
    """An error in here says which scenario repeats it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"python -m tests.scenario '{scenario}' --as cluster")
        raise


@contextmanager
def default_group_kept() -> Iterator[None]:
    """``torch.distributed``'s default group, which changes with the rank that runs, is afterwards what it was."""
    before = c10d._world._default_pg
    try:
        yield
    finally:
        c10d._world._default_pg = before


def on_each_rank(body: Callable[[ClusterFabric], None], style: Style | None = None, seed: int = 0) -> Scheduler:
    """Run ``body`` on the four ranks of a fabric that is edited to generation 1."""
    scheduler = Scheduler(seed)
    wire = Wire(scheduler, style or Style())
    fabrics = [ClusterFabric(wire, rank, len(RANKS), 0, f"host{rank}") for rank in RANKS]

    def life(fabric: ClusterFabric) -> None:
        fabric.edit(1, {other.rank: other.address() for other in fabrics}, 1.0)
        body(fabric)

    for fabric in fabrics:
        process = Process(f"rank {fabric.rank}", resumed=fabric.enter)
        scheduler.spawn(process, "runs", lambda fabric=fabric: life(fabric))  # type: ignore[misc]
    with default_group_kept():
        try:
            scheduler.run()
        finally:
            for fabric in fabrics:
                fabric.close()
    return scheduler


@cache
def _set_imports_apart() -> None:
    """A newcomer collects garbage before it is admitted: of this process's runs, not of all that it has imported."""
    gc.collect()
    gc.freeze()


def run(scenario: Scenario | str, program: Program = Program()) -> Cluster:
    """The cluster after it has run ``scenario``, or the one that a text writes down."""
    cluster = Cluster(parse(scenario) if isinstance(scenario, str) else scenario, program)
    cluster.go()
    return cluster
