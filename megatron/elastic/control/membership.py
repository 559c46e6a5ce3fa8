"""Who is here: the worker's view of generations.

A change of membership takes two phases. FREEZE(g): every survivor stops,
promises to act on no older generation, and hands in a report of what it holds
(who asked for the change, or met the loss itself, has done so before).
DECIDE(g): one compare-and-set record that names the members and carries every
report, so that each process computes the same plan from the same bytes. A loss
before DECIDE(g) is FREEZE(g+1), and members report anew.

The control plane treats reports as opaque: what they mean is the business of
``state`` (versions, gradients) and ``plan``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from megatron.elastic.comm.fabric import Address

__all__ = ["WAITING_FOR_RANKS", "Activity", "Decision", "Ending", "Loss", "Membership", "Released"]

Reason = Literal["start", "loss", "join", "drain", "reform"]
"""drain: some ranks leave; reform: nobody comes or goes, but a member has something to report that all must know."""


class Released(Exception):
    """The generation decided now goes on without this rank, as it was asked to: nothing is expected of it any more."""


Ending = Literal["killed", "error", "communication", "left", "fall back", "begin anew"]
"""Why an incarnation was lost.

killed: from outside, by a signal, its agent or the loss of its node; error: by an error of its own; communication:
by an error that the end of another process causes, or by a library that locked up; left: with exit code 0, though it
had not said that it was done; fall back: it cannot get past its
step, and asks for the last checkpoint; begin anew: it had nothing to go on from, or to join.
"""


@dataclass(frozen=True)
class Loss:
    """One lost incarnation and everything known of its end."""

    rank: int
    incarnation: int
    host: str
    cause: str
    """'signal SIGKILL', 'exit code 1', 'stopped', 'node unreachable', 'hung'"""
    last_lines: tuple[str, ...] = ()
    ending: Ending = "killed"


@dataclass(frozen=True)
class Decision:
    """A decided generation; the same bytes in every process."""

    generation: int
    members: Mapping[int, Address]
    """Living ranks (parked ones included) → address."""
    reason: Reason
    lost: tuple[Loss, ...] = ()
    """Losses since the generation before."""
    joined: tuple[int, ...] = ()
    reports: Mapping[int, str] = field(default_factory=dict)
    """What each member handed in (text); absent for a joiner."""
    left_out: tuple[int, ...] = ()
    """Nodes whose lost ranks are not started again for now (:mod:`megatron.elastic.control.quarantine`)."""
    returning: tuple[int, ...] = ()
    """Ranks that are no members, but are being started or will be. Nobody need wait for any other."""


WAITING_FOR_RANKS = "waiting for ranks"
"""Phase of a member that can do nothing before lost ranks are back."""


@dataclass(frozen=True)
class Activity:
    """What a worker is doing, published for hang detection."""

    step: int
    phase: str
    waiting_for: tuple[int, ...] = ()


class Membership(Protocol):
    """A worker's handle on the control plane."""

    rank: int
    incarnation: int
    slots: int

    def start(self, on_freeze: Callable[[int], None]) -> None:
        """Begin listening. ``on_freeze(g)`` runs on the control thread and must return at once."""

    def frozen(self) -> int:
        """Newest generation seen frozen; equals the newest decided one in quiet times."""

    def decide(self, address: Address, report: str, timeout: float) -> Decision:
        """Promise, hand in ``report`` for the newest frozen generation, wait for DECIDE.

        In quiet times the report is for the next generation, whatever that will be about: what is
        said must stay true until this returns. Raises ``GenerationChanged`` when yet a newer one is
        frozen meanwhile: call again with what is held *then*. The first call of a life joins
        generation 1 (or, for a respawned worker, waits to be admitted).
        """

    def overlooked(self) -> tuple[Loss, ...]:
        """Losses of decisions that a newer FREEZE overtook before :meth:`decide` returned them; each once."""

    def suspect(self, rank: int, why: str) -> None:
        """Evidence against ``rank``: a broken link, a failed check. Not yet a loss."""

    def publish(self, activity: Activity) -> None:
        """Say what this worker does and for whom it waits. Cheap: a shared-memory write."""

    def pending(self) -> tuple[str, ...]:
        """Requests to honour at the next boundary: 'join', 'drain', 'checkpoint', 'leave:4,5' (these ranks).

        'reform' concerns a member that waits for ranks: some that were to return will not, so it asks for a decision
        that says which.
        """

    def announce(self, text: str) -> None:
        """Have every agent know what can be lost now, in one line, for ``ctl status``."""

    def request(self, what: str) -> None:
        """Ask for a change at a boundary ('join', 'leave'): FREEZE follows when every member has asked.

        'reform' freezes at once; 'checkpoint' and 'stay' take such a wish back once every member has asked.
        'setup' says that nothing is held here yet that could outlive a loss: until every
        member has asked to 'begin', a loss starts everybody anew.
        """

    def drain(self) -> None:
        """Pass on a signal that asks this process to end: the whole job saves and ends at the next boundary."""

    def give_up(self, code: int, why: str) -> None:
        """End the job, all ranks of it, with exit status ``code`` and one line."""

    def fence(self) -> None:
        """End this process if the lease of its node has run out: the others may have replaced it.

        To be called directly before a change of something that outlives the process, such as a file's name.
        """

    def finish(self, code: int) -> None:
        """This worker is about to exit with ``code`` on purpose: its end is not a loss."""
