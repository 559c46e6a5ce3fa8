"""The embedded store over real sockets: what a member gets from it, and what a stranger does not."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.control import store_server
from megatron.elastic.control.channel import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    Acceptor,
    Credentials,
    Dialer,
    Session,
)
from megatron.elastic.control.store import Store, StoreLost
from megatron.elastic.control.store_client import ReachedStore, reach
from megatron.elastic.control.store_messages import Put, encode
from megatron.elastic.control.store_server import PURPOSE, ServedStore, serve
from megatron.elastic.control.torch_store import TorchStore
from megatron.elastic.control.wire import ProtocolError

MINE = Credentials("ab" * 16, "run")


@pytest.fixture
def served() -> Iterator[ServedStore]:
    store = serve("127.0.0.1", 0, MINE)
    yield store
    store.close()


def member(served: ServedStore, credentials: Credentials = MINE) -> ReachedStore:
    return reach("127.0.0.1", served.port, credentials, 10)


def stranger(served: ServedStore) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=10)


def is_closed(channel: socket.socket) -> bool:
    """Return whether the server ends the connection (waited for)."""
    try:
        while channel.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


@pytest.mark.parametrize("near", [True, False], ids=["in the server's process", "over a connection"])
def test_the_operations(served: ServedStore, near: bool) -> None:
    store: Store = served if near else member(served)
    assert store.get("a") is None and store.get_many(["a", "b"]) == {"a": None, "b": None}
    store.put("a", b"\0any bytes\xff")
    assert store.get("a") == b"\0any bytes\xff" and store.create("a", b"2") == b"\0any bytes\xff"
    assert store.create("b", b"3") == b"3" and store.get_many(["b", "c", "b"]) == {"b": b"3", "c": None}
    assert store.replace("c", None, b"1") and not store.replace("c", None, b"2") and not store.replace("c", b"0", b"2")
    assert store.replace("c", b"1", b"2") and store.replace("c", b"1", b"2"), "asked again after a lost answer"
    store.delete("c")
    store.delete("c")
    assert store.get("c") is None
    assert store.wait("a", 0.0) == store.wait("a", 60.0) == b"\0any bytes\xff"
    assert store.wait("never", 0.05) is None
    large = random.Random(3).randbytes(5 << 20)
    store.put("large", large)
    assert store.clone().get("large") == large


def test_a_wait_ends_when_the_key_is_set_near_or_far(served: ServedStore) -> None:
    for waits in (served, member(served)):
        for sets in (served, member(served)):
            key = f"{id(waits)}/{id(sets)}"
            timer = threading.Timer(0.05, sets.put, (key, b"here"))
            timer.start()
            assert waits.wait(key, 60) == b"here"
            assert not served._keys._waiting, "who has its answer waits for nothing"


def test_of_many_that_create_one_wins_and_all_learn_who(served: ServedStore) -> None:
    clients: list[Store] = [served, *(member(served) for _ in range(5))]
    for round in range(20):
        seen: list[bytes] = []
        threads = [
            threading.Thread(target=lambda s=store, n=n, at=f"place/{round}", seen=seen: seen.append(s.create(at, n)))
            for n, store in zip((b"0", b"1", b"2", b"3", b"4", b"5"), clients, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(seen) == len(clients) and len(set(seen)) == 1


def test_nothing_is_served_without_the_secret_or_for_another_run(served: ServedStore) -> None:
    for other in (Credentials("cd" * 16, "run"), Credentials("ab" * 16, "another run")):
        with pytest.raises(StoreLost, match="not this job's store"):
            reach("127.0.0.1", served.port, other, 10)


def test_a_stranger_that_goes_on_after_the_challenge_is_not_heard(served: ServedStore) -> None:
    """It has recorded another connection of a member, and sends the same bytes."""
    channel = stranger(served)
    dialer = Dialer(MINE.key(PURPOSE))
    channel.sendall(dialer.hello)
    answer, session = dialer.answer(received(channel, CHALLENGE_BYTES))
    request = session.frame(encode(Put("mine", b"1")))
    channel.sendall(answer + request)
    assert member(served).wait("mine", 10) == b"1"
    served.delete("mine")
    channel.sendall(request)  # within its connection
    assert is_closed(channel) and served.get("mine") is None
    replayed = stranger(served)
    replayed.sendall(dialer.hello)
    received(replayed, CHALLENGE_BYTES)
    with contextlib.suppress(OSError):
        replayed.sendall(answer + request)
    assert is_closed(replayed) and served.get("mine") is None


def received(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = channel.recv(size - len(data))
        assert more, "closed"
        data += more
    return data


def test_strangers_in_any_number_keep_no_member_waiting_and_are_sent_away(
    served: ServedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "_STRANGER_SECONDS", 0.5)
    known = member(served)
    idle = [stranger(served) for _ in range(3 * store_server._STRANGERS)]
    half = [stranger(served) for _ in range(8)]
    for channel in half:
        channel.sendall(Dialer(b"x").hello[: HELLO_BYTES - 1])
    known.put("a", b"1")
    assert member(served).get("a") == b"1", "another one still comes in"
    assert len(served._server._strangers) <= store_server._STRANGERS
    assert all(is_closed(channel) for channel in [*idle, *half])
    known.put("b", b"2")
    assert not served._server._strangers and served.get("b") == b"2"


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_of_a_stranger_end_its_own_connection_alone(text: bytes, hello_first: bool) -> None:
    served, dialer = shared(), Dialer(os.urandom(32))
    with stranger(served) as channel, contextlib.suppress(OSError):
        channel.sendall((dialer.hello if hello_first else b"") + text)
        channel.shutdown(socket.SHUT_WR)
        assert is_closed(channel)
    known = member(served)
    known.put("alive", text)
    assert known.get("alive") == text
    known.close()


_SHARED: list[ServedStore] = []


def shared() -> ServedStore:
    """One server for many examples."""
    if not _SHARED:
        _SHARED.append(serve("127.0.0.1", 0, MINE))
    return _SHARED[0]


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> Iterator[None]:
    yield
    for served in _SHARED:
        served.close()


def sessions(key: bytes) -> tuple[Session, Session]:
    dialer, listener = Dialer(key), Acceptor(key, b"i" * 16)
    answer, here = dialer.answer(listener.challenge(dialer.hello))
    return here, listener.session(answer)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_frames_come_whole_in_order_and_once_or_not_at_all(bodies: list[bytes], draw: random.Random) -> None:
    """One change (a bit, an order, a frame twice, one left out, the other direction) and no frame from there on."""
    here, there = sessions(b"k" * 32)
    frames = [here.frame(body) for body in bodies]
    at = draw.randrange(len(frames))
    change = draw.choice(["none", "bit", "twice", "left out", "moved", "reflected"])
    expected = bodies[:at]
    if change == "none":
        expected = bodies
    elif change == "bit":
        place = draw.randrange(4, len(frames[at]))  # of the length: more bytes are waited for, or the end
        flipped = bytearray(frames[at])
        flipped[place] ^= 1 << draw.randrange(8)
        frames[at] = bytes(flipped)
    elif change == "twice":
        frames.insert(at, frames[at])
        expected = bodies[: at + 1]
    elif change == "left out":
        del frames[at]
        frames.append(here.frame(b"one more"))
    elif change == "moved":
        frames.insert(0, here.frame(b"sent last"))
        expected = []
    else:
        frames[at] = there.frame(bodies[at])
    got, buffer = [], bytearray(b"".join(frames))
    try:
        while (body := there.take(buffer)) is not None:
            got.append(body)
        assert change == "none"
    except ProtocolError:
        assert change != "none"
    assert got == expected


def test_a_frame_that_announces_more_than_may_be_is_refused_before_it_comes() -> None:
    _, there = sessions(b"k" * 32)
    with pytest.raises(ProtocolError, match="limit"):
        there.take(bytearray(struct.pack(">I", 0xFFFFFFFF)))


def test_a_connection_that_is_cut_is_made_again_with_the_same_server_only(served: ServedStore) -> None:
    store = member(served)
    store.put("a", b"1")
    store._channel.shutdown(socket.SHUT_RDWR)
    assert store.get("a") == b"1"
    waiting = threading.Timer(0.1, store._channel.shutdown, (socket.SHUT_RDWR,))
    waiting.start()
    threading.Timer(0.3, served.put, ("b", b"2")).start()
    assert store.wait("b", 60) == b"2"
    served.close()
    another = serve("127.0.0.1", served.port, MINE)
    with pytest.raises(StoreLost, match="another server"):
        store.get("a")
    another.close()


def test_the_end_of_the_server_is_told_at_once(served: ServedStore) -> None:
    store = member(served)
    threading.Timer(0.1, served.close).start()
    with pytest.raises(StoreLost, match=f"store at .*:{served.port}"):
        store.wait("never", 600)
    with pytest.raises(StoreLost, match=r"127\.0\.0\.1:9"):
        reach("127.0.0.1", 9, MINE, 0.3)


def test_a_member_comes_before_the_server(served: ServedStore) -> None:
    port = served.port
    served.close()
    late: list[ServedStore] = []
    timer = threading.Timer(0.3, lambda: late.append(serve("127.0.0.1", port, MINE)))
    timer.start()
    reach("127.0.0.1", port, MINE, 60).put("a", b"1")
    timer.join()
    assert late[0].get("a") == b"1"
    late[0].close()


def test_as_torch_wants_it(served: ServedStore) -> None:
    one, two = (TorchStore(member(served), "here/", 30) for _ in range(2))
    assert not one.check(["a"])
    threading.Timer(0.05, one.set, ("a", "text")).start()
    assert two.get("a") == b"text" and two.check(["a"]) and served.get("here/a") == b"text"
    one.wait(["a"])
    assert two.delete_key("a") and not two.delete_key("a")
    with pytest.raises(TimeoutError):
        TorchStore(member(served), "here/", 0.05).get("a")
    for own in (one, dist.HashStore()):  # alike
        assert own.compare_set("c", "none", "none") == b"none" and not own.check(["c"])
        assert own.compare_set("c", "", "1") == b"1" == own.get("c")
        assert own.compare_set("c", "2", "3") == b"1" and own.compare_set("c", "1", "3") == b"3" == own.get("c")
    within = dist.PrefixStore("group", one)  # as communicators ask it
    within.set("b", "1")
    assert within.get("b") == b"1" == two.get("group/b")
    assert within.add("count", 2) == 2 and within.add("count", -1) == 1
