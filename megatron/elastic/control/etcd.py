"""The store in etcd: any agent may die, the first one included.

Everything a job writes hangs on one lease that all its agents keep alive, so
that nothing of it outlives its last agent and a later run under the same name
starts clean. An agent that cannot reach a majority of etcd cannot append: on a
partition only the side with etcd decides, and the workers of the other side end
themselves when their agent's beat fails (:mod:`launch.agent.node_leases`). The agent itself
goes on asking for as long as its patience lasts, so that it can take its place again.

A user and a password, where etcd wants them, come from the environment alone: a command line is seen by others.

Talks to etcd's JSON gateway through ``etcd3gw``, with one endpoint after the
other until one answers.
"""

from __future__ import annotations

import base64
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from megatron.elastic.control import env
from megatron.elastic.control.store import Store, StoreLost

__all__ = ["Etcd", "EtcdStore"]

T = TypeVar("T")

_REQUEST_SECONDS = 2.0
"""Bounds one request to one endpoint."""
_PATIENCE_SECONDS = 5.0
"""Least time for which all endpoints are tried before the store counts as lost: longer than an election of etcd."""
_UNAUTHENTICATED = ("invalid auth token", "auth token is not", "user name is empty", "revision of auth store is old")
"""etcd's messages about a token that it does not know, or that was missing."""
_LOOK_SECONDS = 1.0
"""A wait asks again this often, whatever its watch says: a watch on an endpoint that died is silent for ever."""
_OPERATIONS = 128
"""Operations that etcd takes in one transaction, by its default."""
_COMPACTION_FLAGS = "--auto-compaction-mode=periodic --auto-compaction-retention=5m"
_FULL = "database space exceeded"
"""In etcd's message about a database that has reached its quota: it takes no more writes."""
_MANY_REVISIONS = 100_000
"""A job of two nodes makes as many within some hours."""
_LEASE_SECONDS = 30
"""After this long without any agent alive, everything of the job is gone from etcd."""


@dataclass(frozen=True)
class Etcd:
    """Address of etcd and the credentials for it."""

    endpoints: tuple[tuple[str, int], ...]
    protocol: str = "http"
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str = field(default="", repr=False)

    @classmethod
    def parse(cls, endpoints: str, options: Mapping[str, str], environ: Mapping[str, str] | None = None) -> Etcd:
        """``"host:port[,host:port…]"`` and torchrun's names of options. Raises ValueError naming the flag.

        ``environ``: where the user and the password are.
        """
        environ = {} if environ is None else environ
        found = []
        for text in endpoints.split(","):
            host, _, port = text.strip().rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
                raise ValueError(f"--rdzv-endpoint takes HOST:PORT[,HOST:PORT…] of etcd, got {endpoints!r}")
            found.append((host.strip("[]"), int(port)))
        protocol = options.get("protocol", "http")
        if protocol not in ("http", "https"):
            raise ValueError(f"--rdzv-conf protocol is http or https, got {protocol!r}")
        files = {name: options.get(name) for name in ("ca_cert", "ssl_cert", "ssl_cert_key")}
        missing = [f"{name}={path}" for name, path in files.items() if path is not None and not os.path.isfile(path)]
        if missing:
            raise ValueError(f"--rdzv-conf {missing[0]}: there is no such file")
        user, password = environ.get(env.ETCD_USER), environ.get(env.ETCD_PASSWORD, "")
        if user and not password:
            raise ValueError(f"{env.ETCD_USER} is set and {env.ETCD_PASSWORD} is not")
        tls = files["ca_cert"], files["ssl_cert"], files["ssl_cert_key"]
        return cls(tuple(found), protocol, *tls, user or None, password)

    def __str__(self) -> str:
        return "etcd at " + ",".join(f"{host}:{port}" for host, port in self.endpoints)


