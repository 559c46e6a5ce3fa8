"""The connection of this process to the control plane and to the other ranks.

It is made before Megatron's own initialisation, which then finds a default group. At the
first start a rank is then linked to all ranks; a newcomer has no links yet.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import torch.distributed as dist

from megatron.elastic.comm.backend import install, make_fabric
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.config import ConfigError, ElasticConfig
from megatron.elastic.control import env
from megatron.elastic.control.channel import Credentials
from megatron.elastic.control.client import WorkerMembership
from megatron.elastic.control.membership import Activity, Decision
from megatron.elastic.control.protocol import WorkerProtocol
from megatron.elastic.control.requests import Request
from megatron.elastic.control.store_client import reach
from megatron.elastic.control.timing import Timing
from megatron.elastic.control.torch_store import TorchStore
from megatron.elastic.engine.inject import Injector, parse
from megatron.elastic.observe.event_kinds import BeginEvent
from megatron.elastic.observe.events import EventLog, clock_name
from megatron.elastic.platform.own_device import threads_on, use_own_device
from megatron.elastic.platform.select import select
from megatron.elastic.platform.threads import OS_THREADS, Threads

__all__ = ["Links", "linked", "open_links"]


@dataclass(frozen=True)
class Links:
    """This process's control plane and communicator."""

    membership: WorkerProtocol
    fabric: Fabric
    events: EventLog
    injector: Injector
    decision: Decision | None
    """Decision of the first generation; ``None`` for a newcomer, which waits to be admitted."""
    threads: Threads = OS_THREADS


def open_links(config: ElasticConfig, timeout: float) -> Links:
    """Join the control plane, listen, and connect to all ranks unless this is a newcomer.

    The device of this rank becomes the current one before anything names a device: Megatron sets it only where it
    initialises torch.distributed itself. Raises ``NotUnderLauncher`` outside the elastic launcher.
    """
    platform = select()
    use_own_device(platform)
    threads = threads_on(platform)
    membership = WorkerMembership.from_env(threads=threads)
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
        silent=Timing.derive(config.detection_timeout).silent,
        platform=platform,
    )
    events = EventLog(config.event_log, membership.rank, membership.incarnation)
    events.write(BeginEvent(os.environ[env.RUN_ID], clock_name()))
    injector = Injector(parse(config.inject or ""), membership.rank, membership.incarnation)
    membership.start(fabric.interrupt)
    membership.sample(lambda: _waiting(fabric))
    install(fabric)
    _drain_on_signals(membership)
    return linked(membership, fabric, events, injector, timeout, threads)


def _drain_on_signals(membership: WorkerMembership) -> None:
    """Have each signal that drains the job from its launcher drain it from this process too.

    Slurm and others signal every process of a job.
    """
    names = filter(None, ("SIGTERM", *os.environ.get(env.DRAIN_SIGNALS, "").split(",")))
    numbers = {signal.Signals[name] for name in names}
    for number in numbers:
        signal.signal(number, lambda number, frame: membership.drain())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # blocked since the start of the process


def linked(
    membership: WorkerProtocol,
    fabric: Fabric,
    events: EventLog,
    injector: Injector,
    timeout: float,
    threads: Threads = OS_THREADS,
) -> Links:
    """Return the links of a process that has started its membership: to all ranks, unless it is a newcomer."""
    decision = None
    injector.is_asked = lambda: membership.pending().join
    if not membership.newcomer:
        membership.request(Request.SETUP)  # before "begin" no rank holds state, so a loss restarts the setup
        decision = membership.decide(fabric.address(), "", timeout)
        fabric.edit(decision.generation, decision.members, timeout)
        events.generation = decision.generation
    return Links(membership, fabric, events, injector, decision, threads)


def _agent_store(timeout: float) -> dist.Store:
    """Return the first agent's store. Raises :class:`ConfigError` if there is none (native links need none)."""
    host, _, port = os.environ.get(env.STORE, "").rpartition(":")
    if not host:
        raise ConfigError("--elastic-comm gloo needs a store in the first agent: leave out --rdzv-backend etcd")
    credentials = Credentials(os.environ[env.SECRET], os.environ[env.RUN_ID])
    return TorchStore(reach(host, int(port), credentials, timeout), "communicator/", timeout)


def _waiting(fabric: Fabric) -> Activity | None:
    waiting = fabric.waiting_for()
    return Activity(-1, "communication", waiting) if waiting else None
