"""How the agents of one job find each other, before there is a journal.

The first agent serves the store, or etcd does; every agent leaves a card there
(host, address, number of workers) and reads all cards. Ranks follow node order. The job's secret comes
from the environment of every node, or else from the first agent through the
store: then whoever can read the store can join the job, which is torchrun's
degree of trust.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from dataclasses import dataclass

from megatron.elastic.control import env
from megatron.elastic.control.etcd import EtcdStore
from megatron.elastic.control.generations import Node
from megatron.elastic.control.journal import Seal
from megatron.elastic.control.store import EmbeddedStore, Store, StoreLost
from megatron.elastic.control.wire import ProtocolError, parse, take_int, take_str
from megatron.elastic.launch.arguments import BadInput, Job
from megatron.elastic.launch.progress import waiting_for

__all__ = ["Company", "meet"]

_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Company:
    """The store, the secret, and who takes part; ``node`` is this agent."""

    node: int
    store: Store
    secret: str
    seal: Seal
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
    address: str
    """Where other nodes reach this one."""
    agent: str
    """This agent's token. The place is its own only while the node's (:class:`Node`) is the same."""


def meet(job: Job) -> Company:
    """Serve or reach the store and wait for every node. Raises :class:`BadInput` when that fails."""
    store = _open_store(job)
    secret = _agree_on_secret(store, job)
    seal = Seal(secret)
    address = _address(job)
    agent = secrets.token_hex(8)
    node, returning = _take_place(store, seal, job, address, agent)
    nodes: dict[int, Node] = {}
    first = (job.master_addr, job.master_port)
    end = time.monotonic() + job.rendezvous_timeout
    for number in range(job.least):
        with waiting_for(f"node {number} of {job.least} {_meeting_point(store, job)}"):
            found = _wait(store, f"card/{number}", end)
        if found is None:
            raise BadInput(
                f"node {number} of {job.nodes} did not come within {job.rendezvous_timeout:.0f} s: "
                "check --nnodes, --node-rank and --master-addr there, or raise --rdzv-conf join_timeout=SECONDS"
            )
        there = _add_node(nodes, number, seal.open(f"card/{number}", found), job)
        if number == 0:
            first = (job.master_addr, store.port) if isinstance(store, EmbeddedStore) else there
    for number in range(job.least, job.nodes):
        _add_absent(nodes, number, job)
    nominal = sum(len(nodes[number].ranks) for number in range(job.least)) - job.settings.spares
    if nominal < 1:
        raise BadInput(f"--elastic-spares {job.settings.spares} leaves no rank to train: start more (--nproc-per-node)")
    here = _host(job, node)
    returning |= node >= job.least
    return Company(node, store, secret, seal, nodes, nominal, here, returning, *first, address, agent)


def _meeting_point(store: Store, job: Job) -> str:
    return f"through {store.keeper}" if job.etcd is not None else f"at {job.master_addr}:{job.master_port}"


def _host(job: Job, node: int) -> str:
    """This node's name; two agents on one machine have two."""
    return job.local_addr if job.nodes == 1 else f"{job.local_addr}/{node}"


def _add_absent(nodes: dict[int, Node], number: int, job: Job) -> None:
    """Enter a node that may come later, with as many workers as the first has."""
    first, workers = sum(len(node.ranks) for node in nodes.values()), len(nodes[0].ranks)
    if workers != job.workers and job.node == number:
        raise BadInput(f"--nproc-per-node {job.workers}: a node beyond the first {job.least} of --nnodes {job.least}:"
                       f"{job.nodes} must have as many workers as node 0, {workers}")
    nodes[number] = Node(f"node {number}", tuple(range(first, first + workers)), alive=False)


def _wait(store: Store, key: str, end: float) -> bytes | None:
    """Ask until ``end`` (monotonic) or ``key`` is there; between two looks Python sees signals."""
    while True:
        found = store.get(key)
        if found is not None or time.monotonic() >= end:
            return found
        time.sleep(_LOOK_SECONDS)


