"""The agents of one job find each other, before there is a journal.

The first agent serves the store, or etcd does; every agent leaves a card there
(host, address, number of workers) and reads all cards. Ranks follow node order. From then on
signatures name this very launch: the cards it began with, each of which holds a number made up by its agent.

A job on one node is served on the loopback address alone. Programs that know nothing of this launcher find torch's own
store where torchrun has it; nothing of the launcher's is in there.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from torch.distributed import TCPStore

from megatron.elastic.control import env
from megatron.elastic.control.channel import Credentials
from megatron.elastic.control.etcd import EtcdStore
from megatron.elastic.control.journal import Signer
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.store import Store, StoreLost
from megatron.elastic.control.store_client import ReachedStore, reach
from megatron.elastic.control.store_server import ServedStore, listen, serve
from megatron.elastic.control.timing import Timing
from megatron.elastic.control.wire import Codec, Int64, ProtocolError, encode
from megatron.elastic.launch.agent.addresses import LOOPBACK, check_reachable, is_local, is_loopback, own_address
from megatron.elastic.launch.agent.old_run import await_end
from megatron.elastic.launch.agent.same_flags import unlike
from megatron.elastic.launch.agent.starting import Starting
from megatron.elastic.launch.arguments import BadCommand, JobSpec
from megatron.elastic.launch.messages import say
from megatron.elastic.observe.summary import ranks_text

__all__ = ["JobMembers", "meet"]

_LOOK_SECONDS = 0.05
_TELL_SECONDS = 3.0
_LEAVE_SECONDS = 5.0


class _Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node, as its agent describes it to the others."""

    host: str
    address: str
    port: Int64
    workers: Int64
    nodes: Int64
    agent: str
    """The agent's token."""
    arguments: tuple[str, ...]
    """Arguments that the node passes to the script."""


class _Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hashes of the cards that a launch began with, in the order of the nodes."""

    cards: tuple[str, ...]


_CARDS: Codec[_Card] = Codec(_Card)
_LAUNCHES: Codec[_Launch] = Codec(_Launch)


@dataclass(frozen=True)
class JobMembers:
    """The store and the nodes that take part; ``node`` is this agent's."""

    node: int
    store: Store
    store_place: str
    """HOST:PORT of the embedded store; empty with etcd."""
    program_store: TCPStore | None
    """torch's own, for programs written for torchrun, where this agent serves one."""
    signer: Signer
    """Of this launch."""
    nodes: dict[int, Node]
    """All there may ever be; those beyond the launch are absent at first (``alive``), for every agent alike."""
    nominal: int
    """Ranks of the launch, W. Those beyond are spares, or come with further nodes."""
    host: str
    """This node's name."""
    returning: bool
    """The job runs without this place so far, or an earlier agent had it: that must be known as lost first."""
    master_addr: str
    master_port: int
    """Where programs written for torchrun meet."""
    address: str
    """The address of this node for the others."""
    agent: str
    """This agent's token. The place is its own only while the node's (:class:`Node`) is the same."""
    unlike: str
    """A flag in which another node differs from this one, as a line (:func:`same_flags.unlike`); empty: none."""


def meet(job: JobSpec, starting: Starting) -> JobMembers:
    """Serve or reach the store and wait for every node. Raises :class:`BadCommand` when that fails."""
    timing = Timing.derive(job.settings.detection_timeout)
    while True:
        members = _meet(job, starting)
        may_be_old = members.returning and not members.store.embedded
        if may_be_old and await_end(members.store, members.nodes, timing, starting.waiting_for):
            continue
        if members.unlike:
            if not members.returning:  # to the others of a job that runs, this agent has never been there
                _leave_together(members.store, members.node, job)
            raise BadCommand(members.unlike)
        return members


