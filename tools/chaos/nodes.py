"""Jobs of several agents on one machine, which lose nodes, agents, and their way to the store."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.integration.cable import cable
from tests.integration.elastic_job import ROOT, elastic_command
from tests.integration.etcd_server import etcd_members
from tests.integration.kill_walk import DRAINED, MANY
from tests.integration.launcher_cluster import Cluster, descendants, is_alive
from tests.integration.ports import free_port
from tests.scenario.scenario import Layout
from tools.chaos.jobs import Job
from tools.chaos.reference import Played, check_losses, flags_of_job, rules_for

__all__ = ["play_nodes", "wait_until_whole"]

NODE_SECONDS = 600.0
"""Seconds that agents may take until all ranks of a job are back."""


def play_nodes(job: Job, folder: Path, played: Played) -> None:
    """Four ranks on two agents, or six on three."""
    dice, nodes = random.Random(job.dice), 2 + job.dice % 2
    played.rules = rules_for(job)
    batch = ("--global-batch-size", str(4 * nodes))
    plain = elastic_command(
        *(folder / "events", 2 * nodes, 1, 1, MANY),
        *(*flags_of_job(job, folder), "--save", str(folder / "saved"), *batch),
        *("--elastic-block-bytes", "4096", "--elastic-quarantine-after", "0"),
    )
    script = plain[plain.index(str(ROOT / "pretrain_gpt.py")) :]
    with ExitStack() as stack:
        members = stack.enter_context(etcd_members(folder, 3)) if job.etcd else ()
        ports = [member.port for member in members] or [free_port()]
        ways = [stack.enter_context(cable(port)) for port in ports]
        last = nodes - 1
        by_way = [way.port for way in ways]
        ends = {node: _store(job.etcd, by_way if node == last else ports) for node in range(nodes)}
        cluster = Cluster(2, nodes=nodes, command=script, node_options=ends)
        stack.callback(cluster.close)
        try:
            ranks = cluster.workers * nodes
            wait_until_whole(ranks, folder, 0.0, cluster)
            for _ in range(job.faults):
                node = dice.randrange(0 if job.etcd else 1, nodes)
                acts = ("node", "agent", "stopped", "cut" if node == last else "node", *(["member"] * len(members[:2])))
                how = dice.choice(acts)
                print(f"  {how}: node {node}", flush=True)
                played.faults += 1
                if how == "cut":
                    for way in ways:
                        way.cut()
                    time.sleep(dice.uniform(0.2, 6.0))
                    for way in ways:
                        way.mend()
                elif how == "member":
                    member = dice.choice(members)
                    member.end()
                    time.sleep(dice.uniform(0.2, 6.0))
                    member.start()
                else:
                    _strike(cluster, node, how, dice.uniform(0.2, 6.0))
                wait_until_whole(
                    ranks, folder, time.time(), cluster
                )  # who was lost may have taken a step since the fault began
            os.kill(cluster.agents[0].pid, signal.SIGTERM)
            codes = [cluster.exit_code(node) for node in range(nodes)]
            assert codes == [DRAINED] * nodes, f"exit statuses {codes}"
        finally:
            played.output = cluster.text()[-6000:]
    # What a node printed last may be lost with it, so validation losses are not compared.
    check_losses(job, folder, Layout(1, 1, 2 * nodes), "", *batch)


def _store(etcd: bool, ports: Sequence[int]) -> tuple[str, ...]:
    if etcd:
        return ("--rdzv-backend", "etcd", "--rdzv-endpoint", ",".join(f"127.0.0.1:{port}" for port in ports))
    return ("--master-port", str(ports[0]))


def _strike(cluster: Cluster, node: int, how: str, seconds: float) -> None:
    """Lose a node, its agent alone, or its agent for a while; a dead one is started again after ``seconds``."""
    agent = cluster.agents[node]
    if how == "stopped":
        os.kill(agent.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(agent.pid, signal.SIGCONT)
    else:
        for pid in [agent.pid, *(descendants(agent.pid) if how == "node" else ())]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(seconds)
    if agent.poll() is not None or not is_alive(agent.pid):
        agent.wait()
        cluster.start_agent(node)


def wait_until_whole(ranks: int, folder: Path, since: float, cluster: Cluster | None = None) -> None:
    """Wait until the newest line of a step of every rank is later than ``since``, and all are of one generation.

    Raises ``AssertionError`` if time is up, or all agents of ``cluster`` have ended.
    """
    end = time.monotonic() + NODE_SECONDS
    while True:
        newest = [_newest(file, since) for file in sorted((folder / "events").glob("rank*.jsonl"))]
        if len(newest) == ranks and None not in newest and len(set(newest)) == 1:
            return
        assert time.monotonic() < end, f"not whole again: generations of the newest steps {newest}"
        ended = cluster is not None and all(agent.poll() is not None for agent in cluster.agents.values())
        assert not ended, "all agents have ended"
        time.sleep(0.2)


def _newest(file: Path, since: float) -> int | None:
    """The generation of the newest step of a rank after ``since``."""
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - 20_000))
        lines = [line for line in log.read().splitlines() if line.startswith(b'{"kind":"phases"')]
    for line in reversed(lines):
        with suppress(ValueError):
            found = json.loads(line)
            return int(found["generation"]) if found["wall"] > since else None
    return None
