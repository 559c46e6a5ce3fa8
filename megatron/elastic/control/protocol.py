"""The worker's half of the control plane's protocol, apart from how messages travel.

FREEZE and DECIDE come as messages of this node's agent (:meth:`WorkerProtocol.handle`), on whatever thread listens to
it. A FREEZE is noted, passed on to ``on_freeze``, and wakes whatever waits in :meth:`WorkerProtocol.decide`, which
belongs to the training thread. What a worker says is ordered by the channel that carries it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import msgspec

from megatron.elastic.comm.address import Address
from megatron.elastic.comm.errors import CommTimeout, GenerationChanged
from megatron.elastic.control.membership import Activity, Committed, Decision, Loss, Released, RunFigures
from megatron.elastic.control.messages import (
    Ask,
    Begun,
    Decide,
    Drawn,
    End,
    Finish,
    Freeze,
    FromWorker,
    GiveUp,
    Hello,
    MeasuredLoads,
    Members,
    Moving,
    Observed,
    PendingChanged,
    Promise,
    Release,
    ReshapeNews,
    Suspicion,
    ToleranceText,
    ToWorker,
)
from megatron.elastic.control.observations import DrawnTopology, ExpertLoads, Observation, Protection
from megatron.elastic.control.requests import Pending, Request, ReshapeState
from megatron.elastic.control.wire import printable
from megatron.elastic.platform.threads import OS_THREADS, Threads

__all__ = ["WorkerProtocol"]


class WorkerProtocol(ABC):
    """:class:`megatron.elastic.control.membership.Membership` over messages to and from an agent."""

    def __init__(
        self,
        rank: int,
        incarnation: int,
        slots: int,
        host: str,
        newcomer: bool = False,
        domain: str = "",
        threads: Threads = OS_THREADS,
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.slots = slots
        self.host = host
        """This node's name, for :class:`Address`; two agents on one machine have two."""
        self.domain = domain
        """This node's failure domain, for :class:`Address`."""
        self.newcomer = newcomer
        """The job ran already when this process was started: :meth:`decide` waits to be admitted."""
        self._threads = threads
        self._changed = threads.condition()
        self._frozen = 0
        self._decided = 0
        self._decision: Decision | None = None
        self._returned = 0
        """Generation of the decision that was last returned."""
        self._overlooked: tuple[Loss, ...] = ()
        self._pending = Pending()
        self._released = False
        self._begun = False
        """The agents know that every member has begun."""
        self._on_freeze: Callable[[int], None] | None = None
        self._on_members: Callable[[Mapping[int, Address]], None] | None = None

    # -- how messages travel ----------------------------------------------------

    @abstractmethod
    def _listen(self) -> None:
        """Begin to pass what the agent says to :meth:`handle`, in order."""

    @abstractmethod
    def _send(self, message: FromWorker) -> None:
        """Tell the agent."""

    @abstractmethod
    def _end(self, code: int, why: str) -> None:
        """The agent wants this process to end."""

    @abstractmethod
    def publish(self, activity: Activity) -> None:
        """See :meth:`Membership.publish`."""

    @abstractmethod
    def committed(self, step: Committed) -> None:
        """See :meth:`Membership.committed`."""

    @abstractmethod
    def figures(self) -> RunFigures | None:
        """See :meth:`Membership.figures`."""

    @abstractmethod
    def drain(self) -> None:
        """See :meth:`Membership.drain`."""

    @abstractmethod
    def fence(self) -> None:
        """See :meth:`Membership.fence`."""

    # -- Membership -----------------------------------------------------------

    def start(self, on_freeze: Callable[[int], None]) -> None:
        """See :meth:`Membership.start`. Must be called before :meth:`decide`; once, by the thread that trains."""
        if self._on_freeze is not None:
            raise RuntimeError(f"{type(self).__name__}.start was called twice")
        self._on_freeze = on_freeze
        self._listen()
        self._send(Hello())

    def frozen(self) -> int:
        """See :meth:`Membership.frozen`."""
        return self._frozen

    def decide(self, address: Address, report: str, timeout: float) -> Decision:
        """See :meth:`Membership.decide`.

        Raises ``CommTimeout`` after ``timeout`` seconds, ``Released`` when this rank was asked to leave and the
        others go on without it.
        """
        if self._on_freeze is None:
            raise RuntimeError("call start() before decide()")
        end = self._threads.monotonic() + timeout
        with self._changed:
            known = self._returned
            # In quiet times for the next generation, whatever it will be about: this thread holds the same until then.
            promised = 0 if self._decided == 0 else max(self._frozen, known + 1)
        # The node's name and domain; where a transport listens is in its endpoint.
        here = msgspec.structs.replace(address, host=self.host, domain=self.domain)
        self._send(Promise(promised, here, report))
        with self._changed:
            while True:
                if self._released:
                    raise Released
                if self._decided > known and self._decision is not None and self._decided == self._frozen:
                    self._returned = self._decided
                    return self._decision
                # For a rank that waits to be admitted, generations without it do not count.
                if self._frozen > promised and self._decided > 0:
                    raise GenerationChanged(self._frozen)
                left = end - self._threads.monotonic()
                if left <= 0:
                    raise CommTimeout(timeout)
                self._changed.wait(left)

    def overlooked(self) -> tuple[Loss, ...]:
        """See :meth:`Membership.overlooked`."""
        with self._changed:
            losses, self._overlooked = self._overlooked, ()
        return losses

    def suspect(self, rank: int, why: str, silent: tuple[int, ...] = ()) -> None:
        """See :meth:`Membership.suspect`."""
        self._send(Suspicion(rank, self._frozen, printable(why), silent))

    def pending(self) -> Pending:
        """See :meth:`Membership.pending`."""
        return self._pending

    def request(self, what: Request) -> None:
        """See :meth:`Membership.request`."""
        self._send(Ask(what, self._decided))

    def await_begin(self, timeout: float) -> None:
        """See :meth:`Membership.await_begin`."""
        if self._begun:
            return
        end = self._threads.monotonic() + timeout
        with self._changed:
            while not self._begun:
                if self._frozen > self._decided:
                    raise GenerationChanged(self._frozen)
                left = end - self._threads.monotonic()
                if left <= 0:
                    raise CommTimeout(timeout)
                self._changed.wait(left)

    def announce(self, text: str, protection: Protection) -> None:
        """See :meth:`Membership.announce`."""
        self._send(ToleranceText(self._decided, printable(text), protection))

    def reshape_is(self, number: int, state: ReshapeState, text: str) -> None:
        """See :meth:`Membership.reshape_is`."""
        self._send(ReshapeNews(number, state, printable(text)))

    def draw(self, topology: DrawnTopology) -> None:
        """See :meth:`Membership.draw`."""
        self._send(Drawn(topology))

    def expert_loads(self, loads: ExpertLoads) -> None:
        """See :meth:`Membership.expert_loads`."""
        self._send(MeasuredLoads(loads))

    def moving(self, text: str) -> None:
        """See :meth:`Membership.moving`."""
        self._send(Moving(printable(text)))

    def observe(self, what: Observation) -> None:
        """See :meth:`Membership.observe`."""
        self._send(Observed(what))

    def give_up(self, code: int, why: str) -> None:
        """See :meth:`Membership.give_up`."""
        self._send(GiveUp(code, printable(why)))

    def finish(self, code: int) -> None:
        """See :meth:`Membership.finish`."""
        self._send(Finish(code))

    # -- beyond the protocol of members --------------------------------------------

    def watch_members(self, on_members: Callable[[Mapping[int, Address]], None]) -> None:
        """While this process waits to be admitted, be told the members, and again when they change.

        ``on_members`` runs on the control thread and must return at once.
        """
        self._on_members = on_members

    # -- what the agent says ---------------------------------------------------------

    def handle(self, message: ToWorker) -> None:
        """Take one message of the agent."""
        match message:
            case Freeze(generation):
                self._freeze(generation)
            case Decide(decision):
                self._take(decision)
            case Members(members):
                if self._on_members is not None:
                    self._on_members(members)
            case PendingChanged(pending):
                self._pending = pending
            case Begun():
                with self._changed:
                    self._begun = True
                    self._changed.notify_all()
            case Release():
                with self._changed:
                    self._released = True
                    self._changed.notify_all()
            case End(code, why):
                self._end(code, why)

    def _take(self, decision: Decision) -> None:
        with self._changed:
            if self._decision is not None and self._decided > self._returned:
                self._overlooked += self._decision.lost
            self._decision, self._decided = decision, decision.generation
            self._frozen = max(self._frozen, decision.generation)
            self._changed.notify_all()

    def _freeze(self, generation: int) -> None:
        if generation <= self._frozen:
            return
        with self._changed:
            self._frozen = generation
        # The callback first: it wakes communication. A thread that waits in decide() has time.
        if self._on_freeze is not None:
            self._on_freeze(generation)
        with self._changed:
            self._changed.notify_all()
