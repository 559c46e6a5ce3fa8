"""The native core by itself: hashes against hashlib, native tests built and run, nothing left behind.

The C++ tests (threads as ranks) and the fuzzed handshakes live in ``tests/native``;
``make -C tests/native run-thread`` and ``run-address`` build them under sanitizers.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

_comm = pytest.importorskip("megatron.elastic._comm")
NATIVE_TESTS = Path(__file__).resolve().parents[2] / "native"


@settings(max_examples=200, deadline=None)
@given(key=st.binary(max_size=200), data=st.binary(max_size=500))
def test_hmac_is_that_of_hashlib(key: bytes, data: bytes) -> None:
    assert _comm.hmac_sha256(key, data) == hmac.new(key, data, hashlib.sha256).digest()


def hub(rank: int, incarnation: int = 0, shared_memory: bool = True, slots: int = 2) -> _comm.Hub:
    return _comm.Hub(
        rank=rank, slots=slots, incarnation=incarnation, run_id="run", secret=b"secret", shared_memory=shared_memory
    )


def edit(hubs: list[_comm.Hub], generation: int) -> None:
    members = [one.self() for one in hubs]
    threads = [threading.Thread(target=one.edit, args=(generation, members, 30.0)) for one in hubs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one.generation() == generation for one in hubs)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_hundred_incarnations_leave_nothing_behind(shared_memory: bool) -> None:
    """Descriptors, threads and mapped segments after many replacements of the peer."""

    def held() -> tuple[int, int, int]:
        mapped = Path("/proc/self/maps").read_text().count("memfd:elastic")
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mapped

    stays = hub(0, shared_memory=shared_memory)
    before: tuple[int, int, int] | None = None
    for incarnation in range(100):
        peer = hub(1, incarnation, shared_memory)
        edit([stays, peer], 2 * incarnation + 1)
        assert stays.transport(1) == ("shm" if shared_memory else "tcp")
        peer.close()
        del peer
        stays.edit(2 * incarnation + 2, [stays.self()], 30.0)
        if incarnation == 2:
            before = held()
    assert before is not None and held() <= before, (before, held())
    stays.close()


def test_strangers_are_counted_and_do_no_harm() -> None:
    first, second = hub(0), hub(1)
    talker = socket.create_connection(("127.0.0.1", first.self().port))
    talker.sendall(b"GET / HTTP/1.1\r\n" * 20)
    silent = socket.create_connection(("127.0.0.1", first.self().port))
    edit([first, second], 1)
    deadline = time.monotonic() + 20
    while first.counters()["garbage"] < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert first.counters()["garbage"] >= 1
    while first.counters()["half_way"] > 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert first.counters()["half_way"] == 0 and first.counters()["slow"] >= 1, "the silent one is dropped"
    talker.close()
    silent.close()
    first.close()
    second.close()


def test_links_opened_ahead_are_taken_up_by_the_edit() -> None:
    trains, spare = hub(0), hub(1)
    assert spare.prepare([trains.self()], 10.0) == 1
    edit([trains, spare], 1)
    assert trains.transport(1) == spare.transport(0) == "shm"
    trains.close()
    spare.close()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["run-plain", "run-thread", "run-address"])
def test_native_tests(target: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    done = subprocess.run(["make", "-j2", target], cwd=NATIVE_TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
