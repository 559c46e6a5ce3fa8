"""One movement after the other, as one rank takes part in them (the stages are those of :mod:`movement`).

    begin    at a boundary; its streams run beside the steps
    switch   at the boundary after the vote in which all were ready: everybody stands on the target
    retire   with the first vote there: the copies that were to go are gone
    forget   the generation ended before: what was in force still is

Between switch and retire nobody may conclude from its own memory which placement
holds (:mod:`basis`); ``reassigned`` then tells the others that parameters here are those
of units that may have to change back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.elastic.engine.movement import Moved, Movement, Streams
from megatron.elastic.engine.position import Position
from megatron.elastic.engine.proofs import Proofs
from megatron.elastic.state.transfer import commit, retire

__all__ = ["Mover"]

_WINDOW_BYTES = 64 << 20
"""Gradients kept for copies under way to one rank, before blocks are given up and sent again later."""


class Mover:
    """Belongs to the training thread; every method but ``forget`` is called at the same place on every rank."""

    def __init__(self, position: Position, proofs: Proofs) -> None:
        self._position = position
        self._proofs = proofs
        self.reassigned = False
        """Units have changed place, and no vote has confirmed it yet: after a loss they are where they were before,
        and everybody's parameters are gathered anew."""
        self.due = False
        """All ranks are ready: the movement ends at the next boundary."""
        self._streams: Streams | None = None
        """The movement under way."""
        self._leaving: Movement | None = None
        """A movement whose new placement no vote has confirmed yet: old copies are still here."""
        self._begun = 0
        """Movements of this generation."""
        self._abandoned: list[Streams] = []
        """Kept until the next edit has made sure that nobody writes into their buffers."""
        self._arrived = 0

    @property
    def under_way(self) -> bool:
        """Whether a movement has begun that has not come to its switch."""
        return self._streams is not None

    @property
    def at_rest(self) -> bool:
        """Whether nothing moves and no copy is about to go."""
        return self._streams is None and self._leaving is None

    @property
    def ready(self) -> bool:
        """Whether this rank's part is all but done. Raises what a stream ran into."""
        return self._streams is not None and self._streams.ready

    @property
    def bytes_received(self) -> int:
        """Bytes of state received in added copies so far, used or not."""
        return self._arrived + (0 if self._streams is None else self._streams.bytes_received)

    def begin(self, movement: Movement) -> bool:
        """Start ``movement`` in the background; with none under way. False where there is nothing to do."""
        if self._streams is not None:
            raise RuntimeError("a movement is under way")
        at = self._position
        if not movement.changes and movement.target.assignment == at.standing.assignment:
            return False
        self._begun += 1
        units = movement.target.assignment.units_of(at.tools.fabric.rank)
        threading.Thread(target=at.tools.arena.prepare, args=(units,), name="elastic-arena", daemon=True).start()
        self._streams = Streams(movement, at.tools.pool, at.tools.fabric, self._begun, _WINDOW_BYTES)
        at.tools.reach("in_movement_begin", at.record.version)
        return True

    def voted(self, due: bool) -> None:
        """The vote of a step is known; ``due``: all were ready, and the movement ends at the boundary after it."""
        self.due = due
        if due and self._streams is not None:
            self._streams.hurry()

    def switch(self) -> Moved:
        """At a boundary that all ranks agreed on: the new placement is in force from here, unless somebody is lost.

        Raises ``CommError``: the generation ends, and the old placement with it is in force.
        """
        self.due = False  # no phase of its own: whoever was kept from it by a loss does not come back to it
        streams, at, began = self._under_way(), self._position, time.monotonic()
        movement, version, before = streams.movement, at.record.version, at.standing.assignment
        seconds = dict[str, float]()
        with _timed(seconds, "finish"):
            self._bring_up()
        with _timed(seconds, "stand"):
            self._change_over()
        gained = movement.target.assignment.gained(before) if self.reassigned else {}
        with _timed(seconds, "parameters"):
            if gained:
                at.body.gather_gained(version, gained)
        with _timed(seconds, "certificate"):
            came = frozenset[int]().union(*gained.values())
            moved = {change.block for change in movement.changes if change.kind != "drop"}
            moved |= {key for key in movement.target.placement.copies if key[0] in came}
            self._proofs.certify("movement", moved)
        at.tools.reach("in_movement_switch", version)
        return Moved(movement, streams.bytes_received, began - streams.began, seconds)

    def house(self) -> None:
        """Blocks that only ranks elsewhere kept come to those who compute their units, now: nobody can go on before."""
        recovery, standing = self._position.recovery, self._position.standing
        if recovery.homeless(standing):
            self.begin(recovery.movement(standing))
            self._bring_up()
            self._change_over()

    def confirm(self) -> None:
        """A vote was taken under the present placement: copies it does not name go."""
        at = self._position
        at.history.confirm(at.standing.basis)
        at.tools.pool.absolve()
        movement, self._leaving, self.reassigned = self._leaving, None, False
        if movement is not None:
            retire(at.tools.pool, movement.changes)
            at.stand_on(movement.target, {})

    def forget(self) -> None:
        """The generation ends: what is under way is begun anew in the next one, or not at all. Idempotent."""
        if self._streams is not None:
            self._streams.abandon()
            self._arrived += self._streams.bytes_received
            self._abandoned.append(self._streams)
        self._streams, self._leaving, self.due = None, None, False
        self._position.tools.arena.spare = None

    def renew(self) -> None:
        """The next generation's links are edited: nothing of the last one writes here any more."""
        self._abandoned.clear()
        self._begun = 0

    def _bring_up(self) -> None:
        """What moves is brought to the present version."""
        streams, at = self._under_way(), self._position
        at.tools.publish("movement", streams.peers)
        at.tools.reach("in_movement_finish", at.record.version)
        streams.finish(at.record.version)

    def _change_over(self) -> None:
        """The target of what moved is what the next step is taken under."""
        streams, at = self._under_way(), self._position
        commit(at.tools.pool, streams.movement.changes, streams.received, at.record.version)
        streams.abandon()
        self._arrived += streams.bytes_received
        self._streams, self._leaving = None, streams.movement
        self.reassigned = streams.movement.target.assignment != at.standing.assignment
        at.stand_on(streams.movement.target, streams.movement.followers())

    def _under_way(self) -> Streams:
        if self._streams is None:
            raise RuntimeError("no movement is under way: ranks are counted ready only while something moves")
        return self._streams


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds[name] = time.monotonic() - began