class EtcdStore(Store):
    """Keys of one job below ``prefix``."""

    def __init__(
        self, etcd: Etcd, prefix: str, lease: int = 0, start: int = 0, patience: float = _PATIENCE_SECONDS
    ) -> None:
        self._etcd, self._prefix, self._lease_id = etcd, prefix, lease
        self._patience = patience
        self._at = start
        self._clients: dict[int, Any] = {}
        self._closed = threading.Event()

    @classmethod
    def open(cls, etcd: Etcd, prefix: str, patience: float = _PATIENCE_SECONDS) -> EtcdStore:
        """Reach etcd and share the job's lease, or grant it.

        Once reached, it is lost when none of its endpoints answers for ``patience`` seconds. Raises
        :class:`StoreLost`; ValueError without etcd3gw.
        """
        try:
            import etcd3gw  # noqa: F401 - only jobs that keep their store in etcd need it
        except ImportError:
            raise ValueError("--rdzv-backend etcd needs the package etcd3gw: pip install etcd3gw") from None
        store = cls(etcd, prefix)
        store._lease_id = store._ask(store._share_lease)
        store._patience = max(patience, _PATIENCE_SECONDS)
        threading.Thread(target=store._keep_alive, name="etcd-lease", daemon=True).start()
        return store

    @property
    def keeper(self) -> str:
        return str(self._etcd)

    def never_compacted(self) -> str:
        """Return a warning if etcd has many revisions and the first of them still, else an empty text."""
        number = self._ask(self._uncompacted)
        if number < _MANY_REVISIONS:
            return ""
        return (
            f"{self._etcd} has kept all of its {number} revisions: renewals of leases will fill its database, and then "
            f"the job ends; start etcd with {_COMPACTION_FLAGS}"
        )

    def put(self, key: str, value: bytes) -> None:
        self._ask(lambda client: client.put(self._prefix + key, value, self._lease(client)))

    def get(self, key: str) -> bytes | None:
        return self._ask(lambda client: _first(client.get(self._prefix + key)))

    def get_many(self, keys: Sequence[str]) -> dict[str, bytes | None]:
        found: dict[str, bytes | None] = dict.fromkeys(keys)
        for first in range(0, len(keys), _OPERATIONS):
            some = keys[first : first + _OPERATIONS]
            reads = [{"request_range": {"key": _encoded(self._prefix + key)}} for key in some]
            answers = self._ask(partial(_transact, {"success": reads}))["responses"]
            for key, answer in zip(some, answers, strict=True):
                for pair in answer["response_range"].get("kvs", ()):
                    found[key] = base64.b64decode(pair["value"])
        return found

    def create(self, key: str, value: bytes) -> bytes:
        def attempt(client: Any) -> bytes | None:
            if client.create(self._prefix + key, value, self._lease(client)):
                return value
            return _first(client.get(self._prefix + key))

        while True:
            found = self._ask(attempt)
            if found is not None:  # else it was there and has been deleted meanwhile
                return found

    def replace(self, key: str, old: bytes | None, new: bytes) -> bool:
        if old is None:
            return self.create(key, new) == new
        place, value = _encoded(self._prefix + key), _encoded(new)
        put = {"request_put": {"key": place, "value": value, "lease": self._lease_id}}
        same = {"key": place, "target": "VALUE", "result": "EQUAL", "value": _encoded(old)}
        text = {"compare": [same], "success": [put], "failure": []}

        def attempt(client: Any) -> bool:
            # Asked again because the answer was lost, it finds what the first request has put.
            return bool(client.transaction(text).get("succeeded")) or _first(client.get(self._prefix + key)) == new

        return self._ask(attempt)

    def wait(self, key: str, timeout: float) -> bytes | None:
        end = time.monotonic() + timeout
        while True:
            remaining = end - time.monotonic()
            found = self._ask(partial(self._watch, key, min(remaining, _LOOK_SECONDS)))
            if found is not None or remaining <= 0:
                return found

    def delete(self, key: str) -> None:
        self._ask(lambda client: client.delete(self._prefix + key))

    def clone(self) -> EtcdStore:
        return EtcdStore(self._etcd, self._prefix, self._lease_id, self._at, self._patience)

    def close(self) -> None:
        """Keep the job's lease alive no longer."""
        self._closed.set()

    # -- one request ---------------------------------------------------------------

    def _ask(self, request: Callable[[Any], T]) -> T:
        """``request`` of the first endpoint that answers, for a bounded time."""
        from etcd3gw.exceptions import Etcd3Exception
        from requests import RequestException

        end = time.monotonic() + self._patience
        while True:
            try:
                return request(self._client())
            except (Etcd3Exception, RequestException, OSError, ValueError, KeyError) as error:
                why = _words(error)
                if time.monotonic() >= end or "lease not found" in why or "authentication failed" in why:
                    raise StoreLost(f"{self._etcd}: {why}") from None
                if any(words in why for words in _UNAUTHENTICATED):
                    self._clients.clear()
                self._at = (self._at + 1) % len(self._etcd.endpoints)
                time.sleep(0.05)

    def _client(self) -> Any:
        if self._at not in self._clients:
            from etcd3gw.client import Etcd3Client

            host, port = self._etcd.endpoints[self._at]
            client = Etcd3Client(
                host, port, self._etcd.protocol, timeout=_REQUEST_SECONDS, session=_session(self._etcd)
            )
            if self._etcd.user is not None:
                named = {"name": self._etcd.user, "password": self._etcd.password}
                client.session.headers["Authorization"] = client.post(client.get_url("/auth/authenticate"), json=named)[
                    "token"
                ]
            self._clients[self._at] = client
        return self._clients[self._at]

    def _watch(self, key: str, seconds: float, client: Any) -> bytes | None:
        """The value of ``key`` if it exists or comes to within ``seconds``."""
        from etcd3gw.watch import Watcher

        found = _first(client.get(self._prefix + key))
        if found is not None or seconds <= 0:
            return found
        events: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        watcher = Watcher(client, self._prefix + key, events.put)
        try:
            # The watch stands: what was created before it is found here, what comes later by it.
            found = _first(client.get(self._prefix + key))
            if found is None:
                events.get(timeout=seconds)
                found = _first(client.get(self._prefix + key))
            return found
        except queue.Empty:
            return None
        finally:
            watcher.stop()

    def _uncompacted(self, client: Any) -> int:
        """The number of revisions that etcd keeps; 0 if it has compacted the first."""
        from etcd3gw.exceptions import Etcd3Exception

        read = {"key": _encoded(self._prefix + "lease"), "revision": 1}
        try:
            answer = client.post(client.get_url("/kv/range"), json=read)
        except Etcd3Exception as error:
            if "revision has been compacted" in _words(error):
                return 0
            raise
        return int(answer["header"]["revision"])

    # -- the job's lease -----------------------------------------------------------

    def _lease(self, client: Any) -> Any:
        from etcd3gw.lease import Lease

        return Lease(self._lease_id, client)

    def _share_lease(self, client: Any) -> int:
        key = self._prefix + "lease"
        while True:
            text = _first(client.get(key))
            if text is not None and client_lease_lives(client, int(text)):
                return int(text)
            lease = client.lease(_LEASE_SECONDS)
            if client.create(key, str(lease.id), lease):
                return int(lease.id)
            lease.revoke()

    def _keep_alive(self) -> None:
        mine = self.clone()
        try:
            while not self._closed.wait(_LEASE_SECONDS / 6):
                if not mine._ask(lambda client: client_lease_lives(client, self._lease_id)):
                    return  # the next request says so: its lease is not found
        except StoreLost:
            return  # the next request reports it


