"""One node's agent: joins the journal's truth with the workers' processes.

Everything it hears from its workers becomes an event in the journal, and
everything it does to them follows from the state after an entry of the journal
(:class:`Generations`), so all agents act alike. It never waits: not for a worker,
not for the store.

The lowest living agent coordinates: it alone tries DECIDE, rules on suspicions and
hangs, and counts losses. Its successor needs nothing from it but the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from megatron.elastic.control.clock import JobClock
from megatron.elastic.control.events import (
    Abandoned,
    Condemned,
    Decided,
    Event,
    JobEnded,
    Lost,
    NodeBack,
    NodeLost,
    Readmitted,
    Suspected,
)
from megatron.elastic.control.exits import Ending, ExitCode
from megatron.elastic.control.failures import Failures, exit_status
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.history import JobHistory
from megatron.elastic.control.journal import BEGIN
from megatron.elastic.control.membership import Loss
from megatron.elastic.control.messages import End, FromWorker
from megatron.elastic.control.quarantine import Quarantine
from megatron.elastic.control.store import StoreLost
from megatron.elastic.control.timing import Timing
from megatron.elastic.launch.agent.admin import Sources
from megatron.elastic.launch.agent.agent_place import AgentPlace
from megatron.elastic.launch.agent.display import Display
from megatron.elastic.launch.agent.ending_signals import EndingSignals
from megatron.elastic.launch.agent.hang_arbiter import HangArbiter
from megatron.elastic.launch.agent.journal_io import JournalIO
from megatron.elastic.launch.agent.journal_trimming import JournalTrimming
from megatron.elastic.launch.agent.loop import Loop
from megatron.elastic.launch.agent.losses import classify, input_error
from megatron.elastic.launch.agent.node_conditions import NodeConditions
from megatron.elastic.launch.agent.node_leases import NodeLeases, Table
from megatron.elastic.launch.agent.notify_workers import notify_worker
from megatron.elastic.launch.agent.old_run import PlaceWait
from megatron.elastic.launch.agent.own_events import FIRST, JointEntries, OwnEvents
from megatron.elastic.launch.agent.presence import Presence
from megatron.elastic.launch.agent.quarantines import Quarantines
from megatron.elastic.launch.agent.rendezvous import JobMembers
from megatron.elastic.launch.agent.respawn import Respawn
from megatron.elastic.launch.agent.watch import Watch
from megatron.elastic.launch.agent.worker_messages import WorkerMessages
from megatron.elastic.launch.arguments import JobSpec
from megatron.elastic.launch.messages import say
from megatron.elastic.launch.workers.logs import WorkerLogs
from megatron.elastic.launch.workers.node_workers import NodeWorkers
from megatron.elastic.launch.workers.pool import Pool, Worker
from megatron.elastic.launch.workers.processes import process_state
from megatron.elastic.launch.workers.spawn import Spawner

__all__ = ["Agent"]

_LEAVE_SECONDS = 5.0
_FIRST_RANK_SECONDS = 3.0
"""Time for the first rank to report a fault of the input: all ranks find the same one, and it alone reports it."""


class Agent:
    """See the module docstring. ``pool`` may be preloading already."""

    def __init__(self, job: JobSpec, loop: Loop, pool: Pool, members: JobMembers) -> None:
        self.job, self.members = job, members
        self.node = members.node
        self.timing = Timing.derive(job.settings.detection_timeout, job.setup_seconds)
        self.clock = JobClock()
        self.exit_code: int | None = None
        self._loop, self._pool = loop, pool
        self._mine = members.nodes[self.node]
        # The journal, and the state that follows from it.
        quarantine = Quarantine(job.settings.quarantine_after, self.timing.quarantine)
        self.state = Generations(
            members.nodes, job.settings.respawn, members.nominal, job.cell, quarantine, job.least < job.nodes
        )
        self._failures = Failures(job.settings.max_losses_per_hour)
        self._history = JobHistory()
        self._journal_io = JournalIO(
            loop, members.store, members.signer, self._deliver, self._store_lost, self._left_behind
        )
        joint = self._joint_entries = JointEntries(members.nodes, loop, self._journal_io.append)
        self._own_events = OwnEvents(self.node, self.state, self._journal_io.append, joint, self._say)
        self.append = self._own_events.append
        # Sources of events: messages of workers, leases of other nodes, hangs, commands of users.
        self._worker_messages = WorkerMessages(
            self.state, self._mine.ranks, self.append, self._worker_opened, self._leaving, self.clock.now
        )
        self._watch = Watch(self.timing, lambda worker: self._pool.kill(worker, "stopped"))
        place = AgentPlace(self.node, members.agent, members.nodes, members.store, members.signer, self.timing, loop)
        self._place_wait = PlaceWait(
            place, job.run_id, lambda: self._active or self.exit_code is not None, stop=self._stop
        )
        self._leases: NodeLeases | None = None
        self._presence: Presence | None = None
        if len(members.nodes) > 1:
            leases = self._leases = NodeLeases(place, self._extend_leases, self._node_lost, self.clock.hear)
            hear, broken = self._joint_entries.hear, self._own_events.way_lost
            self._presence = Presence(place, leases.doubt, leases.trust, hear, broken)
        self._hang_arbiter = HangArbiter(self.state, self.timing, loop, self.clock, self.append)
        self._sources = Sources(
            job.run_id,
            self.state,
            self._history,
            self.clock,
            table=self._table_now,
            pids=self._pids,
            moving=self._worker_messages.moving,
            topology=lambda: self._worker_messages.topology,
            expert_loads=lambda: self._worker_messages.expert_loads,
        )
        self._display = Display(job, loop, self.node, self._sources, self.append)
        self._ending_signals = EndingSignals(job, loop, pool, self.append, self.table, self._stop)
        # Consequences of the state: workers are started, the journal is trimmed.
        self._logs = WorkerLogs(job, self._mine.ranks)
        self._spawner = Spawner(job, members, pool, self._logs)
        workers = NodeWorkers(pool, self._spawner, self._history)
        self.by_rank = workers.by_rank
        self._respawn = Respawn(self.node, self.state, self._failures, workers, loop, self.timing, self.append)
        self._quarantines = Quarantines(self.node, self.state, self.clock, self._respawn.start_lost, self.append)
        self._conditions = NodeConditions(job.settings, self.timing, self.node, self.state, loop, self.append)
        seen = {} if self._leases is None else self._leases.seen
        self._journal_trimming = JournalTrimming(
            members.store, members.signer, self.node, self.state, self._failures, self._history, seen
        )
        self._active = not members.returning
        self._start_workers: Callable[[], None] | None = None
        """Starts this node's workers; waits for the node's lease."""
        self._next_position = 0
        self._tried_position = -1
        self._back_asked = 0
        """Life for which this node has asked for its place."""

    # -- life -------------------------------------------------------------------

    def run(self) -> int:
        """Start the workers, serve until the job is over, return its exit code."""
        self._ending_signals.listen()
        self._catch_up()
        self._journal_trimming.start()
        self._conditions.start()
        self._loop.every(self.timing.look, self._look)
        self._loop.every(self.timing.beat, self._beat)
        self._loop.every(self.timing.lease, self._own_events.look)
        if self._active:
            self._show_up()
            self._start_when_leased(lambda rank: 0)
        else:
            self._place_wait.start()
            self._return(None)
        self._loop.run()
        self._leave()
        return self.exit_code if self.exit_code is not None else ExitCode.STATE_LOST

    def _look(self) -> None:
        workers = self._pool.workers.values()
        self._watch.look(w for w in workers if not w.ended and (w.elastic or self.job.elastic))

    def _beat(self) -> None:
        self._pool.continue_zygote()
        self._pool.reap_orphans()
        self._display.beat(self.by_rank.values(), self._coordinates)
        table = self.table()
        if self._leases is not None and self._active:
            self._leases.beat(table, self._journal_io.needed, self.clock.now())
            for other in self._leases.tables.values():
                table.update(other)
        if self._coordinates:
            self._hang_arbiter.consider(table)
            self._quarantines.consider(table)

    def table(self) -> Table:
        """The activities of this node's workers, and for how long each has not changed."""
        rows = {}
        for worker in self.by_rank.values():
            idle = self._watch.idle(worker)
            # Reports of a node go together: a rank that has reported waits for the other ranks, and is not hung.
            # One that has come to the end of the training runs the rest of the user's program.
            done = self._worker_messages.reported(worker.rank) or worker.slot.finished() is not None
            if idle is not None and done:
                idle = msgspec.structs.replace(idle, seconds=0.0)
            if idle is not None:
                rows[worker.rank] = (worker.incarnation, idle)
        return rows

    def _table_now(self) -> Table:
        """The same after another look: a worker may have started since the last one."""
        self._look()
        return self.table()

    def _pids(self) -> dict[int, int]:
        return {rank: worker.pid for rank, worker in self.by_rank.items()}

    @property
    def _coordinates(self) -> bool:
        """True while this agent decides and speaks for the job."""
        return self.state.coordinator() == self.node and self._active

    @property
    def _holds_place(self) -> bool:
        """True while the other agents take this one, and no other, for this node's."""
        return self._mine.agent == self.members.agent

    def _show_up(self) -> None:
        """From here on this agent counts: the place is its own."""
        if self._leases is not None and self._presence is not None:
            self._leases.start()
            self._presence.start(self.members.master_addr, self.members.address)

    def _node_lost(self, node: int, epoch: int, why: str) -> None:
        if self.state.lives(node, epoch) and self._active:
            self.append(NodeLost(node, epoch, why, self.clock.now()))

    def _start_when_leased(self, incarnation: Callable[[int], int]) -> None:
        """Start the ranks of this node as soon as the store has acknowledged a renewal of the node's lease.

        A worker without a lease would go on if its agent were stopped right after the start. ``incarnation(rank)``.
        """

        def start() -> None:
            for rank in self._mine.ranks:
                self._respawn.start(rank, incarnation(rank))

        if self._leases is None:
            start()
            return
        self._start_workers = start
        self._beat()

    def _extend_leases(self, until_ns: int) -> None:
        self._pool.extend_leases(until_ns)
        # The renewal of an agent that was stopped may be an old one.
        if self._start_workers is not None and self._pool.lease_left() > self.timing.fence / 2:
            start, self._start_workers = self._start_workers, None
            start()

    # -- what workers do ------------------------------------------------------------

    def said(self, worker: Worker, message: FromWorker) -> None:
        """A message of a worker. Raises :class:`ProtocolError` where it speaks for another rank."""
        self._worker_messages.said(worker, message)

    def _leaving(self, worker: Worker) -> None:
        """The process may hang during exit and block its peers. Before that, the user's program may work on."""
        if self.by_rank.get(worker.rank) is not worker:
            return
        if self.job.kind != "program" and not worker.slot.program_over():
            self._loop.after(self.timing.look, lambda: self._leaving(worker))
        else:
            self._loop.after(self.job.shutdown_timeout, lambda: self._end_finished(worker))

    def _end_finished(self, worker: Worker) -> None:
        if self.by_rank.get(worker.rank) is worker:
            seconds = f"{self.job.shutdown_timeout:.0f} s (--shutdown-timeout)"
            say(f"rank {worker.rank} did not end within {seconds} of the end of its program: it is killed")
            self._pool.kill(worker, "hung after its end")

    def ended(self, worker: Worker, status: int) -> None:
        """A worker's program has ended; its process may still be on its way out."""
        if self.by_rank.get(worker.rank) is worker:
            self._sources.meter.look([worker])
            del self.by_rank[worker.rank]
        if self.exit_code is None:
            lines = self._logs.last_lines(worker.local_rank)
            elastic = worker.elastic or self.job.elastic
            begun = self.state.decided > 0 and not self.state.preparing
            event = classify(worker, status, self._mine.host, begun, elastic, lines, self.clock.now())
            unsaid = input_error(worker)
            if isinstance(event, JobEnded) and unsaid:
                late = msgspec.structs.replace(event, why=f"{event.why}\nerror: {unsaid}")
                self._loop.after(_FIRST_RANK_SECONDS, lambda: self._end_unless_over(late))
            else:
                self.append(event)

    def _end_unless_over(self, event: JobEnded) -> None:
        if self.exit_code is None:
            self.append(event)

    def zygote_lost(self, was_ready: bool) -> None:
        """Its workers are lost with it; a new one takes over for the next."""
        if not was_ready:
            why = "the process that forks this node's workers failed to import their modules: try --preload none"
            self.append(JobEnded(1, why))
            return
        say(
            f"node {self.node}: the process that forks this node's workers was lost, "
            "and its workers with it; all are started again"
        )
        self._pool.replace_zygote()

    # -- what the journal says --------------------------------------------------------

    def _deliver(self, position: int, entry: Event | None) -> None:
        self._next_position = position + 1
        if entry is None or self.exit_code is not None:
            return
        for event in self.state.events_of(entry):
            self._take_in(event)
            if self.state.over():
                break
        self._own_events.seen()
        self._decide_if_ready()
        if self.state.over():
            self._finish()
        elif self._active:
            self._journal_trimming.read(self._journal_io.mark, self._journal_io.needed)

    def _take_in(self, event: Event) -> None:
        frozen, decided = self.state.frozen, self.state.decided
        if isinstance(event, NodeLost) and not self.state.lives(event.node, event.epoch):
            return
        if isinstance(event, Lost | NodeLost):
            self.clock.hear(event.at)
        if isinstance(event, NodeLost) and event.node == FIRST and self._presence is not None:
            self._presence.call_again()  # a stopped process keeps its connections, and hears nothing
            self._own_events.way_lost()
        known = len(self.state.losses)
        self.state.apply(event)
        self._history.follow(event, self.state)
        self._display.follow(self._coordinates)
        self._conditions.follow()
        if self.state.frozen != frozen:
            self._worker_messages.begin()
            if self.state.fresh:
                self._respawn.end_newcomers()
        if self._active:
            self._react(event, self.state.losses[known:])
        elif not self._mine.alive or isinstance(event, NodeBack):
            self._return(event)
        self._quarantines.follow(event)
        for worker in list(self.by_rank.values()):
            self._notify(worker)
        if self.state.decided != decided and self.state.decision is not None:
            self._respawn.admitted(self.state.decision)
        self._worker_messages.report_if_complete()

    def _react(self, event: Event, lost: Sequence[Loss]) -> None:
        """``lost``: the processes that ``event`` lost."""
        if isinstance(event, NodeLost):
            self._respawn.record_node(lost, event.at)
        match event:
            case Lost():
                self._respawn.record_losses(event)
            case NodeLost(node=node) if node == self.node:
                self._given_up()
                self._return(event)
            case NodeLost(node=node) if self.state.coordinator() == self.node:
                host, ranks = self.state.nodes[node].host, list(self.state.nodes[node].ranks)
                say(f"lost node {node} ({host}) with ranks {ranks}: {event.why}")
                self._respawn.start_anew_unless_begun(ranks[0])
                if self.state.decided == 0 and ranks[0] < self.state.nominal:
                    why = f"node {node} was lost before the job had started: it ends"
                    self.append(JobEnded(ExitCode.STATE_LOST, why))
            case NodeBack() if self._leases is not None:
                self._leases.trust(event.node)
            case Suspected():
                self._look_into(event)
            case Condemned() if event.rank in self.by_rank:
                if self.by_rank[event.rank].incarnation == event.incarnation:
                    self._pool.kill(self.by_rank[event.rank], event.why)
            case Abandoned() if set(event.ranks) & set(self._mine.ranks):
                say(f"ranks {list(event.ranks)} are not started again: {event.why}")
            case Readmitted():
                self._respawn.start_lost()

    def _look_into(self, event: Suspected) -> None:
        """Ask the kernel whether the suspect is dead, the usual cause of a broken link, before the suspicion counts."""
        state = self.state.ranks.get(event.rank)
        if state is None or state.incarnation != event.incarnation or event.generation != self.state.decided:
            return
        if event.rank in self._mine.ranks:
            worker = self.by_rank.get(event.rank)
            if worker is None and state.standing == "done" and not state.announced:
                loss = Loss(event.rank, event.incarnation, self._mine.host, "exit code 0", ending=Ending.LEFT)
                self.append(Lost((loss,), (-1,), self.clock.now()))
            elif worker is not None and process_state(worker.pid) == "T":
                self._pool.kill(worker, "stopped")
        if self.state.coordinator() == self.node:
            self._hang_arbiter.hear(event)

    def _say(self, body: bytes) -> bool:
        return self._presence is not None and self._presence.say(body)

    def _worker_opened(self, worker: Worker) -> None:
        self._pool.watch_lock(worker)
        self._notify(worker)

    def _notify(self, worker: Worker) -> None:
        notify_worker(self.state, worker, self._pool.tell)

    def _decide_if_ready(self) -> None:
        state = self.state
        if state.ready() and state.coordinator() == self.node and self._tried_position != self._next_position:
            self._tried_position = self._next_position
            self._journal_io.append_at(self._next_position, Decided(state.frozen, self.node))

    # -- coming back ------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Start from the newest snapshot of the journal, or from its begin."""
        mark = BEGIN
        try:
            mark = self._journal_trimming.resume()
        except StoreLost as error:
            self._store_lost(str(error))
        self._next_position, self._tried_position = mark.position, -1
        self._journal_io.start(mark)

    def _left_behind(self) -> None:
        """The others gave this node up while its agent did not run, so long ago that the journal does not tell."""
        self._given_up()
        self._catch_up()
        self._return(None)
        self._place_wait.start()

    def _given_up(self) -> None:
        if self._active:
            say(f"node {self.node}: the other nodes count this node as lost; its workers are killed and started again")
        self._active, self._start_workers = False, None
        for worker in list(self._pool.workers.values()):
            self._pool.kill(worker, "node given up")

    def _return(self, event: Event | None) -> None:
        """Take this node's place once the others know that former workers of it, if any, are gone."""
        if not self._mine.alive:
            if self._back_asked <= self._mine.epoch:
                self._back_asked = self._mine.epoch + 1
                self.append(NodeBack(self.node, self._back_asked, self.members.host, self.members.agent))
        elif isinstance(event, NodeBack) and event.node == self.node:
            if not self._holds_place:  # another one was first; the journal may go on with its loss
                self._place_wait.start()
                return
            self._active = True
            self._show_up()
            self._start_when_leased(lambda rank: self.state.ranks[rank].incarnation + 1)

    # -- the end --------------------------------------------------------------------------

    def _finish(self) -> None:
        self._respawn.close()
        ended = self.state.ended
        named = None if ended is None else (ended.code, ended.why)
        self.exit_code, why = exit_status(named, self.state.codes(), self._failures.verdict, self.state.stopping)
        if self.state.coordinator() in (self.node, None):
            self._display.end(self.exit_code, why)
            if why:
                say(*_head_and_rest(why))
        self._loop.stop()

    def _store_lost(self, why: str) -> None:
        if self.exit_code is None:
            say(
                f"{self.members.store.keeper} cannot be reached ({why}): the job "
                "ends; resume from its last checkpoint (--load)"
            )
            for worker in self._pool.workers.values():
                if worker.elastic:
                    text = "the job's store cannot be reached any more; this process ends"
                    self._pool.tell(worker, End(ExitCode.STATE_LOST, text))
            self._leases = None
            self._display.end(ExitCode.STATE_LOST, f"{self.members.store.keeper} cannot be reached")
            self._stop(ExitCode.STATE_LOST)

    def _stop(self, code: int) -> None:
        if self.exit_code is None:
            self.exit_code = code
            self._respawn.close()
            self._loop.stop()

    def _leave(self) -> None:
        """Everything of this node ends; the first agent stays until the others have read the journal's end."""
        self._display.close()
        self._conditions.close()
        self._pool.close()
        self._display.wait()
        self._logs.close()
        self._spawner.sweep(self._holds_place)
        if self._leases is not None and self._holds_place:
            self._leases.take_leave(_LEAVE_SECONDS)
        self.members.store.close()


def _head_and_rest(text: str) -> tuple[str, list[str]]:
    head, *rest = text.split("\n")
    return head, rest
