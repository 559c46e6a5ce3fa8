"""Errors of communication, as types.

``GenerationChanged`` is not a failure: it says that membership is being agreed
anew and that whatever was in flight is void. ``PeerLost`` is evidence, handed
to the control plane; only a decided generation makes a loss a fact.
"""

from __future__ import annotations

__all__ = ["BadMessage", "BarrierTimeout", "CommError", "CommTimeout", "GenerationChanged", "PeerLost"]


class CommError(RuntimeError):
    """Base of everything the communicator raises."""


class PeerLost(CommError):
    """The link to ``rank`` broke while something was in flight on it.

    ``heard``: another member's link did, and said so; this process's own stands. Then it
    is no evidence of its own: the rank that lost the link gives it. ``silent``: ranks, among
    them ``rank``, whose hosts answered nothing when links to them were opened.
    """

    def __init__(
        self, rank: int, why: str = "Connection closed by peer", heard: bool = False, silent: tuple[int, ...] = ()
    ) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank = rank
        self.why = why
        self.heard = heard
        self.silent = silent


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
        super().__init__(f"timed out after {seconds:.3g} s, the timeout here, waiting for ranks {list(waiting_for)}")
        self.seconds = seconds
        self.waiting_for = waiting_for


class BarrierTimeout(CommTimeout):
    """A monitored barrier without some ranks. ``leader`` names them; the others only know that it did not answer."""

    def __init__(self, rank: int, leader: int, seconds: float, waiting_for: tuple[int, ...]) -> None:
        super().__init__(seconds, waiting_for)
        late = f"Rank{'s' * (len(waiting_for) > 1)} {', '.join(map(str, waiting_for))}"
        milliseconds = round(seconds * 1000)
        self.args = (
            f"Rank {rank} timed out in monitoredBarrier after {milliseconds} ms: "
            f"{late} failed to pass monitoredBarrier in {milliseconds} ms"
            if rank == leader
            else f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
            f"from rank {leader}: no answer in {milliseconds} ms",
        )
