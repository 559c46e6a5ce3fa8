"""The membership of a job as a worker sees it: generations, decisions and losses.

A change of membership takes two phases. FREEZE(g): every survivor stops,
promises to act on no older generation, and hands in a report of what it holds
(one that asked for the change, or met the loss itself, has done so before).
DECIDE(g): one compare-and-set record that names the members and carries every
report, so that each process computes the same plan from the same bytes. A loss
before DECIDE(g) is FREEZE(g+1), and members report anew.

The control plane treats reports as opaque: what they mean is the business of
``state`` (versions, gradients) and ``plan``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

import msgspec

from megatron.elastic.comm.address import Address, Rank
from megatron.elastic.control.exits import Ending
from megatron.elastic.control.observations import DrawnTopology, ExpertLoads, Observation, Protection
from megatron.elastic.control.requests import Pending, Request, ReshapeState
from megatron.elastic.control.wire import Int64

__all__ = [
    "WAITING_FOR_RANKS",
    "Activity",
    "Committed",
    "Decision",
    "Loss",
    "Membership",
    "Reason",
    "Released",
    "RunFigures",
    "each_once",
]

Reason = Literal["start", "loss", "join", "drain", "reform"]
"""drain: some ranks leave; reform: no rank comes or goes, but a member has something to report that all must know."""


class Released(Exception):
    """The generation decided now goes on without this rank, as it was asked to: nothing is expected of it any more."""


class Loss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One lost incarnation and everything known of its end."""

    rank: Rank
    incarnation: Int64
    host: str
    cause: str
    """'signal SIGKILL', 'exit code 1', 'stopped', 'node unreachable', 'hung'"""
    last_lines: tuple[str, ...] = ()
    ending: Ending = Ending.KILLED


class Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decided generation; the same bytes in every process.

    ``members`` and ``text_of`` are in ascending order of rank, and every address is that of its rank; anything else
    raises ``ValueError``. Most ranks report the same, so each text is there once.
    """

    generation: Int64
    members: Mapping[Rank, Address]
    """Living ranks (parked ones included) → address."""
    reason: Reason
    lost: tuple[Loss, ...] = ()
    """Losses since the generation before."""
    joined: tuple[Rank, ...] = ()
    texts: tuple[str, ...] = ()
    """The different reports."""
    text_of: Mapping[Rank, Int64] = {}
    """Member → its report's place in ``texts``; absent for a joiner."""
    left_out: tuple[Int64, ...] = ()
    """Nodes whose lost ranks are not started again for now (:mod:`megatron.elastic.control.quarantine`)."""
    returning: tuple[Rank, ...] = ()
    """Ranks that are no members, but are being started or will be. No other rank is worth waiting for."""

    def __post_init__(self) -> None:
        for ranks in (self.members, self.text_of):
            if any(first >= second for first, second in pairwise(ranks)):
                raise ValueError(f"ranks {[*ranks]} are not in ascending order")
        if any(rank != address.rank for rank, address in self.members.items()):
            raise ValueError("a member has the address of another rank")
        if not all(0 <= number < len(self.texts) for number in self.text_of.values()):
            raise ValueError("a member has a report that is not there")

    @property
    def reports(self) -> dict[int, str]:
        """Member → the text of its report."""
        return {rank: self.texts[number] for rank, number in self.text_of.items()}


def each_once(reports: Mapping[int, str]) -> tuple[tuple[str, ...], dict[int, int]]:
    """Return the different texts of ``reports``, and rank → the place of its text (:class:`Decision`)."""
    places: dict[str, int] = {}
    text_of = {rank: places.setdefault(text, len(places)) for rank, text in reports.items()}
    return tuple(places), text_of


WAITING_FOR_RANKS = "waiting for ranks"
"""Phase of a member that can do nothing before lost ranks are back."""


@dataclass(frozen=True)
class Activity:
    """The present activity of a worker, published for hang detection."""

    step: int
    phase: str
    waiting_for: tuple[int, ...] = ()


@dataclass(frozen=True)
class Committed:
    """The newest committed step of a worker, published for users (``ctl status``). Nothing acts on it."""

    step: int
    target: int
    """The last step of the run; 0: not known."""
    samples: int
    """Samples consumed so far."""
    seconds: float
    """Duration of the step, recoveries in it included."""
    loss: float
    """The first value that the loss function reports; NaN: none."""


@dataclass(frozen=True)
class RunFigures:
    """Figures of the run so far, as an agent tells its workers for their logs. Nothing acts on them."""

    losses: int
    recoveries: int
    repeated_steps: int
    """Committed steps that were computed again."""
    tolerated_ranks: int
    """Any so many ranks may be lost at once without losing state."""
    tolerated_nodes: int
    short_blocks: int
    """State blocks that lack copies for now."""
    recovery_s: float
    """Seconds of all recoveries."""
    lost_s: float
    """Seconds lost by all causes, recoveries included."""
    unprotected_s: float
    """Seconds in which some block was short of a mirror."""
    goodput: float
    """NaN: not known yet."""
    lost_by_cause_s: tuple[float, ...]
    """The parts of :attr:`lost_s`, in the order of :data:`~megatron.elastic.control.observations.CAUSES`."""


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

    def suspect(self, rank: int, why: str, silent: tuple[int, ...] = ()) -> None:
        """Evidence against ``rank``: a broken link, a failed check. Not yet a loss.

        ``silent``: ranks whose hosts answered nothing.
        """

    def publish(self, activity: Activity) -> None:
        """Publish the activity of this worker and the ranks that it waits for. Cheap: a shared-memory write."""

    def committed(self, step: Committed) -> None:
        """Publish a committed step for users. Cheap: a shared-memory write."""

    def figures(self) -> RunFigures | None:
        """Return the newest figures of the run; None before the agent has told any. Cheap: a shared-memory read."""

    def draw(self, topology: DrawnTopology) -> None:
        """Tell this node's agent the cells, stages and mirrors from now on, for a page that draws them."""

    def expert_loads(self, loads: ExpertLoads) -> None:
        """Tell this node's agent the measured load of experts. Once in a while: one message."""

    def moving(self, text: str) -> None:
        """Tell this node's agent the layers that move between ranks from now on; empty: none any more."""

    def observe(self, what: Observation) -> None:
        """Have every agent know an event that users want to see. Rare: one message, one entry of the journal."""

    def pending(self) -> Pending:
        """Requests to honour at the next boundary."""

    def announce(self, text: str, protection: Protection) -> None:
        """Have every agent know what can be lost now, in one line and in numbers, for ``ctl status``."""

    def reshape_is(self, number: int, state: ReshapeState, text: str) -> None:
        """Have every agent know how the ``number``-th request for other sizes stands, in one line, for ``ctl``."""

    def request(self, what: Request) -> None:
        """Ask for a change at a boundary. See :class:`Request` for what each one begins."""

    def await_begin(self, timeout: float) -> None:
        """Wait until the control plane knows that every member has asked to BEGIN; at once from then on.

        Before that a loss starts all ranks anew, so a step that is committed earlier could be lost. Raises
        ``GenerationChanged`` when a newer generation is frozen meanwhile, ``CommTimeout`` after ``timeout`` seconds.
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
