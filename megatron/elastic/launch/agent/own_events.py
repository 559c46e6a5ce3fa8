"""Events of an agent's own ranks are numbered, and go through the first agent if there is a connection to it.

At a loss each agent reports. If each appended an entry of its own, N agents would contend for the journal's end, and
the store would serve N entries to each of N readers. So they tell the first agent, and :class:`JointEntries` appends
what it was told in few entries. An agent without a connection to it appends by itself.

A part is *unseen* until its agent has read it in the journal. Whenever the way changes, all unseen parts take the new
one, in their order. So each way carries them without a gap, and the journal's readers take each once and in order
(:mod:`~megatron.elastic.control.parts`). A part that a first agent has heard and does not append, because it hangs,
takes the other way after twice :attr:`Timing.lease` at the latest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import msgspec

from megatron.elastic.control.events import Event, OwnEvent, Part, Together
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.nodes import Node
from megatron.elastic.control.wire import Codec, ProtocolError, encode
from megatron.elastic.launch.agent.loop import Timers

__all__ = ["FIRST", "JointEntries", "OwnEvents", "hold_seconds", "told"]

FIRST = 0
"""The node of the first agent."""
_OWN = get_args(OwnEvent)
_PARTS_OF_ENTRY = 256
"""Parts of one entry at most: etcd takes values of 1.5 MiB."""
_HOLD_SECONDS_A_NODE = 20e-6
_LEAST_HOLD = 1e-3


class _Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Events on their way to the first agent."""

    parts: tuple[Part, ...]


_SAID: Codec[_Said] = Codec(_Said)


def told(parts: Sequence[Part]) -> bytes:
    """Return ``parts`` as the first agent is told them."""
    return encode(_Said(tuple(parts)))


def hold_seconds(nodes: int) -> float:
    """Return the least time between two entries of the first agent: none in a small job, which has few."""
    seconds = nodes * _HOLD_SECONDS_A_NODE
    return seconds if seconds >= _LEAST_HOLD else 0.0


class JointEntries:
    """The first agent's entries: the first is appended at once, the next one ``hold`` seconds later at the earliest.

    ``hold``: by default that of a job of so many ``nodes``.
    """

    def __init__(
        self, nodes: Mapping[int, Node], timers: Timers, append: Callable[[Event], None], hold: float | None = None
    ) -> None:
        self._nodes, self._timers, self._append = nodes, timers, append
        self._hold = hold_seconds(len(nodes)) if hold is None else hold
        self._parts: list[Part] = []
        self._next = 0.0
        """No entry is appended before."""

    def hear(self, node: int, epoch: int, body: bytes) -> None:
        """Take what the agent of ``node`` said. Raises :class:`ProtocolError` if it speaks for other ranks."""
        parts, ranks = _SAID.decode(body).parts, self._nodes[node].ranks
        if any((part.node, part.epoch) != (node, epoch) or not set(part.ranks()) <= set(ranks) for part in parts):
            raise ProtocolError(f"node {node} speaks for another one")
        self.take(parts)

    def take(self, parts: Sequence[Part]) -> None:
        """Append ``parts`` behind those before."""
        before, wait = bool(self._parts), self._next - self._timers.now()
        self._parts += parts
        if wait <= 0.0:
            self._flush()
        elif not before:
            self._timers.after(wait, self._flush)

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        for first in range(0, len(parts), _PARTS_OF_ENTRY):
            self._append(Together(tuple(parts[first : first + _PARTS_OF_ENTRY])))
        if parts:
            self._next = self._timers.now() + self._hold


class OwnEvents:
    """See the module docstring. ``append``: to the journal; ``say``: to the first agent, False without a connection.

    ``joint``: the entries of the first agent, used if it is this one.
    """

    def __init__(
        self,
        node: int,
        state: Generations,
        append: Callable[[Event], None],
        joint: JointEntries,
        say: Callable[[bytes], bool],
    ) -> None:
        self._node, self._state, self._journal, self._joint, self._say = node, state, append, joint, say
        self._unseen: deque[Part] = deque()
        self._told = False
        """True if the unseen parts were told to the first agent over the connection that there is now."""
        self._oldest: Part | None = None
        """The first part that was unseen at the last look."""

    def append(self, event: Event) -> None:
        """Have ``event`` in the journal, behind those of this node's ranks before if it is of that kind."""
        if not isinstance(event, _OWN):
            self._journal(event)
            return
        epoch = self._state.nodes[self._node].epoch
        if self._unseen and self._unseen[-1].epoch != epoch:
            self._unseen.clear()  # said in a life that is over
        number = self._unseen[-1].number if self._unseen else self._newest()
        part = Part(self._node, epoch, number + 1, event)
        self._unseen.append(part)
        if self._tell((part,) if self._told else tuple(self._unseen)):
            self._told = True
        elif self._told:
            self.way_lost()
        else:
            self._journal(Together((part,)))

    def seen(self) -> None:
        """Forget the parts that are in the journal. Call it behind each entry."""
        newest = self._newest()
        while self._unseen and self._unseen[0].number <= newest:
            self._unseen.popleft()

    def way_lost(self) -> None:
        """The first agent may not have heard what it was told: append all that is unseen."""
        self._told = False
        if self._unseen:
            self._journal(Together(tuple(self._unseen)))

    def look(self) -> None:
        """Append what has been unseen since the last look."""
        oldest = self._unseen[0] if self._unseen else None
        if oldest is not None and oldest is self._oldest and self._told:
            self.way_lost()
        self._oldest = oldest

    def _newest(self) -> int:
        return self._state.parts.newest(self._node)

    def _tell(self, parts: tuple[Part, ...]) -> bool:
        """Tell the first agent. False if there is no connection to it."""
        if self._node == FIRST:
            self._joint.take(parts)
            return True
        return self._say(told(parts))
