"""The store the agents agree through: a small interface and its embedded form.

Seven operations, of which the two that compare and set matter. The embedded
store is torch's TCPStore, served by the first agent: its loss ends the job
(:class:`StoreLost`). With :mod:`etcd` any agent may die. One connection serves one
thread at a time and a waiting call occupies it, so each thread takes its own with
:meth:`Store.clone`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

__all__ = ["EmbeddedStore", "Store", "StoreLost"]


class StoreLost(ConnectionError):
    """The store does not answer any more."""


class Store(ABC):
    """ASCII byte strings under text keys. Every method raises :class:`StoreLost` when the store is gone."""

    server: bool = False
    """Whether this process serves the store: then asking it takes no time."""
    embedded: bool = False
    """Whether the store ends with the first agent."""

    @property
    @abstractmethod
    def keeper(self) -> str:
        """Who keeps it, for messages."""

    @abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Set ``key``, whatever it was."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The value, or None where the key does not exist."""

    def get_many(self, keys: Sequence[str]) -> dict[str, bytes | None]:
        """The value of each of ``keys``, or None. One request where the store has such a one."""
        return {key: self.get(key) for key in keys}

    @abstractmethod
    def create(self, key: str, value: bytes) -> bytes:
        """Set ``key`` if it does not exist; returns what it holds afterwards. Atomic."""

    @abstractmethod
    def replace(self, key: str, old: bytes | None, new: bytes) -> bool:
        """Set ``key`` to ``new`` if it holds ``old`` (None: does not exist); whether it holds ``new`` then. Atomic."""

    @abstractmethod
    def wait(self, key: str, timeout: float) -> bytes | None:
        """Block until ``key`` exists and return its value; None after ``timeout`` seconds.

        Running out may take seconds longer where torch logs it (``TORCH_CPP_LOG_LEVEL`` below ERROR).
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove ``key`` if it exists."""

    @abstractmethod
    def clone(self) -> Store:
        """Another connection to the same store."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """This agent needs the store no longer."""


class EmbeddedStore(Store):
    """TCPStore in the first agent. ``server`` says whether this process serves it."""

    embedded = True

    def __init__(self, store: TCPStore, prefix: str, server: bool = False) -> None:
        self._tcp = store
        self._prefix = prefix
        self.server = server

    @classmethod
    def open(cls, host: str, port: int, prefix: str, server: bool, timeout: float) -> EmbeddedStore:
        """Serve (port 0: any free one) or reach the store within ``timeout`` seconds."""
        try:
            wait = timedelta(seconds=timeout)
            tcp = TCPStore(host, port, is_master=server, wait_for_workers=False, timeout=wait)
        except (RuntimeError, ValueError) as error:
            raise StoreLost(f"store at {host}:{port}: {_first_line(error)}") from None
        return cls(tcp, prefix, server)

    @property
    def keeper(self) -> str:
        return "the first agent, which holds the store,"

    @property
    def port(self) -> int:
        """The port it is served at."""
        return int(self._tcp.port)

    @property
    def host(self) -> str:
        """The host it is served at."""
        return str(self._tcp.host)

    def put(self, key: str, value: bytes) -> None:
        try:
            self._tcp.set(self._prefix + key, value.decode("ascii"))
        except RuntimeError as error:
            raise StoreLost(_first_line(error)) from None

    def get(self, key: str) -> bytes | None:
        try:
            if not self._tcp.check([self._prefix + key]):
                return None
            return bytes(self._tcp.get(self._prefix + key))
        except RuntimeError as error:
            raise StoreLost(_first_line(error)) from None

    def get_many(self, keys: Sequence[str]) -> dict[str, bytes | None]:
        places = [self._prefix + key for key in keys]
        try:
            if not places or not self._tcp.check(places):
                return super().get_many(keys)  # one that is missing would be waited for
            return dict(zip(keys, map(bytes, self._tcp.multi_get(places)), strict=True))
        except RuntimeError as error:
            raise StoreLost(_first_line(error)) from None

    def create(self, key: str, value: bytes) -> bytes:
        try:
            return bytes(self._tcp.compare_set(self._prefix + key, "", value.decode("ascii")))
        except RuntimeError as error:
            raise StoreLost(_first_line(error)) from None

    def replace(self, key: str, old: bytes | None, new: bytes) -> bool:
        try:
            present = "" if old is None else old.decode("ascii")
            return bytes(self._tcp.compare_set(self._prefix + key, present, new.decode("ascii"))) == new
        except RuntimeError as error:
            raise StoreLost(_first_line(error)) from None

    def wait(self, key: str, timeout: float) -> bytes | None:
        # A wait that runs out is logged by torch with the names of both ends, for which it asks DNS: 5 s for each query
        # whose answer is lost. The launcher's own process turns that log off.
        try:
            self._tcp.wait([self._prefix + key], timedelta(seconds=timeout))
            return self.get(key)  # None if it was deleted meanwhile: to a reader that was stopped, it never came
        except DistNetworkError as error:
            raise StoreLost(_first_line(error)) from None
        except DistStoreError:
            return None
        except RuntimeError as error:
            raise StoreLost(_first_line(error)) from None

    def delete(self, key: str) -> None:
        try:
            self._tcp.delete_key(self._prefix + key)
        except RuntimeError as error:
            raise StoreLost(_first_line(error)) from None

    def clone(self) -> EmbeddedStore:
        try:
            return EmbeddedStore(self._tcp.clone(), self._prefix, server=False)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise StoreLost(_first_line(error)) from None


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
