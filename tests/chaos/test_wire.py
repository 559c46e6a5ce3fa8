"""A wire between two namespaces: what TCP carries over it arrives whole and in order, whatever happens to packets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.wire import Quality, Wire, wire

NAMES = tuple((f"wire{os.getpid() % 10000}-{end}", f"w{os.getpid() % 10000}e{end}") for end in range(2))
SERVER = """
import socket
with socket.create_server(("10.78.0.1", 7000)) as server:
    print("listening", flush=True)
    while True:
        end, _ = server.accept()
        with end:
            while part := end.recv(1 << 16):
                end.sendall(part)
"""
CLIENT = """
import random, socket, sys, time
sent = random.Random(3).randbytes(200_000)
end = socket.create_connection(("10.78.0.1", 7000), 60)
began, back = time.monotonic(), b""
end.sendall(sent)
while len(back) < len(sent):
    back += end.recv(1 << 16)
print(int(back == sent), time.monotonic() - began)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None or not os.path.exists("/dev/net/tun"),
        reason="a wire between namespaces wants root, the program ip and /dev/net/tun",
    ),
]


@pytest.fixture
def between() -> Iterator[Wire]:
    """The wire; a program at its first end sends back what it gets."""
    for namespace, _ in NAMES:
        subprocess.run(["ip", "netns", "add", namespace], check=True)
    ends = [(namespace, device, f"10.78.0.{end + 1}/24") for end, (namespace, device) in enumerate(NAMES)]
    try:
        with wire(ends, seed=1) as made:
            command = [*inside(0), sys.executable, "-c", SERVER]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None and server.stdout.readline() == "listening\n"
                yield made
                server.kill()
    finally:
        for namespace, _ in NAMES:
            subprocess.run(["ip", "netns", "del", namespace], check=False)


def inside(end: int) -> list[str]:
    return ["ip", "netns", "exec", NAMES[end][0]]


def there_and_back() -> float:
    done = subprocess.run([*inside(1), sys.executable, "-c", CLIENT], capture_output=True, text=True, timeout=120)
    whole, seconds = done.stdout.split()
    assert whole == "1", done.stderr
    return float(seconds)


@pytest.mark.parametrize(
    "quality",
    [Quality(), Quality(delay=0.05), Quality(lost=0.05), Quality(0.001, 0.01), Quality(changed=0.05)],
    ids=str,
)
def test_bytes_arrive_as_they_were_sent(between: Wire, quality: Quality) -> None:
    between.become(quality)
    assert there_and_back() >= 2 * quality.delay


def counted(end: int) -> int:
    """Segments with a wrong checksum that the kernel of this end has dropped."""
    lines = subprocess.run([*inside(end), "cat", "/proc/net/snmp"], capture_output=True, text=True, check=True).stdout
    names, values = (line.split() for line in lines.splitlines() if line.startswith("Tcp:"))
    return int(dict(zip(names, values, strict=True))["InCsumErrors"])


def test_a_changed_bit_is_told_by_the_checksum_and_sent_again(between: Wire) -> None:
    between.become(Quality(changed=0.2))
    there_and_back()
    assert counted(0) + counted(1) > 0


def test_nothing_passes_a_cut_wire_and_a_mended_one_carries_on(between: Wire, tmp_path: Path) -> None:
    between.become(Quality(lost=1.0))
    with subprocess.Popen([*inside(1), sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, text=True) as client:
        with pytest.raises(subprocess.TimeoutExpired):
            client.wait(1.5)
        between.become(Quality())
        said, _ = client.communicate(timeout=60)
        assert said.split()[0] == "1"