def _meet(job: JobSpec, starting: Starting) -> JobMembers:
    store = _open_store(job, starting)
    starting.serves = store.server
    signer = Signer(Credentials(job.secret, job.run_id))
    program = _serve_programs(job, store)
    address = own_address(job)
    served = program if program is not None else store if isinstance(store, ServedStore) else None
    agent, port = secrets.token_hex(8), job.master_port if served is None else served.port
    node, mine = _take_place(store, signer, job, address, port, agent)
    starting.node = node
    nodes: dict[int, Node] = {}
    first, cards, addresses = (job.master_addr, job.master_port), [], {node: address}
    arguments: dict[int, tuple[str, ...]] = {}
    end = time.monotonic() + job.rendezvous_timeout
    for number in range(job.least):
        with starting.waiting_for(f"node {number} of {job.least} {_meeting_point(store, job)}"):
            found = _wait(store, f"card/{number}", end, lambda: _note_missing(store, job, starting))
        if found is None:
            raise BadCommand(
                f"node {number} of {job.nodes} did not come within {job.rendezvous_timeout:.0f} s: "
                "check --nnodes, --node-rank and --master-addr there, or raise --rdzv-conf join_timeout=SECONDS"
            )
        card = _add_node(nodes, number, signer.open(f"card/{number}", found), job)
        addresses.setdefault(number, card.address)
        arguments[number] = card.arguments
        cards.append(_digest(found))
        if number == 0:
            told = job.etcd is None and job.nodes > 1  # one node is reached at the address that it announces
            first = (job.master_addr if told else card.address), card.port
    try:
        check_reachable(addresses)
    except BadCommand:
        _leave_together(store, node, job)  # each of them finds the same
        raise
    for number in range(job.least, job.nodes):
        _add_absent(nodes, number, job)
    nominal = sum(len(nodes[number].ranks) for number in range(job.least)) - job.settings.spares
    if nominal < 1:
        raise BadCommand(
            f"--elastic-spares {job.settings.spares} leaves no rank to train: start more (--nproc-per-node)"
        )
    returning = mine is None or node >= job.least
    signer = _agree_on_launch(store, signer, cards, None if returning or mine is None else _digest(mine), job)
    place = f"{store.host}:{store.port}" if isinstance(store, (ReachedStore, ServedStore)) else ""
    here = _host(job, node)
    differs = unlike(job.arguments, arguments) if job.elastic else ""  # another program may be given the node's number
    return JobMembers(
        node, store, place, program, signer, nodes, nominal, here, returning, *first, address, agent, differs
    )


def _leave_together(store: Store, node: int, job: JobSpec) -> None:
    """Have the agent that serves the store end last, so that the others find the same and say so too."""
    if store.server:
        end = time.monotonic() + _LEAVE_SECONDS
        for other in range(job.least):
            if other != node:
                store.wait(f"bye/{other}", max(0.01, end - time.monotonic()))
    else:
        store.put(f"bye/{node}", b"bye")


def _digest(card: bytes) -> str:
    return hashlib.sha256(card).hexdigest()


def _agree_on_launch(store: Store, signer: Signer, cards: list[str], mine: str | None, job: JobSpec) -> Signer:
    """The signatures to use from here on. ``mine``: this agent's card, which must be among those of the launch.

    Raises :class:`BadCommand` where the store holds an earlier launch under the same name.
    """
    value = store.create("launch", signer.sign("launch", encode(_Launch(tuple(cards)))))
    try:
        launch = _LAUNCHES.decode(signer.open("launch", value) or b"")
    except ProtocolError:
        launch = None
    if launch is None or (mine is not None and mine not in launch.cards):
        raise BadCommand(f"{store.keeper} already holds a launch of job {job.run_id!r}: choose another --rdzv-id")
    return signer.of_launch(_digest(value))


