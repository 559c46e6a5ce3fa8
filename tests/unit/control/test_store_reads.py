"""Reads of many keys at once from the embedded store."""

from __future__ import annotations

from megatron.elastic.control.channel import Credentials
from megatron.elastic.control.store_client import reach
from megatron.elastic.control.store_server import serve


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
