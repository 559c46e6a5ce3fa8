"""A wire between two network namespaces: late, losing packets, changing bits in them, or cut for a while.

Each end is a TUN device; a process of its own carries packets from one to the other. A changed bit is behind the IP
header, so the packet arrives and TCP's checksum has to tell it.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import mmap
import os
import random
import select
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from multiprocessing import get_context

__all__ = ["Quality", "Wire", "wire"]

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_QUALITY = struct.Struct("dddd")
_HEADER_BYTES = 20


@dataclass(frozen=True)
class Quality:
    """``delay``, ``jitter``: seconds; ``lost``, ``changed``: shares of packets. ``lost=1`` is a wire that is cut."""

    delay: float = 0.0
    jitter: float = 0.0
    lost: float = 0.0
    changed: float = 0.0


class Wire:
    """What the owner of a wire may do with it."""

    def __init__(self, shared: mmap.mmap) -> None:
        self._shared = shared

    def become(self, quality: Quality) -> None:
        """From here on packets are carried so, in both directions."""
        self._shared[:] = _QUALITY.pack(*astuple(quality))


@contextmanager
def wire(ends: Sequence[tuple[str, str, str]], seed: int = 0) -> Iterator[Wire]:
    """Connect two ends, (namespace, device, address with its prefix length); the namespaces are there already."""
    shared = mmap.mmap(-1, _QUALITY.size)
    for namespace, device, address in ends:
        inside = ["ip", "-n", namespace]
        for words in (
            ("tuntap", "add", "dev", device, "mode", "tun"),
            ("addr", "add", address, "dev", device),
            ("link", "set", device, "up"),
        ):
            subprocess.run([*inside, *words], check=True, capture_output=True)
    carrier = get_context("fork").Process(target=_carry, args=(ends, shared, seed), daemon=True)
    carrier.start()
    try:
        yield Wire(shared)
    finally:
        carrier.kill()
        carrier.join()


def _carry(ends: Sequence[tuple[str, str, str]], shared: mmap.mmap, seed: int) -> None:
    files = [_opened(namespace, device) for namespace, device, _ in ends]
    other = dict(zip(files, reversed(files), strict=True))
    dice, number = random.Random(seed), itertools.count()
    under_way: list[tuple[float, int, int, bytes]] = []
    while True:
        left = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 1.0
        ready, _, _ = select.select(files, [], [], left)
        quality = Quality(*_QUALITY.unpack(shared[:]))
        for file in ready:
            packet = os.read(file, 1 << 16)
            if dice.random() >= quality.lost:
                arrives = time.monotonic() + quality.delay + quality.jitter * dice.random()
                heapq.heappush(under_way, (arrives, next(number), other[file], _changed(packet, quality, dice)))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, file, packet = heapq.heappop(under_way)
            os.write(file, packet)


def _changed(packet: bytes, quality: Quality, dice: random.Random) -> bytes:
    if len(packet) <= _HEADER_BYTES or dice.random() >= quality.changed:
        return packet
    spoiled = bytearray(packet)
    spoiled[dice.randrange(_HEADER_BYTES, len(packet))] ^= 1 << dice.randrange(8)
    return bytes(spoiled)


def _opened(namespace: str, device: str) -> int:
    """Return the packets' file of a device; opening it moves this process into the namespace."""
    with open(f"/run/netns/{namespace}", "rb") as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
    return file
