"""The way from an agent to the store is cut for longer than a lease, and mended: the agent takes its place again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.cable import Cable, cable
from tests.integration.etcd_server import etcd_server
from tests.integration.launcher_cluster import Cluster, cluster
from tests.integration.ports import free_port

OPTIONS = ("--seconds", "6000", "--elastic-detection-timeout", "0.4")


def is_cut_off_and_comes_back(job: Cluster, way: Cable) -> None:
    job.wait_members([0, 1])
    agents = [job.agents[node].pid for node in (0, 1)]
    survivor, lost = job.pid(0), job.pid(1)
    way.cut()
    generation = job.wait_members([0], minimum=2)
    job.wait_text("the lease of this node ran out")
    way.mend()
    job.wait_members([0, 1], minimum=generation + 1)
    assert [job.agents[node].pid for node in (0, 1)] == agents and job.agents[1].poll() is None
    assert job.pid(0) == survivor and job.pid(1) != lost
    os.kill(job.agents[0].pid, signal.SIGTERM)
    assert [job.exit_code(node) for node in (0, 1)] == [3, 3]


def test_from_the_store_in_the_first_agent() -> None:
    port = free_port()
    with cable(port) as way:
        ends = {0: ("--master-port", str(port)), 1: ("--master-port", str(way.port))}
        with cluster(1, nodes=2, node_options=ends, script_options=OPTIONS) as job:
            is_cut_off_and_comes_back(job, way)


@pytest.mark.slow
def test_from_etcd(tmp_path: Path) -> None:
    with etcd_server(tmp_path) as server, cable(server.port) as way:
        ends = {
            node: ("--rdzv-backend", "etcd", "--rdzv-endpoint", f"127.0.0.1:{port}")
            for node, port in enumerate((server.port, way.port))
        }
        with cluster(1, nodes=2, node_options=ends, script_options=OPTIONS) as job:
            is_cut_off_and_comes_back(job, way)
