"""The generations of one job: a pure state machine over the journal.

Every agent applies the same events in the same order and so holds the same state. Nothing here reads a clock, a
socket or a random number. FREEZE(g) is no message: every agent derives it from an event (a loss, a complete request).
DECIDE(g) is the one event that names the journal position at which it must be appended, by compare-and-set. So it
cannot overtake a loss that was appended first.

Standing of a rank's present incarnation::

    starting ──report──▶ (fresh) ──DECIDE──▶ member ──▶ lost │ done
    waiting  ──join request of all members, DECIDE──▶ member

While there is no member (at the start, or after all were lost) the job is *fresh*. The next decision then waits for
every rank that can still arrive, and contains all that did. Otherwise a newcomer waits to be admitted.

Invariants (tests/unit/control/test_generation_orders.py walks all interleavings)
- ``decided ≤ frozen ≤ decided + number of changes since``; both only grow.
- A decision names no incarnation whose loss precedes it in the journal.
- A decision of generation g carries reports handed in for g, none older.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

import msgspec

from megatron.elastic.control.events import (
    Abandoned,
    Announced,
    Decided,
    Entry,
    Event,
    Examined,
    Finished,
    JobEnded,
    Lifted,
    Lost,
    NodeBack,
    NodeLost,
    Readmitted,
    Reformed,
    Reported,
    Requested,
    Reshaped,
    Together,
    Waiting,
    Wanted,
)
from megatron.elastic.control.exits import Ending
from megatron.elastic.control.membership import Decision, Loss, Reason, each_once
from megatron.elastic.control.nodes import Node, RankState, Standing
from megatron.elastic.control.parts import TakenParts
from megatron.elastic.control.quarantine import Quarantine
from megatron.elastic.control.requests import Drain, Pending, Request, Reshape, SaveCheckpoint, Stop, Wish
from megatron.elastic.control.reshapes import Reshapes

__all__ = ["Generations"]


class Generations(msgspec.Struct, forbid_unknown_fields=True, dict=True):
    """See the module docstring. ``nodes`` by node number; ``respawn``: lost ranks come again."""

    nodes: Mapping[int, Node]
    respawn: bool = True
    nominal: int = 0
    """Ranks of the launch; 0: all there are."""
    cell: int = 1
    """Size of a tensor-parallel group, whose ranks are consecutive. Used only where there are extra ranks."""
    quarantine: Quarantine = msgspec.field(default_factory=Quarantine)
    expects_nodes: bool = False
    """A lost node is expected to be replaced (--nnodes MIN:MAX), so its ranks are waited for."""
    reshapes: Reshapes = msgspec.field(default_factory=Reshapes)
    frozen: int = 1
    decided: int = 0
    decision: Decision | None = None
    reason: Reason = "start"
    ended: JobEnded | None = None
    ranks: dict[int, RankState] = {}
    """Made from ``nodes``, unless it is given."""
    reports: dict[int, Entry] = {}
    joiners: tuple[int, ...] = ()
    losses: list[Loss] = []
    drain: tuple[int, ...] | None = None
    """Ranks asked to leave; empty: the whole job."""
    announced: tuple[int, str] = (0, "")
    """(generation, the losses that it can survive), as its members told last."""
    stopping: bool = False
    """The drain of the whole job is for good: a user asked for it to stop."""
    enlisted: set[int] = set()
    """Extra ranks that are to compute although none of the launch is missing."""
    parts: TakenParts = msgspec.field(default_factory=TakenParts)
    _requests: dict[Request, set[int]] = {}
    _joining: bool = False
    """Newcomers wait to be admitted. Set until they are: a member that saw it must not wait for one that did not."""
    _checkpoint: bool = False
    """A checkpoint was asked for and is not begun."""
    _left: set[int] = set()
    _preparing: set[int] = set()
    """Ranks that said they have nothing yet that could outlive a loss."""
    _begun: set[int] = set()
    """Those of them that have something now. Each says so once, in any state of the agreement."""

    def __post_init__(self) -> None:
        slots = sorted(rank for node in self.nodes.values() for rank in node.ranks)
        if slots != list(range(len(slots))):
            raise ValueError(f"nodes must hold ranks 0 … {len(slots) - 1} once each, got {slots}")
        self.nominal = self.nominal or len(slots)
        if self.ranks:
            if list(self.ranks) != slots:
                raise ValueError(f"the state of ranks 0 … {len(slots) - 1} was expected, got {list(self.ranks)}")
            return
        self.ranks = {rank: RankState() for rank in slots}
        for node in self.nodes.values():
            if not node.alive:  # it may come later
                self.ranks.update((rank, RankState(-1, "lost", may_return=False)) for rank in node.ranks)

    # -- questions ----------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that belong to the decided generation and live, ascending."""
        return self._standing("member")

    @property
    def coming(self) -> tuple[int, ...]:
        """Members, and ranks that are being started or will be, ascending."""
        return tuple(sorted({*self.members, *self.returning()}))

    @property
    def fresh(self) -> bool:
        """No member is left that holds state: the next decision is a start."""
        return not self.members

    @property
    def quiet(self) -> bool:
        """No change is being agreed."""
        return self.frozen == self.decided

    @property
    def preparing(self) -> bool:
        """Some member has not begun: a loss now leaves no state to continue from, and all ranks start anew."""
        return any(self.ranks[rank].standing == "member" for rank in self._preparing)

    def expected(self) -> tuple[int, ...]:
        """Ranks whose report the next decision waits for; empty in quiet times."""
        if self.quiet:
            return ()
        if self.fresh:
            return tuple(rank for rank in range(self.nominal) if self._can_start(self.ranks[rank]))
        return tuple(sorted({*self.members, *self.joiners}))

    def missing(self) -> tuple[int, ...]:
        """Expected ranks that have not reported for the frozen generation."""
        return tuple(rank for rank in self.expected() if rank not in self.reports)

    def ready(self) -> bool:
        """DECIDE may be tried."""
        if self.quiet or self.ended is not None or len(self.reports) < (len(self.members) or self._starting):
            return False
        return bool(self.expected()) and not self.missing()

    def pending(self) -> Pending:
        """The requests that members should honour at their next boundary."""
        promised = () if self.decision is None else self.decision.returning
        out = self.quarantine.out() if promised else frozenset[int]()
        return Pending(
            join=self._joining,
            drain=self.drain == (),
            checkpoint=self._checkpoint,
            reform=self.quiet and not all(self._is_here_or_coming(rank, out) for rank in promised),
            leave=self.drain or (),
            reshape=self.reshapes.pending(len(self.coming)) if self.reshapes.is_open else None,
        )

    def coordinator(self) -> int | None:
        """The lowest living node: it decides."""
        return min((number for number, node in self.nodes.items() if node.alive), default=None)

    def node_of(self, rank: int) -> int:
        """The node that starts ``rank``."""
        return self._homes[rank]

    @cached_property
    def _homes(self) -> dict[int, int]:
        """Rank → the node that starts it. Places are given for the whole run."""
        return {rank: number for number, node in self.nodes.items() for rank in node.ranks}

    def returns(self, rank: int) -> bool:
        """True if ``rank``, once lost, is started again in the present state."""
        return self._may_return(rank, self.ranks[rank], self.quarantine.out())

    def returning(self) -> tuple[int, ...]:
        """Ranks that are no members, but are being started or will be, ascending."""
        out = self.quarantine.out()
        return tuple(rank for rank, state in self.ranks.items() if self._is_coming(rank, state, out))

    def _may_return(self, rank: int, state: RankState, out: Collection[int]) -> bool:
        return state.may_return and self.node_of(rank) not in out

    def _is_here_or_coming(self, rank: int, out: Collection[int]) -> bool:
        """``out``: nodes in quarantine; many ranks are asked for, and few nodes are there."""
        state = self.ranks[rank]
        return state.standing == "member" or self._is_coming(rank, state, out)

    def _is_coming(self, rank: int, state: RankState, out: Collection[int]) -> bool:
        if state.standing != "lost":
            return state.standing in ("starting", "waiting")
        replaced = self.expects_nodes and self.respawn and not self.nodes[self.node_of(rank)].alive
        return self._may_return(rank, state, out) or (replaced and state.incarnation >= 0)

    def over(self) -> bool:
        """The job is done, or no rank is left that could go on."""
        if self.ended is not None:
            return True
        if self.members:
            return False
        if self.decided and any(s.standing == "done" and r not in self._left for r, s in self.ranks.items()):
            return True
        return not any(self._can_start(self.ranks[rank]) for rank in range(self.nominal))

    def codes(self) -> tuple[int, ...]:
        """Exit codes of the ranks that finished."""
        return tuple(state.code for state in self.ranks.values() if state.standing == "done" and state.code is not None)

    # -- events -------------------------------------------------------------

    def events_of(self, entry: Event) -> Iterator[Event]:
        """Yield the events of the journal's next ``entry`` that count. Apply each before the next is asked for."""
        return self.parts.events(entry, self.nodes)

    def apply(self, event: Event) -> None:  # noqa: C901, PLR0912 - a case for each kind of event
        """Take the next event of the journal. Stale or senseless ones change nothing."""
        if self.ended is not None:
            return
        match event:
            case Lost():
                self._blame(event)
                self._lose(event.losses)
            case NodeLost():
                self._lose_node(event)
            case NodeBack():
                self._node_back(event)
            case Reported():
                self._report(event)
            case Waiting():
                self._wait(event.entries)
            case Requested():
                self._request(event)
            case Wanted():
                self._want(event.what)
            case Finished():
                self._finish(event)
            case Abandoned():
                for rank in event.ranks:
                    if rank in self.ranks:
                        self.ranks[rank].may_return = False
            case Readmitted():
                self._readmit(event.ranks)
            case Lifted():
                self.quarantine.lift(event.node, event.level, found=event.needed)
            case Examined() if event.node in self.nodes:
                self.quarantine.examined(event.node, event.finding)
            case Reformed():
                if event.generation == self.decided and self.quiet and not self.fresh:
                    self._freeze("loss")
            case Announced():
                if event.generation >= self.announced[0]:
                    self.announced = event.generation, event.text
            case Reshaped() if not self.fresh:  # else the members that told it are gone, and their sizes with them
                self.reshapes.told(event.number, event.state, event.text)
            case Decided():
                self._decide(event)
            case Together():
                for one in self.events_of(event):
                    self.apply(one)
            case JobEnded():
                self.ended = event
        if self.fresh:  # every rank is needed
            for node in self.quarantine.nodes:
                self.quarantine.lift(node)

    def _lose(self, losses: Sequence[Loss]) -> None:
        changed = False
        for loss in losses:
            state = self.ranks.get(loss.rank)
            if state is None or loss.incarnation < state.incarnation:
                continue
            # A rank that left unannounced is done, unless a member still needs it.
            missed = state.standing == "done" and not state.announced and not self.fresh
            if loss.incarnation == state.incarnation and state.standing in ("lost", "done") and not missed:
                continue
            counts = state.standing == "member" or loss.rank in self.joiners or missed
            changed |= counts and loss.incarnation == state.incarnation
            self._stand(state, "lost")
            state.incarnation, state.entry = loss.incarnation, None
            state.may_return = state.may_return and self.respawn
            self._preparing.discard(loss.rank)
            self._begun.discard(loss.rank)
            self.reports.pop(loss.rank, None)
            self.losses.append(loss)
        if changed:
            self._freeze("loss")

    def _blame(self, event: Lost) -> None:
        """Count members that ended by a fault of their own against their nodes."""
        for loss in event.losses:
            state = self.ranks.get(loss.rank)
            own = loss.ending in (Ending.KILLED, Ending.ERROR)  # else it followed from what happened elsewhere
            if own and state and state.standing == "member" and state.incarnation == loss.incarnation:
                self._count(self.node_of(loss.rank), event.at)

    def _count(self, node: int, at: float) -> None:
        if self.respawn and not self.preparing:
            self.quarantine.lost(node, [n for n, there in self.nodes.items() if there.alive and n != node], at)

    def lives(self, node: int, epoch: int) -> bool:
        """True while that agent, in that life, counts as living: several may report its end."""
        known = self.nodes.get(node)
        return known is not None and known.alive and known.epoch == epoch

    def _lose_node(self, event: NodeLost) -> None:
        if not self.lives(event.node, event.epoch):
            return
        node = self.nodes[event.node]
        node.alive = False
        if any(self.ranks[rank].standing == "member" for rank in node.ranks):
            self._count(event.node, event.at)
        living = [r for r in node.ranks if self.ranks[r].standing not in ("lost", "done")]
        losses = [Loss(rank, self.ranks[rank].incarnation, node.host, event.why) for rank in living]
        self._lose(losses)
        for rank in node.ranks:
            self.ranks[rank].may_return = False

    def _node_back(self, event: NodeBack) -> None:
        node = self.nodes.get(event.node)
        if node is None or node.alive or event.epoch <= node.epoch:
            return
        node.alive, node.epoch, node.host, node.agent = True, event.epoch, event.host, event.agent
        for rank in node.ranks:
            state = self.ranks[rank]
            state.may_return = self.respawn or state.incarnation < 0
            if state.incarnation < 0:
                self.enlisted.add(rank)

    def _report(self, event: Reported) -> None:
        if event.generation != self.frozen or self.quiet or self.fresh:
            return
        for entry in event.entries:
            state = self.ranks.get(entry.rank)
            if state and state.standing == "member" and state.incarnation == entry.address.incarnation:
                self.reports[entry.rank] = entry

    def _wait(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            state = self.ranks.get(entry.rank)
            incarnation = entry.address.incarnation
            if state is None or incarnation < state.incarnation:
                continue
            if incarnation == state.incarnation and state.standing not in ("starting", "waiting"):
                continue
            state.incarnation, state.entry = incarnation, entry
            if self.fresh and entry.rank < self.nominal:
                self._stand(state, "starting")
                self.reports[entry.rank] = entry
            else:
                self._stand(state, "waiting")
        self._call_for_joiners()

    def _request(self, event: Requested) -> None:
        what = event.what
        if what is Request.SETUP:
            self._preparing |= set(event.ranks) & self.ranks.keys()
            self._begun -= set(event.ranks)
            return
        if what is Request.BEGIN:
            self._begun |= set(event.ranks) & self._preparing
            if self._begun >= self._preparing & set(self.members):
                self._preparing.clear()
                self._begun.clear()
            return
        if event.generation != self.decided or not self.quiet or self.fresh:
            return
        asked = self._requests.setdefault(what, set())
        asked |= {rank for rank in event.ranks if self.ranks.get(rank, RankState()).standing == "member"}
        # Something went wrong on one member that all have to know of: no need to wait for the others.
        if asked >= set(self.members) or (what is Request.REFORM and asked):
            self._grant(what)

    def _grant(self, what: Request) -> None:
        """Do what every member has asked for."""
        match what:
            case Request.CHECKPOINT:
                self._checkpoint = False
                del self._requests[what]
            case Request.STAY:
                self.drain = None if self.drain else self.drain
                del self._requests[what]
            case Request.LEAVE if self.drain:
                self._freeze("drain")
            case Request.JOIN:
                self._freeze("join")
            case Request.REFORM:
                self._freeze("reform")

    def _want(self, wish: Wish) -> None:
        match wish:
            case Drain(ranks):
                leaving = {*(self.drain or ()), *(rank for rank in ranks if rank in self.ranks)}
                whole_job = not ranks or self.drain == () or leaving >= set(self.members)
                self.drain = () if whole_job else tuple(sorted(leaving))
            case Stop():
                self.drain, self.stopping = (), True
            case SaveCheckpoint():
                self._checkpoint = True
            case Reshape():
                self.reshapes.ask(wish)
                self._call_for_joiners()

    def _readmit(self, ranks: Sequence[int]) -> None:
        """Ranks that were given up, or asked to leave, may be started again; spares named are put to work."""
        self.enlisted |= {rank for rank in ranks if self.nominal <= rank and rank in self.ranks}
        for rank, state in self.ranks.items():
            if ranks and rank not in ranks:
                continue
            if rank in self._left:
                self._left.discard(rank)
                self._stand(state, "lost")
                state.code = None
            if state.standing == "lost":
                state.may_return = self.nodes[self.node_of(rank)].alive
                self.quarantine.lift(self.node_of(rank))
        self._call_for_joiners()

    def _finish(self, event: Finished) -> None:
        state = self.ranks.get(event.rank)
        if state is None or event.incarnation < state.incarnation or state.standing == "lost":
            return
        if state.standing == "member" and not self.quiet and not event.announced:
            # It belonged to the generation before and is not in the next: that one must say why.
            host = self.nodes[self.node_of(event.rank)].host
            self.losses.append(Loss(event.rank, event.incarnation, host, f"exit code {event.code}", ending=Ending.LEFT))
        self._stand(state, "done")
        state.incarnation, state.entry = event.incarnation, None
        state.code, state.announced = event.code, event.announced
        self.reports.pop(event.rank, None)
        self.joiners = tuple(rank for rank in self.joiners if rank != event.rank)

    def _decide(self, event: Decided) -> None:
        if event.generation != self.frozen or not self.ready():
            return
        leaving = set(self.drain or ()) if self.reason == "drain" else set()
        entries = {rank: self.reports[rank] for rank in sorted(self.reports) if rank not in leaving}
        self.decided = self.frozen
        for rank in entries:
            self._stand(self.ranks[rank], "member")
        for rank in leaving:
            self._stand(self.ranks[rank], "done")
            self.ranks[rank].may_return = False
        texts, text_of = each_once({rank: entry.report for rank, entry in entries.items() if rank not in self.joiners})
        self.decision = Decision(
            generation=self.frozen,
            members={rank: entry.address for rank, entry in entries.items()},
            reason=self.reason,
            lost=tuple(self.losses),
            joined=self.joiners,
            texts=texts,
            text_of=text_of,
            left_out=tuple(sorted(self.quarantine.out())),
            returning=self.returning(),
        )
        if leaving:
            self.drain = None
            self._left |= leaving
        self.losses, self.joiners, self.reports = [], (), {}
        if not self._wanted():
            self._joining = False
        self._call_for_joiners()

    # -- helpers --------------------------------------------------------------

    def _freeze(self, reason: Reason) -> None:
        self.frozen += 1
        self.reports, self.joiners = {}, ()
        self._requests.clear()
        self.reason = reason
        if self.fresh:
            # No rank that held state is left: the ranks that wait start the job anew.
            self.reason = "start"
            self.reshapes.begin_anew()
            for rank in self._standing("waiting"):
                state = self.ranks[rank]
                if rank < self.nominal:
                    self._stand(state, "starting")
                    if state.entry is not None:
                        self.reports[rank] = state.entry
        elif reason == "join" or (reason == "loss" and self.nominal < len(self.ranks)):
            self.joiners = self._wanted()
            for rank in self.joiners:
                entry = self.ranks[rank].entry
                if entry is not None:
                    self.reports[rank] = entry

    def _call_for_joiners(self) -> None:
        """Have members admit the wanted ranks at a boundary."""
        if not self.fresh and self._wanted():
            self._joining = True

    def _wanted(self) -> tuple[int, ...]:
        """Waiting ranks to admit, ascending: whole tensor-parallel groups, as many as the job is short of.

        A job of cells of another size than the launch's, or on its way there, admits ranks one by one.
        """
        waiting = self._standing("waiting")
        if self.nominal == len(self.ranks):
            return waiting
        size, groups = self.reshapes.group(self.cell), dict[int, list[int]]()
        for rank in (*self.members, *waiting):
            groups.setdefault(rank // size, []).append(rank)
        whole = [ranks for _, ranks in sorted(groups.items()) if len(ranks) == size]
        here = sum(all(self.ranks[rank].standing == "member" for rank in ranks) for ranks in whole)
        short = max(self.nominal + len(self.enlisted), self.reshapes.ranks) // size - here
        chosen = [ranks for ranks in whole if any(rank in waiting for rank in ranks)][: max(0, short)]
        return tuple(sorted(rank for ranks in chosen for rank in ranks if rank in waiting))

    def _standing(self, standing: Standing) -> tuple[int, ...]:
        """Return the ranks of this standing, ascending."""
        return self._by_standing.get(standing, ())

    @cached_property
    def _by_standing(self) -> dict[Standing, tuple[int, ...]]:
        """Standing → its ranks. Each event asks for members several times, and few events change them."""
        found: dict[Standing, list[int]] = {}
        for rank, state in self.ranks.items():
            found.setdefault(state.standing, []).append(rank)
        return {standing: tuple(ranks) for standing, ranks in found.items()}

    @cached_property
    def _starting(self) -> int:
        """Number of ranks of the launch that are being started; a start waits for all of them."""
        return sum(rank < self.nominal for rank in self._standing("starting"))

    def _stand(self, state: RankState, standing: Standing) -> None:
        """Change a rank's standing; no other code does."""
        if state.standing != standing:
            state.standing = standing
            self.standings_changed()

    def standings_changed(self) -> None:
        """Forget which ranks are of which standing: :attr:`ranks` is other than it was."""
        vars(self).pop("_by_standing", None)
        vars(self).pop("_starting", None)

    def _can_start(self, state: RankState) -> bool:
        if state.standing == "lost":
            return state.may_return
        return state.standing in ("starting", "waiting")
