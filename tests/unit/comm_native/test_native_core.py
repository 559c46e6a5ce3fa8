"""The native core by itself: hashes against hashlib, native tests built and run, nothing left behind.

The C++ tests (threads as ranks) and the fuzzed handshakes live in ``tests/native``;
``python setup.py build_ext --target=run-thread`` and ``run-address`` build them under sanitizers.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.comm.errors import PeerLost

pytest.importorskip("torch")  # whose libraries the extension needs
_comm: Any = pytest.importorskip("megatron.elastic._comm")
ROOT = Path(__file__).resolve().parents[3]


@settings(max_examples=200, deadline=None)
@given(key=st.binary(max_size=200), data=st.binary(max_size=500))
def test_hmac_is_that_of_hashlib(key: bytes, data: bytes) -> None:
    assert _comm.hmac_sha256(key, data) == hmac.new(key, data, hashlib.sha256).digest()


def hub(
    rank: int,
    incarnation: int = 0,
    shared_memory: bool = True,
    slots: int = 2,
    handshake_seconds: float = 3.0,
    silent_seconds: float = 20.0,
) -> Any:
    return _comm.Hub(
        rank=rank,
        slots=slots,
        incarnation=incarnation,
        run_id="run",
        secret=b"secret",
        shared_memory=shared_memory,
        handshake_seconds=handshake_seconds,
        silent_seconds=silent_seconds,
    )


def edit(hubs: list[Any], generation: int) -> list[Any]:
    """All at once; what each did. Members say which links they found broken, as reports do."""
    members = []
    for one in hubs:
        own = one.self()
        members.append(
            _comm.Peer(own.rank, own.incarnation, own.ip, own.port, own.unix_name, own.machine, one.broken())
        )
    with ThreadPoolExecutor(len(hubs)) as pool:
        stats = list(pool.map(lambda one: one.edit(generation, members, 30.0), hubs))
    assert all(one.generation() == generation for one in hubs)
    return stats


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
    assert before is not None
    deadline = time.monotonic() + 20
    while held() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread that was joined may still be on its way out of the kernel's table
    assert held() <= before, (before, held())
    stays.close()


def test_strangers_are_counted_and_do_no_harm() -> None:
    first, second = hub(0, handshake_seconds=0.5), hub(1)
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


@pytest.mark.parametrize(("files", "most"), [(1024, 64), (256, 16)])
def test_idle_connections_of_another_host_take_few_descriptors_and_keep_no_rank_out(files: int, most: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    try:
        first, second = hub(0, handshake_seconds=60.0, shared_memory=False), hub(1, shared_memory=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    where = "127.0.0.1", first.self().port
    idle = [socket.create_connection(where, source_address=("127.0.0.2", 0)) for _ in range(3 * most)]
    deadline = time.monotonic() + 20
    while first.counters()["half_way"] < most and time.monotonic() < deadline:
        time.sleep(0.01)
    assert first.counters()["half_way"] == most
    edit([first, second], 1)
    assert first.counters()["half_way"] <= most
    while first.counters()["slow"] < most and time.monotonic() < deadline:
        time.sleep(0.01)
    assert first.counters()["slow"] >= most, "the oldest make way for those that wait"
    for channel in idle:
        channel.close()
    first.close()
    second.close()


def test_many_ranks_that_dial_at_once_get_in_though_few_may_be_half_way() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        first = hub(0, shared_memory=False, slots=40)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    hubs = [first, *(hub(rank, shared_memory=False, slots=40) for rank in range(1, 40))]
    edit(hubs, 1)
    assert first.counters()["slow"] == 0 and len(first.alive()) == 40
    for one in hubs:
        one.close()


def test_all_ranks_whose_hosts_do_not_answer_are_named_together() -> None:
    """A listener whose backlog is full drops what would connect, as a cable that is out does."""
    with contextlib.ExitStack() as stack:
        where = []
        for _ in range(2):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            stack.enter_context(socket.create_connection(listener.getsockname()))
            where.append(listener.getsockname())
        one = hub(2, slots=3, shared_memory=False, silent_seconds=1.0)
        members = [_comm.Peer(rank, 0, *where[rank], "", "", []) for rank in range(2)]
        began = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            one.edit(1, [*members, one.self()], 30.0)
        assert caught.value.silent == (0, 1) and not caught.value.heard
        assert time.monotonic() - began >= 1.0, "not before the time of silence"
        assert one.prepare(members, 30.0) == 0, "a newcomer goes on without them"
        one.close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_spare_opens_its_links_while_others_train(shared_memory: bool) -> None:
    """To lower and to higher ranks, unnoticed; its admission then opens none. Many times: no race leaves two links."""
    for turn in range(20):
        hubs = [hub(rank, shared_memory=shared_memory, slots=4) for rank in range(4)]
        spare, members = hubs[turn % 4], [one for one in hubs if one is not hubs[turn % 4]]
        edit(members, 1)
        assert spare.prepare([one.self() for one in members], 10.0) == 3
        assert spare.prepare([one.self() for one in members], 10.0) == 3, "asked again: they stand"
        assert all(one.generation() == 1 and len(one.alive()) == 3 for one in members)
        stats = edit(hubs, 2)
        assert [(one.opened, one.ahead) for one in stats] == [(0, 3) if one is spare else (0, 1) for one in hubs], (
            f"turn {turn}"
        )
        for one in hubs:
            one.close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_an_admission_in_the_middle_of_preparing_takes_over_what_is_half_way(shared_memory: bool) -> None:
    """Both sides dial at once: still one link a pair, and it works."""
    for turn in range(40):
        hubs = [hub(rank, shared_memory=shared_memory, slots=4) for rank in range(4)]
        spare, members = hubs[turn % 4], [one for one in hubs if one is not hubs[turn % 4]]
        edit(members, 1)
        preparing = threading.Thread(target=spare.prepare, args=([one.self() for one in members], 10.0))
        preparing.start()
        time.sleep(0.0002 * (turn % 7))
        edit(hubs, 2)
        preparing.join()
        assert all(one.broken() == [] for one in hubs), f"turn {turn}"
        edit(hubs, 3)  # a link that only one side kept would be dead by now
        assert all(one.broken() == [] and len(one.alive()) == 4 for one in hubs), f"turn {turn}"
        for one in hubs:
            one.close()


@pytest.mark.parametrize("quietly", [False, True])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_broken_link_is_opened_anew_also_when_one_end_has_not_noticed(shared_memory: bool, quietly: bool) -> None:
    hubs = [hub(rank, shared_memory=shared_memory, slots=3) for rank in range(3)]
    edit(hubs, 1)
    for generation, (at, to) in enumerate(((0, 2), (2, 0), (1, 2)), start=2):
        hubs[at].sever(to, quietly)
        assert (to, 0) in hubs[at].broken()
        assert ((at, 0) in hubs[to].broken()) is not quietly
        stats = edit(hubs, generation)
        new = [one.opened + one.ahead for one in stats]  # ahead: the other end had dialled before this one began
        assert new == [1 if rank in (at, to) else 0 for rank in range(3)]
        assert all(one.broken() == [] for one in hubs)
    for one in hubs:
        one.close()


@pytest.mark.parametrize(
    "target",
    [
        "short-plain",
        *(pytest.param(f"run-{kind}", marks=pytest.mark.slow) for kind in ("plain", "thread", "address")),
        *(pytest.param(f"short-{kind}", marks=pytest.mark.slow) for kind in ("thread", "address")),
    ],
)
def test_native_tests(target: str) -> None:
    """Built where they are not yet (``build/``), and run; a sanitizer that has anything to say fails them."""
    command = [sys.executable, "setup.py", "-q", "build_ext", f"--target={target}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "WARNING: ThreadSanitizer" not in done.stdout + done.stderr, done.stderr[-4000:]
