"""From launcher and arguments to an engine.

The order matters to a joiner, which runs the user's script from the top while
the others train: links and groups first (alone), then Megatron's own
initialisation, the model, and only then the engine, which a first start builds
together with everybody and a joiner when it is admitted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.elastic.comm import install, make_fabric
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.config import ElasticConfig
from megatron.elastic.control import env
from megatron.elastic.control.client import WorkerMembership
from megatron.elastic.control.membership import Activity, Decision
from megatron.elastic.engine.buffers import Arena
from megatron.elastic.engine.catalog import build_layouts, exchange_catalog
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.inject import FIRST_INCARNATION, Injector, parse
from megatron.elastic.engine.nominal import Nominal
from megatron.elastic.engine.recovery import Outcome, Recovery
from megatron.elastic.engine.settings import Settings
from megatron.elastic.engine.standing import Standing, block_index, unit_groups
from megatron.elastic.engine.transaction import Tools
from megatron.elastic.mcore.model import GptPort
from megatron.elastic.observe.events import EventLog
from megatron.elastic.observe.phases import PhaseTimer
from megatron.elastic.state.ownership import Rules, initial
from megatron.elastic.state.pool import StatePool
from megatron.elastic.state.record import StepRecord

__all__ = ["Links", "build_engine", "open_links"]


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
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=timeout)
    )
    fabric = make_fabric(
        config,
        rank=membership.rank,
        slots=membership.slots,
        incarnation=membership.incarnation,
        run_id=os.environ[env.RUN_ID],
        secret=bytes.fromhex(os.environ[env.SECRET]),
        store=store,
        timeout=timeout,
    )
    events = EventLog(config.event_log, membership.rank, membership.incarnation)
    injector = Injector(parse(config.inject or ""), membership.rank, membership.incarnation)
    membership.start(fabric.interrupt)
    membership.sample(lambda: _waiting(fabric))
    install(fabric)
    decision = None
    if membership.incarnation == FIRST_INCARNATION:
        decision = membership.decide(fabric.address(), "", timeout)
        fabric.edit(decision.generation, decision.members, timeout)
        events.generation = decision.generation
    return Links(membership, fabric, events, injector, decision)


def _waiting(fabric: Fabric) -> Activity | None:
    waiting = fabric.waiting_for()
    return Activity(-1, "communication", waiting) if waiting else None


def build_engine(
    links: Links,
    decision: Decision,
    port: GptPort,
    nominal: Nominal,
    config: ElasticConfig,
    settings: Settings,
    on_settled: Callable[[Outcome, Standing, float], None],
) -> Engine:
    """An engine whose state is what the model's parameters say (a checkpoint load may overwrite it)."""
    fabric, rank = links.fabric, links.fabric.rank
    shard = nominal.place(rank)[0]
    catalog = exchange_catalog(port, shard, fabric.world, fabric.slots)
    layouts = build_layouts(catalog, config.block_bytes)
    arena = Arena(port, {unit: layouts[unit, shard] for unit in port.held_units()})
    pool = StatePool(rank, layouts, settings.hyper)
    timer = PhaseTimer()
    tools = Tools(
        port=port,
        arena=arena,
        pool=pool,
        layouts=layouts,
        fabric=fabric,
        settings=settings,
        reach=links.injector.reach,
        publish=lambda phase, waiting: links.membership.publish(Activity(timer.current.step, phase, waiting)),
    )
    recovery = Recovery(
        membership=links.membership,
        fabric=fabric,
        nominal=nominal,
        config=config,
        layouts=layouts,
        arena=arena,
        reach=links.injector.reach,
        timeout=settings.communication_timeout,
    )
    groups = unit_groups(nominal, layouts, decision.members)
    domains = failure_domains(decision)
    placement = initial(groups, Rules(config.mirrors, config.scatter_width, domains))
    return Engine(
        tools=tools,
        recovery=recovery,
        record=StepRecord.initial(settings.hyper),
        standing=recovery.stand(decision, placement),
        injector=links.injector,
        timer=timer,
        blocks=block_index(layouts),
        on_settled=on_settled,
    )


def failure_domains(decision: Decision) -> dict[int, int]:
    """Rank → number of its host: what fails together."""
    hosts = sorted({address.host for address in decision.members.values()})
    return {rank: hosts.index(address.host) for rank, address in decision.members.items()}
