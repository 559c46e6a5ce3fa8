"""One node's agent: joins the journal's truth with the workers' processes.

Everything it hears from its workers becomes an event in the journal, and
everything it does to them follows from the state after an entry of the journal
(:class:`Generations`), so all agents act alike. It never waits: not for a worker,
not for the store.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from megatron.elastic.control import env
from megatron.elastic.control.events import (
    Decided,
    Ended,
    Entry,
    Event,
    Finished,
    Lost,
    Reported,
    Requested,
    Waiting,
    Wanted,
)
from megatron.elastic.control.generations import Generations
from megatron.elastic.control.membership import Loss
from megatron.elastic.control.slot import Slot
from megatron.elastic.control.wire import (
    Message,
    ProtocolError,
    address_from_json,
    as_object,
    decision_to_json,
    take_int,
    take_str,
)
from megatron.elastic.launch.arguments import Job
from megatron.elastic.launch.couriers import Couriers
from megatron.elastic.launch.loop import Loop
from megatron.elastic.launch.pool import Pool, Worker
from megatron.elastic.launch.processes import describe_status
from megatron.elastic.launch.rendezvous import Company
from megatron.elastic.launch.worker import WorkerSpec

__all__ = ["Agent"]

_STATE_LOST, _DETERMINISTIC = 4, 5


class Agent:
    """See the module docstring. Made before the rendezvous, so that the zygote preloads meanwhile."""

    def __init__(self, job: Job, loop: Loop, pool: Pool, company: Company) -> None:
        self.job = job
        self.company = company
        self.state = Generations(company.nodes, respawn=job.settings.respawn)
        self.exit_code: int | None = None
        self._loop = loop
        self._pool = pool
        self._node = company.nodes[job.node]
        self._couriers = Couriers(loop, company.store, company.seal, self._deliver, self._store_lost)
        self._next_position = 0
        self._tried_position = -1
        self._entries: dict[int, Entry] = {}
        self._reported = 0
        self._numbers = 0
        self._signals = 0
        self._by_rank: dict[int, Worker] = {}

    # -- life -------------------------------------------------------------------

    def run(self) -> int:
        """Start the workers, serve until the job is over, return its exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.on_signal(number, self._signalled)
        self._couriers.start()
        for rank in self._node.ranks:
            self._spawn(rank, 0)
        self._loop.run()
        return self.exit_code if self.exit_code is not None else _STATE_LOST

    def _spawn(self, rank: int, incarnation: int) -> None:
        self._numbers += 1
        mine, theirs = socket.socketpair()
        slot_fd, slot = Slot.create(f"elastic-slot-{rank}")
        local = rank - self._node.ranks[0]
        worker = Worker(self._numbers, rank, local, incarnation, mine, slot)
        spec = WorkerSpec(
            self._numbers, self.job.kind, self.job.target, self.job.arguments, self._environ(worker), self.job.adapt
        )
        self._by_rank[rank] = worker
        self._pool.fork(spec, worker, slot_fd, theirs, os.dup(1), os.dup(2))

    def _environ(self, worker: Worker) -> dict[str, str]:
        world = len(self.state.ranks)
        job = self.job
        return {
            "RANK": str(worker.rank),
            "LOCAL_RANK": str(worker.local_rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(job.workers),
            "GROUP_RANK": str(job.node),
            "GROUP_WORLD_SIZE": str(job.nodes),
            "ROLE_RANK": str(worker.rank),
            "ROLE_NAME": job.role,
            "ROLE_WORLD_SIZE": str(world),
            "MASTER_ADDR": self.company.master_addr,
            "MASTER_PORT": str(self.company.master_port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
            "TORCHELASTIC_RUN_ID": job.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            env.SECRET: self.company.secret,
            env.RUN_ID: job.run_id,
            env.INCARNATION: str(worker.incarnation),
            env.HOST: self._node.host,
            env.NODE: str(job.node),
            env.SEGMENT_PREFIX: self._segment_prefix(),
        }

    def _segment_prefix(self) -> str:
        return f"mel-{self.company.seal.sign('segments', self.job.run_id)[:12].decode()}-{self.job.node}-"

    # -- what workers do ------------------------------------------------------------

    def said(self, worker: Worker, message: Message) -> None:
        """A message of a worker. Raises :class:`ProtocolError` for anything malformed."""
        kind = take_str(message, "t")
        if kind == "hello":
            worker.elastic = True
            self._update(worker)
        elif kind == "report":
            self._take_report(worker, message)
        elif kind == "request":
            self._couriers.append(Requested(take_str(message, "what"), (worker.rank,), take_int(message, "g")))
        elif kind == "suspect":
            self._take_suspicion(worker, message)
        elif kind != "finish":
            raise ProtocolError(f"unknown message {kind!r}")

    def _take_report(self, worker: Worker, message: Message) -> None:
        address = address_from_json(as_object(message.get("address")))
        if (address.rank, address.incarnation) != (worker.rank, worker.incarnation):
            raise ProtocolError(f"an address of rank {address.rank} from rank {worker.rank}")
        entry = Entry(address, take_str(message, "report"))
        generation = take_int(message, "g")
        if generation == 0:
            self._couriers.append(Waiting((entry,)))
        elif generation == self.state.frozen:
            self._entries[worker.rank] = entry
            self._report_if_complete()

    def _report_if_complete(self) -> None:
        """One entry for all of this node's members, once all have reported."""
        state = self.state
        mine = [rank for rank in self._node.ranks if rank in state.members]
        if state.quiet or self._reported == state.frozen or not mine:
            return
        if all(rank in self._entries for rank in mine):
            self._reported = state.frozen
            self._couriers.append(Reported(state.frozen, tuple(self._entries[rank] for rank in mine)))

    def _take_suspicion(self, worker: Worker, message: Message) -> None:
        take_int(message, "rank")

    def ended(self, worker: Worker, status: int) -> None:
        """A worker's process is gone."""
        if self._by_rank.get(worker.rank) is worker:
            del self._by_rank[worker.rank]
        if self.exit_code is not None:
            return
        announced = worker.slot.finished()
        if announced is not None or status == 0:
            code = announced if announced is not None else 0
            self._couriers.append(Finished(worker.rank, worker.incarnation, code, announced is not None))
        elif not worker.elastic and self.state.decided == 0 and not os.WIFSIGNALED(status):
            code = os.waitstatus_to_exitcode(status)
            self._couriers.append(Ended(code, f"rank {worker.rank} ended with exit code {code} before it took part"))
        elif not worker.elastic and not self.job.elastic:
            self._couriers.append(Ended(1, f"rank {worker.rank} ended: {describe_status(status)}"))
        else:
            self._couriers.append(Lost((self._loss(worker, status),)))

    def _loss(self, worker: Worker, status: int) -> Loss:
        cause = worker.doomed or describe_status(status)
        lines = tuple(worker.slot.last_words().splitlines()[-20:])
        return Loss(worker.rank, worker.incarnation, self._node.host, cause, lines)

    def zygote_lost(self) -> None:
        """Its workers are lost with it; a new one takes over for the next."""
        self._pool.start_zygote()

    # -- what the journal says --------------------------------------------------------

    def _deliver(self, position: int, event: Event | None) -> None:
        self._next_position = position + 1
        if event is None or self.exit_code is not None:
            return
        frozen = self.state.frozen
        self.state.apply(event)
        if self.state.frozen != frozen:
            self._entries.clear()
        if isinstance(event, Lost):
            self._mourn(event)
        for worker in list(self._by_rank.values()):
            self._update(worker)
        self._report_if_complete()
        self._decide_if_ready()
        if self.state.over():
            self._finish()

    def _update(self, worker: Worker) -> None:
        """Tell one worker what it does not know yet."""
        state = self.state
        rank_state = state.ranks[worker.rank]
        if not worker.elastic or rank_state.incarnation != worker.incarnation:
            return
        if rank_state.standing == "member" and state.frozen > max(worker.sent_frozen, state.decided):
            worker.sent_frozen = state.frozen
            self._pool.tell(worker, {"t": "freeze", "g": state.frozen})
        decision = state.decision
        if decision is not None and decision.generation > worker.sent_decided and worker.rank in decision.members:
            if decision.members[worker.rank].incarnation == worker.incarnation:
                worker.sent_decided = decision.generation
                self._pool.tell(worker, {"t": "decision", "decision": decision_to_json(decision)})
        pending = state.pending()
        if rank_state.standing == "member" and pending != worker.sent_pending:
            worker.sent_pending = pending
            self._pool.tell(worker, {"t": "pending", "what": list(pending)})

    def _decide_if_ready(self) -> None:
        state = self.state
        if state.ready() and state.coordinator() == self.job.node and self._tried_position != self._next_position:
            self._tried_position = self._next_position
            self._couriers.append_at(self._next_position, Decided(state.frozen, self.job.node))

    def _mourn(self, event: Lost) -> None:
        for loss in event.losses:
            rank_state = self.state.ranks[loss.rank]
            if loss.rank not in self._node.ranks:
                continue
            print(
                f"[launch] lost rank {loss.rank} (incarnation {loss.incarnation}) on {loss.host}: {loss.cause}",
                *(f"    {line}" for line in loss.last_lines),
                sep="\n",
                file=sys.stderr,
                flush=True,
            )
            if rank_state.may_return and rank_state.standing == "lost" and loss.rank not in self._by_rank:
                self._spawn(loss.rank, loss.incarnation + 1)

    # -- the end --------------------------------------------------------------------------

    def _finish(self) -> None:
        ended = self.state.ended
        if ended is not None:
            self.exit_code = ended.code
            if self.job.node == 0 or ended.code:
                print(f"[launch] {ended.why}", file=sys.stderr, flush=True)
        else:
            codes = self.state.codes()
            self.exit_code = next((code for code in (5, 4, 1, 3) if code in codes), max(codes, default=_STATE_LOST))
        self._loop.stop()

    def _store_lost(self, why: str) -> None:
        if self.exit_code is None:
            print(
                f"[launch] the first agent, which holds the store, is gone ({why}): "
                "the job ends at its last checkpoint",
                file=sys.stderr,
                flush=True,
            )
            self.exit_code = _STATE_LOST
        self._loop.stop()

    def _signalled(self, number: int) -> None:
        self._signals += 1
        if self._signals > 1 or not any(worker.elastic for worker in self._by_rank.values()):
            self.exit_code = 128 + number
            self._loop.stop()
            return
        self._couriers.append(Wanted("drain"))

        def give_up() -> None:
            if self.exit_code is None:
                self.exit_code = 128 + number
                self._loop.stop()

        self._loop.after(self.job.shutdown_timeout, give_up)

