"""Reads of many keys at once from the embedded store, and of a journal with many writers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from megatron.elastic.control import events as ev
from megatron.elastic.control.channel import Credentials
from megatron.elastic.control.journal import Journal, Signer
from megatron.elastic.control.keys import Keys, LocalStore
from megatron.elastic.control.store import Store
from megatron.elastic.control.store_client import reach
from megatron.elastic.control.store_server import serve

CREDENTIALS = Credentials("ab" * 16, "run")


@pytest.fixture(params=["near", "far"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """The store in the process that serves it, and reached over a socket."""
    served = serve("127.0.0.1", 0, CREDENTIALS)
    yield served if request.param == "near" else reach("127.0.0.1", served.port, CREDENTIALS, 20)
    served.close()


def test_many_values_are_read_at_once_whether_they_exist_or_not() -> None:
    served, credentials = serve("127.0.0.1", 0, Credentials("ab" * 16, "run")), Credentials("ab" * 16, "run")
    store = reach("127.0.0.1", served.port, credentials, 20)
    names = [f"lease/{number}" for number in range(300)]
    for name in names[::7]:
        store.put(name, name.encode())
    assert store.get_many(names) == {name: name.encode() if name in names[::7] else None for name in names}
    assert store.get_many(names[::7]) == {name: name.encode() for name in names[::7]}
    assert store.get_many([]) == {}
    served.close()


def test_a_wait_for_many_ends_with_the_first_and_brings_those_behind_it_that_exist(store: Store) -> None:
    names = [f"journal/{number}" for number in range(5)]
    assert store.wait_many(names, 0.01) == []
    for name in (names[1], names[2], names[4]):
        store.put(name, name.encode())
    assert store.wait_many(names, 0.01) == [], "the first one is missing"
    timer = threading.Timer(0.05, store.clone().put, (names[0], b"first"))
    timer.start()
    came = store.wait_many(names, 20)
    timer.join()
    assert came[0] == b"first" and came == [b"first", b"journal/1", b"journal/2"][: len(came)]
    assert store.wait_many(names, 20) == [b"first", b"journal/1", b"journal/2"]
    assert store.wait_many(names[4:], 20) == [b"journal/4"]


class Counted(LocalStore):
    """Counts requests."""

    def __init__(self) -> None:
        super().__init__(Keys())
        self.requests = Counter[str]()

    def create(self, key: str, value: bytes) -> bytes:
        self.requests["create"] += 1
        return super().create(key, value)

    def get_many(self, keys: Sequence[str]) -> dict[str, bytes | None]:
        self.requests["get_many"] += 1
        return super().get_many(keys)


def test_one_that_is_behind_reads_many_entries_with_a_request_also_to_append() -> None:
    """As after a loss, when the agent of each node appends what its ranks report."""
    store, signer = Counted(), Signer(CREDENTIALS)
    writer, reader, late = (Journal(store, signer) for _ in range(3))
    for number in range(100):
        list(writer.append(ev.NodeLost(number, 0, "gone")))
    store.requests.clear()
    read = [position for _ in range(10) for position, _ in reader.follow(0.0)]
    assert read == list(range(100))
    assert store.requests.total() <= 12
    store.requests.clear()
    positions = [position for position, _ in late.append(ev.NodeLost(100, 0, "gone"))]
    assert positions == list(range(101))
    assert store.requests.total() <= 10


def test_writers_in_parallel_append_each_entry_once_and_all_read_one_order(store: Store) -> None:
    signer, writers, each = Signer(CREDENTIALS), 8, 10

    def write(number: int, journal: Journal) -> None:
        for entry in range(each):
            for _ in journal.append(ev.NodeLost(number, entry, "gone")):
                pass

    threads = [threading.Thread(target=write, args=(n, Journal(store.clone(), signer))) for n in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    orders = []
    for _ in range(2):
        reader, found = Journal(store.clone(), signer), list[ev.Event | None]()
        while len(found) < writers * each:
            found += [event for _, event in reader.follow(1.0)]
        orders.append(found)
    assert orders[0] == orders[1]
    lost = [(event.node, event.epoch) for event in orders[0] if isinstance(event, ev.NodeLost)]
    assert sorted(lost) == [(node, epoch) for node in range(writers) for epoch in range(each)]
    assert all(of == sorted(of) for of in ([e for n, e in lost if n == node] for node in range(writers)))


@pytest.mark.parametrize("length", [0, 1, 1024, 1025, 100_000])
def test_a_value_is_what_was_signed_and_a_long_one_is_shorter(length: int) -> None:
    signer, content = Signer(CREDENTIALS), (b'{"rank":1,"report":"..."}' * (length // 20 + 1))[:length]
    value = signer.sign("journal/1", content)
    assert signer.open("journal/1", value) == content
    assert length < 1025 or len(value) < length // 2
    assert signer.open("journal/2", value) is None
    assert signer.open("journal/1", value[:-1] + (b"A" if value[-1:] != b"A" else b"B")) is None