def _transact(text: Mapping[str, Any], client: Any) -> Mapping[str, Any]:
    answer: Mapping[str, Any] = client.transaction(text)
    return answer


def client_lease_lives(client: Any, lease: int) -> bool:
    """Prolong a lease; False when it has ended."""
    from etcd3gw.lease import Lease

    return bool(Lease(lease, client).refresh() > 0)


def _words(error: Exception) -> str:
    """One line of what went wrong; etcd's own words stand in ``detail_text``."""
    words = str(getattr(error, "detail_text", None) or error or type(error).__name__).split("\n", 1)[0]
    if _FULL in words:
        return (
            f"its database is full ({_FULL}): compact and defragment it with etcdctl, disarm its alarm, and start it "
            f"with {_COMPACTION_FLAGS}"
        )
    return words


def _encoded(text: str | bytes) -> str:
    """As etcd's JSON gateway wants keys and values."""
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def _first(values: list[bytes]) -> bytes | None:
    return values[0] if values else None


def _session(etcd: Etcd) -> Any:
    """HTTP connections that wait for nothing for ever, watches included."""
    from requests import Session

    session = Session()
    vars(session)["request"] = partial(session.request, timeout=2 * _LOOK_SECONDS)
    if etcd.ca_cert:
        session.verify = etcd.ca_cert
    if etcd.cert:
        session.cert = (etcd.cert, etcd.key) if etcd.key else etcd.cert
    return session