def _take_place(store: Store, seal: Seal, job: Job, address: str, agent: str) -> tuple[int, bool]:
    """This agent's node number, and whether it takes over from an earlier agent of that number."""
    for node in _candidates(store, job):
        card = json.dumps(
            {
                "host": _host(job, node),
                "address": address,
                "port": job.master_port,
                "workers": job.workers,
                "nodes": job.nodes,
                "agent": agent,
            }
        )
        place = f"card/{node}"
        mine = seal.sign(place, card)
        if store.create(place, mine) == mine:
            return node, False
    if job.node is None:
        raise BadInput(f"all {job.nodes} places of job {job.run_id!r} are taken: raise --nnodes, or give --node-rank")
    # Either an agent restarted in the place of a dead one, or a second one by mistake: the journal tells.
    return job.node, True


def _candidates(store: Store, job: Job) -> list[int]:
    """Places this agent may take, in order of preference."""
    if job.node is not None:
        return [job.node]
    return [0] if store.server else list(range(1, job.nodes))


def _add_node(nodes: dict[int, Node], number: int, text: str | None, job: Job) -> tuple[str, int]:
    """Enter a node by its card; returns its address and the port given to it."""
    first = sum(len(node.ranks) for node in nodes.values())
    try:
        if text is None:
            raise ProtocolError("signed with another secret")
        card = parse(text)
        workers, theirs = take_int(card, "workers"), take_int(card, "nodes")
        if theirs != job.nodes or workers < 1:
            raise BadInput(f"node {number} was started with --nnodes {theirs}, this one with {job.nodes}")
        ranks = tuple(range(first, first + workers))
        nodes[number] = Node(take_str(card, "host"), ranks, agent=take_str(card, "agent"))
        return take_str(card, "address"), take_int(card, "port")
    except ProtocolError as error:
        raise BadInput(f"node {number}: {error}; {env.SECRET} must be the same on every node") from None


def _open_store(job: Job) -> Store:
    prefix = f"elastic/{job.run_id}/"
    if job.etcd is not None:
        try:
            return EtcdStore.open(job.etcd, prefix)
        except (StoreLost, ValueError) as error:
            raise BadInput(f"--rdzv-endpoint: {error}") from None
    host = "127.0.0.1" if job.nodes == 1 else job.master_addr
    try:
        if job.node == 0 or (job.node is None and _is_local(host)):
            return EmbeddedStore.open(host, job.master_port, prefix, server=True, timeout=job.rendezvous_timeout)
    except StoreLost as error:
        if job.node == 0:
            raise BadInput(
                f"cannot serve the store at port {job.master_port} ({error}): choose another --master-port"
            ) from None
    try:
        with waiting_for(f"the first agent (node 0) at {host}:{job.master_port}"):
            return EmbeddedStore.open(host, job.master_port, prefix, server=False, timeout=job.rendezvous_timeout)
    except StoreLost:
        raise BadInput(
            f"no first agent at {host}:{job.master_port} within {job.rendezvous_timeout:.0f} s: "
            "check --master-addr and --master-port (or --rdzv-endpoint)"
        ) from None


def _address(job: Job) -> str:
    """This node's address on the way to the first one; --local-addr wins where it can be resolved."""
    if job.nodes == 1:
        return "127.0.0.1"
    try:
        if job.local_addr_given:
            return str(socket.getaddrinfo(job.local_addr, 0, type=socket.SOCK_STREAM)[0][4][0])
        family, kind, _, _, there = socket.getaddrinfo(job.master_addr, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)  # sends nothing: it only asks the routing table
            return str(probe.getsockname()[0])
    except OSError as error:
        raise BadInput(f"cannot tell this node's address ({error}): give it with --local-addr") from None


def _is_local(host: str) -> bool:
    """Only an address of this machine can be bound."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
        return True
    except OSError:
        return False


def _agree_on_secret(store: Store, job: Job) -> str:
    given = os.environ.get(env.SECRET)
    if given:
        try:
            bytes.fromhex(given)
        except ValueError:
            raise BadInput(f"{env.SECRET} must be hex digits, an even number of them: openssl rand -hex 16") from None
        return given
    if store.server or not store.embedded:
        return store.create("secret", secrets.token_hex(16).encode()).decode()
    found = _wait(store, "secret", time.monotonic() + job.rendezvous_timeout)
    if found is None:
        raise BadInput(f"the first agent keeps its secret to itself: set {env.SECRET} here as it is there")
    return found.decode()
