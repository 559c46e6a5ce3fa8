"""Addresses of nodes: the one that a node announces to the others, and which of them are loopback."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress

from megatron.elastic.launch.arguments import BadCommand, JobSpec

__all__ = ["LOOPBACK", "check_reachable", "is_local", "is_loopback", "own_address"]

LOOPBACK = "127.0.0.1"
_FAR = ("192.0.2.1", "2001:db8::1")
"""Addresses kept for documentation, which no network has: the way to them is the default route."""
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_RUNNING = 0x1 | 0x40
"""An interface that is up and connected."""


def own_address(job: JobSpec) -> str:
    """This node's address for the others. ``--local-addr`` wins where it can be resolved.

    Otherwise it is the source address of the route to the first node. Many systems resolve a machine's own name to a
    loopback address (127.0.1.1), where no other machine reaches it: another address of this node is taken then, if it
    has one.
    """
    if job.nodes == 1:
        return LOOPBACK
    try:
        if job.local_addr_given:
            return str(socket.getaddrinfo(job.local_addr, 0, type=socket.SOCK_STREAM)[0][4][0])
        found = _source(job.master_addr)
    except socket.gaierror as error:
        given = (
            f"--local-addr {job.local_addr}"
            if job.local_addr_given
            else f"--master-addr (--rdzv-endpoint) {job.master_addr}"
        )
        raise BadCommand(f"{given} cannot be resolved ({error.strerror}): correct it, or add it to the DNS") from None
    except OSError as error:
        raise BadCommand(f"the address of this node cannot be found ({error}): give it with --local-addr") from None
    if is_loopback(found) and not is_loopback(job.master_addr):
        return next(_outward(), found)
    return found


def check_reachable(addresses: Mapping[int, str]) -> None:
    """Raise :class:`BadCommand` if some nodes announce a loopback address and others do not. Node → address."""
    loopback = [node for node, address in sorted(addresses.items()) if is_loopback(address)]
    if loopback and len(loopback) < len(addresses):
        node = loopback[0]
        raise BadCommand(
            f"node {node} announces the loopback address {addresses[node]}, where nodes of other machines do not "
            f"reach it: start the launcher of node {node} with --local-addr and its address in the network"
        )


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address or ``localhost``; another name is not, whatever it resolves to."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local(host: str) -> bool:
    """Return whether ``host`` is this machine: only an address of this machine can be bound."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
        return True
    except OSError:
        return False


def _source(host: str) -> str:
    """The source address of the route to ``host``."""
    family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)  # sends nothing: it only asks the routing table
        return str(probe.getsockname()[0])


def _outward() -> Iterator[str]:
    """The addresses of this node that are not loopback: of its default routes, then of its interfaces."""
    for far in _FAR:
        with suppress(OSError):
            yield _source(far)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                flags = struct.unpack_from("H", _ask_interface(asker, _SIOCGIFFLAGS, name), 16)[0]
                address = socket.inet_ntoa(_ask_interface(asker, _SIOCGIFADDR, name)[20:24])
                if flags & _RUNNING == _RUNNING and not is_loopback(address):
                    yield address


def _ask_interface(asker: socket.socket, what: int, name: str) -> bytes:
    """The kernel's ``struct ifreq`` for an interface."""
    return fcntl.ioctl(asker.fileno(), what, struct.pack("40s", name.encode()))
