"""Errors of communication, as types.

``GenerationChanged`` is not a failure: it says that membership is being agreed
anew and that whatever was in flight is void. ``PeerLost`` is evidence, handed
to the control plane; only a decided generation makes a loss a fact.
"""

from __future__ import annotations

__all__ = ["BadMessage", "CommError", "CommTimeout", "GenerationChanged", "PeerLost"]


class CommError(RuntimeError):
    """Base of everything the communicator raises."""


class PeerLost(CommError):
    """The link to ``rank`` broke while something was in flight on it.

    ``heard``: another member's link did, and said so; this process's own stands. Then it
    is no evidence of its own: the rank that lost the link gives it.
    """

    def __init__(self, rank: int, why: str = "connection lost", heard: bool = False) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank = rank
        self.why = why
        self.heard = heard


class GenerationChanged(CommError):
    """A newer generation was frozen; the caller's work belongs to an older one."""

    def __init__(self, generation: int) -> None:
        super().__init__(f"generation {generation} is being agreed")
        self.generation = generation


class BadMessage(CommError):
    """``rank`` sent a value that is not of the expected message type."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} sent {why}")
        self.rank = rank
        self.why = why


class CommTimeout(CommError):
    """Nothing arrived within the time allowed; says from whom."""

    def __init__(self, seconds: float, waiting_for: tuple[int, ...] = ()) -> None:
        super().__init__(f"no answer within {seconds:.3g} s from ranks {list(waiting_for)}")
        self.seconds = seconds
        self.waiting_for = waiting_for
