"""A process that knows a job's host and ports, and not its secret, and tries everything it can think of against them.

    python -m tests.integration.hostile_neighbour SECONDS SEED PORT[,PORT...]

Prints how often it did what, as one JSON object. Also: :func:`listening_ports` of a process and its descendants.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from megatron.elastic.control.channel import Credentials, Dialer
from megatron.elastic.control.signer import Signer
from megatron.elastic.control.store_server import PURPOSE

HOST = "127.0.0.1"
HELD = 200
"""Idle connections that are held at once."""
GUESSED = Credentials("00" * 16, "guessed")


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """(address as the kernel writes it, port) of TCP sockets at which any of ``pids`` listens."""
    sockets = set()
    for pid in pids:
        with suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    sockets.update(re.findall(r"socket:\[(\d+)\]", os.readlink(descriptor)))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in sockets:
                address, _, port = words[1].rpartition(":")
                found.add((address, int(port, 16)))
    return found


def listening_ports(pids: list[int]) -> list[int]:
    """TCP ports at which any of ``pids`` listens."""
    return sorted({port for _, port in listening(pids)})


class Neighbour:
    """``ports`` of the job; each method is one way to be a nuisance, and returns when it has been one for a moment."""

    def __init__(self, ports: list[int], seed: int) -> None:
        self._ports, self._draw = ports, random.Random(seed)
        self._held: list[socket.socket] = []

    def _connect(self) -> socket.socket:
        return socket.create_connection((HOST, self._draw.choice(self._ports)), timeout=1)

    def random_bytes(self) -> None:
        with self._connect() as channel:
            channel.sendall(self._draw.randbytes(self._draw.choice([1, 8, 40, 4096, 1 << 20])))

    def announce_huge_frames(self) -> None:
        with self._connect() as channel:
            hello = Dialer(GUESSED.key(PURPOSE)).hello
            channel.sendall(self._draw.choice([b"", hello]) + struct.pack(">IQ", 0xFFFFFFFF, 1 << 62) + bytes(4096))

    def break_off_in_the_middle(self) -> None:
        hello = Dialer(GUESSED.key(PURPOSE)).hello
        with self._connect() as channel:
            channel.sendall(hello[: self._draw.randrange(len(hello))])
            time.sleep(0.01)

    def guess_the_proof(self) -> None:
        """The whole handshake, with a secret of its own."""
        with self._connect() as channel:
            dialer = Dialer(GUESSED.key(PURPOSE))
            channel.sendall(dialer.hello)
            channel.recv(4096)
            channel.sendall(self._draw.randbytes(32) + self._draw.randbytes(500))
            channel.recv(4096)

    def say_hello_as_an_agent(self) -> None:
        with self._connect() as channel:
            hello = json.dumps({"node": 1, "epoch": 0, "agent": "guessed", "nonce": "0"}).encode()
            channel.sendall(Signer(GUESSED).sign("presence/hello", hello) + b"\n")
            channel.recv(4096)

    def speak_the_protocol_of_torchs_store(self) -> None:
        """Where that is what listens: overwrite leases, and end the job."""
        from torch.distributed import TCPStore

        where = self._draw.choice(self._ports)
        store = TCPStore(HOST, where, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
        for key in store.list_keys():
            store.set(key, "x")

    def flood(self) -> None:
        """Connections as fast as they can be made, closed at once, with a reset."""
        for _ in range(300):
            with suppress(OSError), self._connect() as channel:
                channel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(0.2)  # there are but two cores, and the job is to go on

    def hold_idle(self) -> None:
        with suppress(OSError):
            self._held.append(self._connect())
        if len(self._held) > HELD:
            self._held.pop(0).close()
        time.sleep(0.002)


def be_hostile(ports: list[int], seconds: float, seed: int) -> Counter[str]:
    """Everything at once for ``seconds``; how often each was done, and each that could not be as ``refused``."""
    done: Counter[str] = Counter()
    end = time.monotonic() + seconds

    def go_on(act: Callable[[], None], name: str) -> None:
        while time.monotonic() < end:
            try:
                act()
                done[name] += 1
            except (OSError, RuntimeError, ValueError):  # sent away, or nothing there
                done[name + ", refused"] += 1
            time.sleep(0.005)

    kinds = [name for name in vars(Neighbour) if not name.startswith("_")]
    threads = []
    for number, name in enumerate(kinds):
        neighbour = Neighbour(ports, seed + number)
        threads.append(threading.Thread(target=go_on, args=(getattr(neighbour, name), name), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 30)
    return done


if __name__ == "__main__":
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    print(json.dumps(be_hostile([int(port) for port in sys.argv[3].split(",")], float(sys.argv[1]), int(sys.argv[2]))))