def _serve_programs(job: JobSpec, store: Store) -> TCPStore | None:
    """torch's store, as torchrun would serve it, for a program that is not elastic; on one node for this node alone."""
    if job.elastic or not isinstance(store, ServedStore):
        return None
    port = job.master_port if job.nodes == 1 else 0
    try:
        listener = listen(LOOPBACK if job.nodes == 1 else "", port)
    except OSError as error:
        raise BadCommand(f"cannot serve at port {port} ({error.strerror}): choose another --master-port") from None
    found = int(listener.getsockname()[1])
    return TCPStore(LOOPBACK, found, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _meeting_point(store: Store, job: JobSpec) -> str:
    return f"through {store.keeper}" if job.etcd is not None else f"at {_first_agent(job)}"


def _first_agent(job: JobSpec) -> str:
    """The place of the store that the first agent serves, as it is written in a URL."""
    return (
        f"[{job.master_addr}]:{job.master_port}" if ":" in job.master_addr else f"{job.master_addr}:{job.master_port}"
    )


def _host(job: JobSpec, node: int) -> str:
    """This node's name; two agents on one machine have two."""
    return job.local_addr if job.nodes == 1 else f"{job.local_addr}/{node}"


def _add_absent(nodes: dict[int, Node], number: int, job: JobSpec) -> None:
    """Enter a node that may come later, with as many workers as the first has."""
    first, workers = sum(len(node.ranks) for node in nodes.values()), len(nodes[0].ranks)
    if workers != job.workers and job.node == number:
        raise BadCommand(
            f"--nproc-per-node {job.workers}: a node beyond the first {job.least} of --nnodes {job.least}:"
            f"{job.nodes} must have as many workers as node 0, {workers}"
        )
    nodes[number] = Node(f"node {number}", tuple(range(first, first + workers)), alive=False)


def _wait(store: Store, key: str, end: float, late: Callable[[], None]) -> bytes | None:
    """Ask until ``end`` (monotonic) or ``key`` is there; between two looks Python sees signals.

    ``late`` is called every few seconds.
    """
    told = time.monotonic()
    while True:
        found, now = store.get(key), time.monotonic()
        if found is not None or now >= end:
            return found
        if now - told >= _TELL_SECONDS:
            late()
            told = time.monotonic()
        time.sleep(_LOOK_SECONDS)


def _note_missing(store: Store, job: JobSpec, starting: Starting) -> None:
    """Note all nodes that are not here, for the doctor."""
    missing = [number for number in range(job.least) if store.get(f"card/{number}") is None]
    if missing:
        starting.specify(f"waits for nodes {ranks_text(missing)} of {job.least} {_meeting_point(store, job)}")


def _take_place(
    store: Store, signer: Signer, job: JobSpec, address: str, port: int, agent: str
) -> tuple[int, bytes | None]:
    """This agent's node number and its card; None for one that takes over from an earlier agent of that number."""
    for node in _candidates(store, job):
        card = _Card(_host(job, node), address, port, job.workers, job.nodes, agent, job.arguments)
        place = f"card/{node}"
        mine = signer.sign(place, encode(card))
        if store.create(place, mine) == mine:
            return node, mine
    if job.node is None:
        raise BadCommand(
            f"job {job.run_id!r} has all its {job.nodes} nodes already: raise "
            "--nnodes, or give --node-rank to replace one"
        )
    # Either an agent restarted in the place of a dead one, or a second one by mistake: the journal tells.
    return job.node, None


def _candidates(store: Store, job: JobSpec) -> list[int]:
    """Places this agent may take, in order of preference."""
    if job.node is not None:
        return [job.node]
    return [0] if store.server else list(range(1, job.nodes))


def _add_node(nodes: dict[int, Node], number: int, body: bytes | None, job: JobSpec) -> _Card:
    """Enter a node by its card, which is returned."""
    first = sum(len(node.ranks) for node in nodes.values())
    try:
        if body is None:
            raise ProtocolError("it was started with another secret")
        card = _CARDS.decode(body)
        if card.nodes != job.nodes or card.workers < 1:
            raise BadCommand(
                f"node {number} was started with --nnodes {card.nodes}, this one "
                f"with {job.nodes}: give the same everywhere"
            )
        ranks = tuple(range(first, first + card.workers))
        nodes[number] = Node(card.host, ranks, agent=card.agent)
        return card
    except ProtocolError as error:
        raise BadCommand(f"node {number}: {error}; {env.SECRET} must be the same on every node") from None


def _open_store(job: JobSpec, starting: Starting) -> Store:
    timing = Timing.derive(job.settings.detection_timeout)
    if job.etcd is not None:
        try:
            store = EtcdStore.open(job.etcd, f"elastic/{job.run_id}/", timing.patience)
            warning = store.never_compacted()
        except (StoreLost, ValueError) as error:
            raise BadCommand(f"--rdzv-endpoint: {error}") from None
        if warning and not job.node:  # one node's line is enough
            say(warning)
        return store
    credentials = Credentials(job.secret, job.run_id)
    if job.nodes == 1:
        # The port that was asked for is the program's, where there is one that may want it.
        return _serve(LOOPBACK, job.master_port if job.elastic else 0, credentials)
    host = job.master_addr
    if job.node == 0:
        return _serve(host, job.master_port, credentials)
    if job.node is None and is_local(host):
        with suppress(BadCommand):  # another agent of this machine was first
            return _serve(host, job.master_port, credentials)
    try:
        with starting.waiting_for(f"the first agent (node 0) at {_first_agent(job)}"):
            return reach(host, job.master_port, credentials, job.rendezvous_timeout, timing.lease, timing.patience)
    except StoreLost as error:
        raise BadCommand(
            f"no first agent at {_first_agent(job)} within {job.rendezvous_timeout:.0f} s ({error}): check "
            f"--master-addr, --master-port (or --rdzv-endpoint), --rdzv-id and {env.SECRET}"
        ) from None


def _serve(host: str, port: int, credentials: Credentials) -> ServedStore:
    """On the loopback address where that is how the others are told to come, else on all: names may mean either."""
    try:
        return serve(host if is_loopback(host) else "", port, credentials)
    except StoreLost as error:
        raise BadCommand(f"cannot serve the store at port {port} ({error}): choose another --master-port") from None
