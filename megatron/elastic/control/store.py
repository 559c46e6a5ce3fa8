"""The store the agents agree through: a small interface.

Nine operations, of which the two that compare and set matter. The embedded store is kept by the first agent
(:mod:`store_server`, reached by way of :mod:`store_client`): its loss ends the job (:class:`StoreLost`). With
:mod:`etcd` any agent may die. One connection serves one thread at a time and a waiting call occupies it, so each thread
takes its own with :meth:`Store.clone`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

__all__ = ["Store", "StoreLost", "leading"]


class StoreLost(ConnectionError):
    """The store does not answer any more."""


def leading(values: Iterable[bytes | None]) -> list[bytes]:
    """Return the values up to the first key that does not exist, whose value is None."""
    found = list[bytes]()
    for value in values:
        if value is None:
            break
        found.append(value)
    return found


class Store(ABC):
    """Byte strings under text keys. Every method raises :class:`StoreLost` when the store is gone."""

    server: bool = False
    """This process serves the store: a request to it takes no time."""
    embedded: bool = False
    """The store ends with the first agent."""

    @property
    @abstractmethod
    def keeper(self) -> str:
        """Name of the process or service that keeps it, for messages."""

    @abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Set ``key``, whatever its value was."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The value, or None where the key does not exist."""

    @abstractmethod
    def get_many(self, keys: Sequence[str]) -> dict[str, bytes | None]:
        """The value of each of ``keys``, or None. One request where the store has such a one."""

    @abstractmethod
    def create(self, key: str, value: bytes) -> bytes:
        """Set ``key`` if it does not exist; returns what it holds afterwards. Atomic."""

    @abstractmethod
    def replace(self, key: str, old: bytes | None, new: bytes) -> bool:
        """Set ``key`` to ``new`` if it holds ``old`` (None: does not exist); whether it holds ``new`` then. Atomic."""

    @abstractmethod
    def wait(self, key: str, timeout: float) -> bytes | None:
        """Block until ``key`` exists and return its value; None after ``timeout`` seconds."""

    def wait_many(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        """Block until the first of ``keys`` exists; return its value, and those of the next ones that exist already.

        Up to the first key that does not exist; empty after ``timeout`` seconds.
        """
        present = leading(self.get_many(keys).values())
        if not present:
            value = self.wait(keys[0], timeout)
            present = [] if value is None else [value]
        return present

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove ``key`` if it exists."""

    @abstractmethod
    def clone(self) -> Store:
        """Another connection to the same store."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """This agent needs the store no longer."""
