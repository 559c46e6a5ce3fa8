"""The request for other parallel sizes, from the user's wish to its end: pure, a part of the agents' state machine.

One request is open at a time. It has a number, so that an answer to an earlier one ends nothing. It stays open until a
member tells that the sizes are in force or refused; a loss in between changes nothing about it. A job that begins anew
does so with the launch's sizes, so the sizes that were in force are then asked for again.
"""

from __future__ import annotations

import msgspec

from megatron.elastic.control.requests import OpenReshape, ParallelSizes, Reshape, ReshapeState

__all__ = ["Reshapes"]


class Reshapes(msgspec.Struct, forbid_unknown_fields=True):
    """The newest request, and the sizes in force. ``number``: of the newest request; 0: there was none."""

    number: int = 0
    asked: Reshape | None = None
    """The sizes that the newest request asked for."""
    state: ReshapeState = "open"
    text: str = ""
    """The newest line about it from a member."""
    in_force: Reshape | None = None
    """None: the launch's sizes."""

    @property
    def is_open(self) -> bool:
        """True if a request is neither carried out nor refused."""
        return self.asked is not None and self.state in ("open", "under way")

    @property
    def wanted(self) -> tuple[ParallelSizes, ...]:
        """The sizes in force and those that are asked for."""
        asked = self.asked if self.is_open else None
        return tuple(request.sizes for request in (self.in_force, asked) if request is not None)

    @property
    def ranks(self) -> int:
        """Number of ranks that they take; 0: those of the launch."""
        return max((sizes.ranks for sizes in self.wanted), default=0)

    def group(self, launch: int) -> int:
        """Return how many ranks are admitted together: a cell of ``launch`` ranks while no other size is wanted."""
        return launch if all(sizes.cell == launch for sizes in self.wanted) else 1

    def ask(self, sizes: Reshape) -> None:
        """Open a request, unless one is open."""
        if not self.is_open:
            self.number, self.asked, self.state, self.text = self.number + 1, sizes, "open", ""

    def told(self, number: int, state: ReshapeState, text: str) -> None:
        """A member told how request ``number`` stands."""
        if number == self.number and self.is_open:
            self.state, self.text = state, text
            if state == "in force":
                self.in_force = self.asked

    def begin_anew(self) -> None:
        """The job starts again, at the launch's sizes."""
        sizes, self.in_force = self.in_force, None
        if sizes is not None:
            self.ask(sizes)

    def pending(self, ranks: int) -> OpenReshape | None:
        """Return the open request for the members; ``ranks``: how many are members or will be."""
        if self.asked is None or not self.is_open:
            return None
        sizes = self.asked.sizes
        return OpenReshape(self.number, *sizes, hopeless=ranks < sizes.ranks)
