"""Ports for servers that a test starts: out of the range from which the kernel gives ports to whoever asks for any.

A port that was free a moment ago would otherwise often be the local end of somebody's connection by the time it is
listened on: several runs of tests and their jobs open thousands a minute.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

__all__ = ["free_port", "free_ports"]

LOWEST = 10_000


def free_ports(count: int) -> list[int]:
    """``count`` different ports of the loopback that nobody listens on now."""
    given_away = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    chance = random.SystemRandom()  # two runs with the same seed must not meet
    while len(found) < count:
        port = chance.randrange(LOWEST, given_away)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]
